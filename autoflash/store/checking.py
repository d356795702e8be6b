"""Whether a database is sound, and what in it belongs to nothing."""

from dataclasses import dataclass

from autoflash.store.opening import told
from autoflash.store.store import Store

# Who refers to a row of a table. What an export or a profile of shipped winners brings is theirs.
REFERENCES = {
    "gpus": ("gpu_id FROM runs", "gpu_id FROM exported_problems", "gpu_id FROM profiles"),
    "toolchains": (
        "toolchain_id FROM runs",
        "toolchain_id FROM exported_problems",
        "toolchain_id FROM profiles",
    ),
    "problems": (
        "problem_id FROM run_problems",
        "problem_id FROM trials",
        "problem_id FROM decisions",
        "problem_id FROM exported_problems",
        "problem_id FROM profiles",
    ),
    "configs": (
        "config_id FROM trials",
        "winner_config_id FROM decisions",
        "default_config_id FROM decisions",
        "config_id FROM exported_problems",
        "config_id FROM profiles",
    ),
    "kernels": ("kernel_id FROM trials", "kernel_id FROM decisions", "kernel_id FROM profiles"),
}
# Rows that nothing refers to do no harm: an interrupted tune leaves some.
ORPHANS = {
    **{
        f"{table} of nothing": f"{table} WHERE id NOT IN (SELECT {' UNION SELECT '.join(columns)})"
        for table, columns in REFERENCES.items()
    },
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
