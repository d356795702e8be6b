"""The database: what was tried, what was decided, and the winners shipped with autoflash."""

from autoflash.store.paths import default_path, tunedb_dir, users_database
from autoflash.store.skipping import StoreWarning
from autoflash.store.store import (
    Store,
    load_winners,
    overlaid_winners,
    shipped_store,
    shipped_winners,
)
from autoflash.store.winners import dump_winners, read_winners

__all__ = [
    "Store",
    "StoreWarning",
    "default_path",
    "dump_winners",
    "load_winners",
    "overlaid_winners",
    "read_winners",
    "shipped_store",
    "shipped_winners",
    "tunedb_dir",
    "users_database",
]
