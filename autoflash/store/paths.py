"""Where the database and the shipped winners lie."""

import os
from pathlib import Path

from autoflash.errors import StoreError


def default_path() -> Path:
    """`$AUTOFLASH_DB`, else `autoflash.db` in the user's data folder.

    Raises StoreError where the user has no folder of their own.
    """
    chosen = os.environ.get("AUTOFLASH_DB")
    if chosen:
        return Path(chosen).expanduser()
    import platformdirs

    folder = Path(platformdirs.user_data_dir("autoflash", appauthor=False))
    if not folder.is_absolute():  # without a home, "~" stays as it is
        raise StoreError("this user has no home folder: give --db or set AUTOFLASH_DB")
    return folder / "autoflash.db"


def users_database() -> Path | None:
    """The database at `default_path` if it is there and its folder may be looked into."""
    try:
        path = default_path()
        return path if path.exists() else None
    except (StoreError, PermissionError):
        return None


def tunedb_dir() -> Path:
    """The tunedb beside a checkout's pyproject.toml, else the one shipped in the package."""
    package = Path(__file__).resolve().parents[1]
    if (package.parent / "pyproject.toml").is_file():
        return package.parent / "tunedb"
    return package / "_tunedb"
