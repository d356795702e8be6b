"""The canned questions of tunedb/datasette.yaml, each answered; by Datasette too, where it is."""

import asyncio
import importlib.metadata
import sqlite3
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from store_samples import A100, OLDER, PROBLEM, config, decision, exported, run, trial

from autoflash.records import Resources
from autoflash.store import Store, tunedb_dir

CONFIG = yaml.safe_load((tunedb_dir() / "datasette.yaml").read_text())
((NAME, DATABASE),) = CONFIG["databases"].items()
OTHER = replace(PROBLEM, batch=8)
FAR = replace(trial().config, knobs=(*config(2).knobs[:-2], ("num_stages", 2), ("num_warps", 4)))


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    """A search on an H200, a second run, one with an older triton, one on an A100; an export."""
    path = tmp_path_factory.mktemp("datasette") / f"{NAME}.db"
    with Store.open(path) as store:
        first, second = run(store), run(store)
        spilling = Resources(registers=255, spill_bytes=40, smem_bytes=1024)
        store.record_trial(first, trial(us=8.0, resources=spilling))
        store.record_trial(first, trial(OTHER, us=20.0, resources=spilling))
        store.record_trial(first, trial(us=10.0, place=1))
        store.record_trial(first, trial(us=1.0, place=1, regime="eager"))
        store.record_trial(first, replace(trial(us=16.0), config=FAR))
        store.record_trial(first, trial(us=None, place=3, status="compile", error="no"))
        store.record_decision(first, decision(us=8.0))
        store.record_decision(first, decision(OTHER, us=20.0))
        store.record_decision(second, decision(us=6.0, place=1))
        store.record_decision(run(store, toolchain=OLDER), decision(us=12.0))
        store.record_decision(run(store, A100), decision(us=24.0))
        store.record_export("5d" * 32, 4, [exported()])
    return path


def asked(file: Path, question: str, **values: Any) -> list[dict[str, Any]]:
    """What the SQL of a question gives."""
    with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as conn:
        conn.row_factory = sqlite3.Row
        found = [dict(row) for row in conn.execute(DATABASE["queries"][question]["sql"], values)]
    conn.close()
    return found


# The values given to each question, and one row of the answer in part.
ANSWERS = {
    "winners_of_a_gpu": ({"gpu": "A100"}, {"op": "decode", "winner_us": 24.0}),
    "best_configs": ({"op": "decode"}, {"place": 1, "best_us": 8.0}),
    "failures": ({}, {"status": "compile", "reason": "no", "trials": 1}),
    "spilling_winners": ({}, {"batch": 8, "spill_bytes": 40, "registers": 255}),
    "gpus_compared": ({"first": "A100", "second": "H200"}, {"first_us": 24.0, "ratio": 0.5}),
    "tritons_compared": (
        {"first": "3.5.1", "second": "3.6.0"},
        {"first_us": 12.0, "second_us": 6.0, "ratio": 0.5, "same_knobs": 0},
    ),
    "runs_compared": ({"first": 1, "second": 2}, {"first_us": 8.0, "ratio": 0.75}),
    "knobs": (
        {},
        {"knob": "num_warps", "value": 2, "problems": 1, "best_of": 0, "loses_percent": 25.0},
    ),
    "neighbours": ({"decision": 1}, {"knob": "num_warps", "instead": 2, "us": 10.0}),
    "anytime_of_a_run": ({"run": 1}, {"best_us": 8.0, "op": "decode"}),
    "exports": ({}, {"module": "5d" * 6, "problems": 1, "worst_unseen_loses_percent": 50.0}),
    "waiting": ({}, {"gpu": "NVIDIA H200", "runs": 1, "trials": 6}),
}


def test_every_question_is_asked_here():
    assert set(ANSWERS) == set(DATABASE["queries"])


@pytest.mark.parametrize(("question", "values", "part"), [(q, *a) for q, a in ANSWERS.items()])
def test_a_question_is_answered(file, question, values, part):
    found = asked(file, question, **values)
    assert any(part.items() <= row.items() for row in found), found


def test_only_the_latest_winner_that_spills_is_told(file):
    """The winner at batch 1 spilled too, and a later run's does not."""
    assert [row["batch"] for row in asked(file, "spilling_winners")] == [8]


def test_only_what_differs_as_asked_is_compared(file):
    """The A100's newer triton is not compared with the H200's older one, nor a GPU with itself."""
    assert len(asked(file, "tritons_compared", first="3.5.1", second="3.6.0")) == 1
    every = asked(file, "gpus_compared", first="NVIDIA", second="NVIDIA")
    assert every and all(row["first"] != row["second"] for row in every)


def test_neighbours_are_one_knob_away_and_failures_have_no_time(file):
    found = asked(file, "neighbours", decision=1)
    assert [(row["instead"], row["status"], row["us"]) for row in found] == [
        (8, "compile", None),
        (2, "correct", 10.0),
    ]


def test_every_facet_is_a_column(file):
    with sqlite3.connect(file) as conn:
        for table, shown in DATABASE["tables"].items():
            columns = {row[1] for row in conn.execute(f"PRAGMA table_info({table})")}
            assert set(shown["facets"]) <= columns
    conn.close()


@pytest.fixture(scope="module")
def pages(file):
    """What a real Datasette serves at some paths: status and body."""
    app = pytest.importorskip("datasette.app")
    newer = not importlib.metadata.version("datasette").startswith("0.")

    async def served(paths: list[str]) -> list[Any]:
        told = {"config" if newer else "metadata": CONFIG}
        client = app.Datasette([str(file)], **told).client
        return [await client.get(path) for path in paths]

    questions = [
        f"/{NAME}/{question}.json?_shape=array&"
        + "&".join(f"{name}={value}" for name, value in values.items())
        for question, (values, _) in ANSWERS.items()
    ]
    tables = [f"/{NAME}/{table}" for table in DATABASE["tables"]]
    answers = asyncio.run(served(questions + tables))
    return dict(zip([*ANSWERS, *DATABASE["tables"]], answers, strict=True))


@pytest.mark.parametrize("question", ANSWERS)
def test_datasette_answers_as_sqlite_does(file, pages, question):
    assert pages[question].status_code == 200
    assert pages[question].json() == asked(file, question, **ANSWERS[question][0])


@pytest.mark.parametrize("table", DATABASE["tables"])
def test_datasette_shows_the_tables_with_their_facets(pages, table):
    assert pages[table].status_code == 200
    for facet in DATABASE["tables"][table]["facets"]:
        assert f"_facet={facet}" in pages[table].text or f'id="facet-{facet}' in pages[table].text
