"""Winners as JSONL and as layers: lossless, the same bytes, the user's over the shipped."""

import json
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_samples import A100, H200, OLDER, PROBLEM, TOOLCHAIN, config, decision, run, winner
from store_strategies import winners

from autoflash import store as stores
from autoflash.errors import StoreError
from autoflash.records import Winner
from autoflash.store import (
    Store,
    StoreWarning,
    dump_winners,
    load_winners,
    overlaid_winners,
    read_winners,
    shipped_winners,
    tunedb_dir,
)
from autoflash.store.overlay import overlay
from autoflash.store.reading import winner_order
from autoflash.store.winners import lines

OTHER = replace(PROBLEM, batch=8)


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "autoflash.db") as store:
        yield store


def key(each: Winner):
    return (each.gpu.identity, each.toolchain, each.decision.problem, each.decision.source)


@settings(deadline=None, max_examples=25)
@given(held=st.lists(winners(), max_size=4, unique_by=(key, lambda each: each.gpu.slug)))
def test_winners_survive_file_and_database_to_the_bit(tmp_path_factory, held):
    folder = tmp_path_factory.mktemp("winners")
    files = dump_winners(held, folder)
    assert [read_winners(file) for file in files] == [
        [each] for each in sorted(held, key=lambda each: each.gpu.slug)
    ]
    with Store.open(folder / "autoflash.db") as store:
        assert [load_winners(store, file) for file in files] == [1] * len(held)
        assert store.winners() == sorted(held, key=winner_order)
        again = dump_winners(store.winners(), folder / "again")
    assert [file.name for file in again] == [file.name for file in files]
    assert [file.read_bytes() for file in again] == [file.read_bytes() for file in files]


def many():
    problems = [replace(PROBLEM, batch=batch) for batch in range(1, 9)]
    sources = ("measured", "predicted")
    return [
        winner(H200, toolchain, problem=problem, source=source)
        for problem in problems
        for toolchain in (TOOLCHAIN, OLDER)
        for source in sources
    ]


def test_the_order_of_winners_does_not_change_a_byte(tmp_path):
    held = many()
    (file,) = dump_winners(held, tmp_path / "a")
    random.Random(1).shuffle(held)
    (other,) = dump_winners(held, tmp_path / "b")
    assert file.read_bytes() == other.read_bytes()
    text = file.read_text()
    assert text.count("\n") == len(held) and text.endswith("}\n")
    assert all(json.dumps(json.loads(line), sort_keys=True) for line in text.splitlines())
    first = json.loads(text.splitlines()[0])
    assert list(first) == sorted(first) and first["problem"]["batch"] == 1


def test_there_is_one_file_for_each_gpu_name(tmp_path):
    smaller = replace(H200, memory_gib=70)
    files = dump_winners([winner(H200), winner(A100), winner(smaller)], tmp_path)
    assert [file.name for file in files] == ["NVIDIA_A100_SXM4_80GB.jsonl", "NVIDIA_H200.jsonl"]
    assert [each.gpu for each in read_winners(files[1])] == [smaller, H200]


def test_a_dump_leaves_rows_of_others_in_the_file_as_they_are(tmp_path):
    theirs = [
        winner(H200, OLDER),
        winner(replace(H200, num_sms=114)),
        winner(problem=OTHER),
        winner(source="predicted"),
    ]
    dump_winners([*theirs, winner(us=7.0)], tmp_path)
    (file,) = dump_winners([winner(us=5.0)], tmp_path)
    assert set(read_winners(file)) == {*theirs, winner(us=5.0)}


def test_loading_twice_adds_nothing(store, tmp_path):
    (file,) = dump_winners(many(), tmp_path)
    assert [load_winners(store, file) for _ in range(2)] == [len(many()), 0]
    assert len(store.winners()) == len(many())


def test_what_is_loaded_does_not_hide_a_later_decision_of_the_users(store, tmp_path):
    store.record_decision(run(store), decision(us=5.0))
    (file,) = dump_winners([winner(us=7.0)], tmp_path)
    assert load_winners(store, file) == 1
    assert [each.decision.winner_us for each in store.winners()] == [5.0]


def test_nothing_is_half_written(tmp_path, monkeypatch):
    (file,) = dump_winners([winner(us=7.0)], tmp_path)
    before = file.read_bytes()
    monkeypatch.setattr(
        "pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(OSError(28, "full"))
    )
    with pytest.raises(StoreError, match=r"NVIDIA_H200.jsonl: cannot be written: full"):
        dump_winners([winner(us=5.0)], tmp_path)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


def test_a_folder_that_cannot_be_written_is_one_line():
    with pytest.raises(StoreError, match=r"^/dev/null/x/NVIDIA_H200.jsonl: cannot be written: "):
        dump_winners([winner()], stores.paths.Path("/dev/null/x"))


def test_a_line_that_is_no_json_is_named(tmp_path):
    path = tmp_path / "winners.jsonl"
    path.write_text(lines([winner()])[0] + "\n{half a line")
    with pytest.raises(StoreError) as refused:
        read_winners(path)
    assert str(refused.value).startswith(f"{path}: line 3: not JSON: ")


@pytest.mark.parametrize("content", [None, b"\xff\xfe\x00"], ids=["missing", "not text"])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path, content):
    path = tmp_path / "winners.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StoreError) as refused:
        read_winners(path)
    assert str(refused.value).startswith(f"{path}: ") and "\n" not in str(refused.value)


def changed(path, value):
    """The line of a winner with one value in it changed; None takes it away."""
    line = json.loads(lines([winner()])[0])
    held = line
    for name in path[:-1]:
        held = held[name]
    held[path[-1]] = value
    if value is None:
        del held[path[-1]]
    return json.dumps(line)


ODD_LINES = {
    "no object": ("[1]", "[1] is not an object"),
    "no GPU": (changed(("gpu",), None), "gpu is missing"),
    "a GPU that is null": ('{"gpu": null, ' + changed(("gpu",), None)[1:], "gpu is None"),
    "no time": (changed(("winner_us",), None), "winner_us is missing"),
    "a time that is text": (changed(("winner_us",), "7"), "winner_us is '7', not a finite number"),
    "an endless time": (changed(("winner_us",), float("inf")), "winner_us is inf, not a finite"),
    "a time of many digits": (changed(("winner_us",), 10**400), "winner_us is 1000"),
    "a finalist's endless time": (
        changed(("times",), [{"family": "decode", "knobs": config().as_dict(), "us": 1e999}]),
        "us is inf",
    ),
    "a count beyond 64 bits": (changed(("gpu", "num_sms"), 2**64), "num_sms is 18446744073709"),
    "a field of the future": (
        changed(("problem", "rotary"), 1),
        "rotary is not a field of Problem",
    ),
    "heads that do not divide": (changed(("problem", "num_heads"), 3), "num_heads 3 is not a mult"),
    "another family": (changed(("winner", "family"), "x"), "no family is called 'x'"),
    "a family that is a list": (changed(("winner", "family"), []), "no family is called []"),
    "no knobs": (changed(("winner", "knobs"), 3), "knobs are 3"),
    "tied with nothing": (changed(("tied",), [3]), "a config is 3"),
    "a time of nothing": (changed(("times",), [{}]), "a timed config is {}"),
    "a source that is none": (changed(("source",), "guessed"), "source is 'guessed'"),
}


@pytest.mark.parametrize(("line", "reason"), ODD_LINES.values(), ids=ODD_LINES)
def test_a_line_this_version_cannot_use_is_skipped_with_one_warning(tmp_path, line, reason):
    path = tmp_path / "winners.jsonl"
    path.write_text(f"{line}\n{lines([winner()])[0]}{line}\n")
    with pytest.warns(StoreWarning) as warned:
        assert read_winners(path) == [winner()]
    assert len(warned) == 1
    assert str(warned[0].message).startswith(f"{path}: 2 rows skipped: line 1: {reason}")


def test_a_line_without_what_has_a_default_is_read():
    line = json.loads(lines([winner()])[0])
    for name in ("deterministic", "lengths"):
        del line["problem"][name]
    assert stores.winners._from_object(line) == winner()


def test_the_users_rows_hide_the_shipped_of_the_same_gpu_and_problem():
    mine, shipped = winner(us=9.0), winner(us=5.0)
    elsewhere, other = winner(A100), winner(problem=OTHER)
    assert overlay([mine], [shipped, elsewhere, other]) == sorted(
        [mine, elsewhere, other], key=winner_order
    )


def test_the_users_rows_of_other_versions_hide_the_shipped_too():
    mine = [winner(toolchain=OLDER), winner()]
    assert overlay(mine, [winner(us=5.0)]) == mine


def test_a_predicted_row_hides_no_measured_one():
    guess, shipped = winner(source="predicted"), winner(us=9.0)
    assert overlay([guess], [shipped]) == [shipped]
    assert overlay([guess, winner(us=8.0)], [shipped]) == [winner(us=8.0)]
    assert overlay([guess], [winner(source="predicted", us=9.0)]) == [guess]


def test_another_type_of_the_same_name_hides_nothing():
    mine = winner(replace(H200, num_sms=114))
    assert set(overlay([mine], [winner()])) == {mine, winner()}


def test_overlaid_winners_are_the_users_over_the_shipped(store, monkeypatch, tmp_path):
    monkeypatch.setattr("autoflash.store.store.tunedb_dir", lambda: tmp_path)
    dump_winners([winner(us=5.0), winner(problem=OTHER)], tmp_path / "winners")
    assert shipped_winners() == overlaid_winners(None) == [winner(us=5.0), winner(problem=OTHER)]
    store.record_decision(run(store), decision(us=9.0))
    assert [each.decision.winner_us for each in overlaid_winners(store)] == [9.0, 7.5]


def test_without_shipped_winners_there_are_none(monkeypatch, tmp_path):
    monkeypatch.setattr("autoflash.store.store.tunedb_dir", lambda: tmp_path / "nowhere")
    assert shipped_winners() == []


@pytest.mark.filterwarnings("error")
def test_what_is_shipped_can_be_read_and_is_in_order():
    for file in (tunedb_dir() / "winners").glob("*.jsonl"):
        held = read_winners(file)
        assert held and {each.gpu.slug for each in held} == {file.stem}
        assert "".join(lines(held)) == file.read_text()
