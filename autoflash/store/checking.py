"""Whether a database is sound, and what in it belongs to nothing."""

from dataclasses import dataclass

from autoflash.store.opening import told
from autoflash.store.store import Store

# Rows that nothing refers to do no harm: an interrupted tune leaves some.
ORPHANS = {
    "gpus without a run": "gpus WHERE id NOT IN (SELECT gpu_id FROM runs)",
    "toolchains without a run": "toolchains WHERE id NOT IN (SELECT toolchain_id FROM runs)",
    "problems without a run": (
        "problems WHERE id NOT IN (SELECT problem_id FROM run_problems "
        "UNION SELECT problem_id FROM trials UNION SELECT problem_id FROM decisions)"
    ),
    "configs without a trial": (
        "configs WHERE id NOT IN (SELECT config_id FROM trials "
        "UNION SELECT winner_config_id FROM decisions "
        "UNION SELECT default_config_id FROM decisions)"
    ),
    "kernels without a trial": (
        "kernels WHERE id NOT IN (SELECT kernel_id FROM trials "
        "UNION SELECT kernel_id FROM decisions)"
    ),
    "runs without an end": "runs WHERE ended_at = ''",
}


@dataclass(frozen=True)
class Finding:
    """One thing that was counted; `bad` where any but none means a damaged file."""

    name: str
    count: int
    bad: bool = False
    detail: str = ""


def check(store: Store) -> list[Finding]:
    """What sqlite finds wrong, rows that refer to nothing, and rows that nothing refers to."""
    with told(store.path):
        damage = [text for (text,) in store.conn.execute("PRAGMA integrity_check")]
        damage = [text for text in damage if text != "ok"]
        dangling = store.conn.execute("PRAGMA foreign_key_check").fetchall()
        orphans = [
            Finding(name, store.conn.execute(f"SELECT count(*) FROM {rows}").fetchone()[0])
            for name, rows in ORPHANS.items()
        ]
    tables = ", ".join(sorted({row[0] for row in dangling}))
    return [
        Finding("damaged pages or rows", len(damage), bool(damage), "; ".join(damage[:1])),
        Finding("references to nothing", len(dangling), bool(dangling), tables),
        *orphans,
    ]
