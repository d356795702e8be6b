"""Export: which winners become rows, and what the module made of them chooses."""

import ast
import dataclasses
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from making import CHAIN, H200, backward_of, candidates, decode_of, prefill_of, winner_of

from autoflash.cli.export import export as command
from autoflash.config import Config
from autoflash.errors import ExportError
from autoflash.export import MOST_CONFIGS, export, write_module
from autoflash.families import FAMILIES, variants
from autoflash.gpu import known
from autoflash.render import render
from autoflash.runtime.device import Device
from autoflash.runtime.match import match_bucket, match_key, match_sizes
from autoflash.runtime.selection import Selector

DEVICE = Device(**{name: getattr(H200, name) for name in Device._fields})


def module_of(text: str) -> dict:
    """The exported module's namespace."""
    namespace: dict = {"__name__": "attention_dispatch"}
    sys.modules["attention_dispatch"] = type(sys)("attention_dispatch")
    exec(compile(text, "attention_dispatch.py", "exec"), namespace)
    return namespace


def selector_of(text: str) -> Selector:
    return module_of(text)["_selectors"][0]


def test_the_same_winners_give_the_same_bytes_in_any_order():
    winners = [winner_of(prefill_of(seqlen_q=n)) for n in (512, 1024)]
    winners += [winner_of(decode_of(page_size=size)) for size in (0, 16)]
    text = export(winners).text
    assert export(winners[::-1]).text == text
    assert text.isascii()
    ast.parse(text)


@pytest.mark.parametrize("make", [prefill_of, backward_of], ids=["prefill", "backward"])
@pytest.mark.parametrize("changed", [{"softcap": True}, {"layout": "thd"}], ids=str)
def test_values_of_another_width_with_modifiers_have_kernels_where_they_were_tuned(make, changed):
    p = make(head_dim=64, head_dim_v=32, **changed)
    selector = selector_of(export([winner_of(p)]).text)
    assert selector.choose(p, DEVICE).how == "exact"
    other = dataclasses.replace(p, sinks=True)
    assert (p.op, *other.switches) not in selector.tables.names


def test_texts_are_those_rendered_and_what_they_share_stands_once():
    winners = [winner_of(prefill_of(seqlen_q=n)) for n in (512, 1024, 2048)]
    text = export(winners).text
    texts = selector_of(text).tables.texts
    rendered = [render(each).text for each in variants(FAMILIES["prefill"]).values()]
    assert len(rendered) > 2 and set(rendered) <= set(texts.values())
    shared = "\ndef load_tile("
    assert sum(shared in each for each in texts.values()) > text.count(shared) > 0


def test_the_backward_is_carried_where_one_was_tuned_and_nowhere_else():
    forward = export([winner_of(prefill_of())]).text
    assert "def backward_kv_kernel(" not in forward
    assert ("backward",) not in selector_of(forward).tables.names
    both = export([winner_of(prefill_of()), winner_of(backward_of(causal=False))]).text
    selector = selector_of(both)
    kernel = "def backward_kv_kernel("
    carried = sum(kernel in text for text in selector.tables.texts.values())
    assert carried == len(variants(FAMILIES["backward"])) > 2
    assert selector.choose(backward_of(causal=False), DEVICE).how == "exact"
    untuned = selector.choose(backward_of(), DEVICE)
    assert (untuned.how, untuned.family) == ("default", "backward")
    assert selector.choose(prefill_of(causal=False), DEVICE).how == "default"  # of no forward


def test_what_was_tuned_over_pages_serves_pages_of_other_sizes_and_no_contiguous_keys():
    chunk = prefill_of(page_size=16, seqlen_k=4096, kv_layout="hnd")
    selector = selector_of(export([winner_of(chunk)]).text)
    assert selector.choose(chunk, DEVICE).how == "exact"
    near = selector.choose(dataclasses.replace(chunk, page_size=32, seqlen_k=3000), DEVICE)
    assert (near.how, near.family) == ("nearest", "prefill")
    for other in ({"kv_layout": "nhd"}, {"page_size": 0}, {"layout": "thd"}, {"head_dim_v": 32}):
        assert selector.choose(dataclasses.replace(chunk, **other), DEVICE).how == "default"


def test_the_module_needs_no_autoflash_and_starts_no_cuda(tmp_path):  # case B30
    path = tmp_path / "attention_dispatch.py"
    write_module(export([winner_of(prefill_of())]), path)
    script = (
        "import sys, torch; sys.modules['autoflash'] = None\n"
        "torch.cuda._lazy_init = lambda: sys.exit('importing the module starts CUDA')\n"
        "import attention_dispatch\n"
        "assert not torch.cuda.is_initialized()\n"
        "heavy = {'jinja2', 'sqlite_utils', 'typer', 'yaml', 'pydantic'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
        "print(attention_dispatch.coverage())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ran = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert "'default': 0" in ran.stdout


def test_an_exact_shape_is_served_by_its_winner():
    configs = candidates(prefill_of())
    winners = [
        winner_of(prefill_of(seqlen_q=512), configs[0]),
        winner_of(prefill_of(seqlen_q=4096), configs[1]),
    ]
    selector = selector_of(export(winners).text)
    for winner in winners:
        choice = selector.choose(winner.decision.problem, DEVICE)
        assert choice.how == "exact"
        assert Config.of("prefill", choice.knobs) == winner.decision.winner


def test_a_shape_nearby_is_served_by_the_nearest_and_one_far_off_by_the_default():
    configs = candidates(prefill_of())
    selector = selector_of(
        export(
            [
                winner_of(prefill_of(seqlen_q=512, seqlen_k=512), configs[0]),
                winner_of(prefill_of(seqlen_q=4096, seqlen_k=4096), configs[1]),
            ]
        ).text
    )
    for seqlen, how, config in (
        (500, "bucket", configs[0]),
        (900, "nearest", configs[0]),
        (3000, "bucket", configs[1]),
        (8192, "nearest", configs[1]),
    ):
        choice = selector.choose(prefill_of(seqlen_q=seqlen, seqlen_k=seqlen), DEVICE)
        assert (choice.how, Config.of("prefill", choice.knobs)) == (how, config), seqlen
    for seqlen in (1, 60, 33000):
        choice = selector.choose(prefill_of(seqlen_q=seqlen, seqlen_k=seqlen), DEVICE)
        assert choice.how == "default", seqlen


def test_beyond_its_reach_no_row_serves():
    selector = selector_of(export([winner_of(prefill_of(seqlen_q=512, seqlen_k=512))]).text)
    near = [table._replace(reach={"prefill": 1.0}) for table in selector.tables.gpus]
    reaching = type(selector)(selector.tables._replace(gpus=tuple(near)))
    for seqlen, how in ((512, "exact"), (600, "nearest"), (900, "default")):
        choice = reaching.choose(prefill_of(seqlen_q=seqlen, seqlen_k=seqlen), DEVICE)
        assert choice.how == how, seqlen
    assert selector.choose(prefill_of(seqlen_q=900, seqlen_k=900), DEVICE).how == "nearest"


def test_ragged_sequences_are_not_cut_as_equal_ones_were_tuned_to_be():
    equal = decode_of(batch=64, seqlen_k=4096)
    by_schedule = {dict(c.knobs)["SCHEDULE"]: c for c in candidates(equal) if c.family == "decode"}
    split = winner_of(equal, by_schedule["split"])
    # of the half the size, so farther away
    group = winner_of(dataclasses.replace(equal, seqlen_k=2048), by_schedule["group"])
    ragged = dataclasses.replace(equal, lengths="ragged")
    assert selector_of(export([split]).text).choose(ragged, DEVICE).how == "default"
    both = selector_of(export([split, group], most_configs=2).text)
    assert both.choose(ragged, DEVICE).knobs["SCHEDULE"] == "group"
    assert both.choose(equal, DEVICE).knobs["SCHEDULE"] == "split"


def test_what_no_row_serves_gets_the_default_of_the_best_family_whose_kernels_are_carried():
    hopper = FAMILIES["prefill_hopper"].default(prefill_of(), H200)
    carried = selector_of(export([winner_of(prefill_of(), hopper)]).text)
    untuned = prefill_of(head_dim=128, seqlen_q=3000)
    choice = carried.choose(untuned, DEVICE)
    assert (choice.how, choice.family) == ("default", "prefill_hopper")
    default = FAMILIES["prefill_hopper"].default(untuned, H200)
    assert Config.of("prefill_hopper", choice.knobs) == default
    assert carried.choose(prefill_of(dtype="fp32"), DEVICE).family == "prefill"
    with pytest.warns(UserWarning, match="no measurements for"):
        assert carried.choose(untuned, DEVICE._replace(arch="sm_80")).family == "prefill"
    without = selector_of(export([winner_of(prefill_of())]).text)
    assert without.choose(untuned, DEVICE).family == "prefill"


def test_windows_softcap_and_sinks_are_the_hopper_familys_where_any_of_its_kernels_is_carried():
    hopper = FAMILIES["prefill_hopper"].default(prefill_of(), H200)
    selector = selector_of(export([winner_of(prefill_of(), hopper)]).text)
    for on in ({"window_left": 9}, {"softcap": True}, {"causal": False, "sinks": True}):
        choice = selector.choose(prefill_of(**on), DEVICE)
        assert (choice.family, hasattr(choice.module, "plan_modified")) == ("prefill_hopper", True)
        assert selector.choose(prefill_of(**on, alibi=True), DEVICE).family == "prefill"
    with pytest.warns(UserWarning, match="no measurements for"):
        older = selector.choose(prefill_of(window_left=9), DEVICE._replace(arch="sm_80"))
    assert older.family == "prefill"


def test_a_hopper_backward_is_carried_beside_the_portable_one_for_what_it_does_not_serve():
    tuned = backward_of(head_dim=128, seqlen_q=1024, seqlen_k=1024)
    for name in ("backward_hopper", "backward_hopper_single"):
        winner = winner_of(tuned, FAMILIES[name].default(tuned, H200))
        selector = selector_of(export([winner]).text)
        assert selector.choose(tuned, DEVICE).family == name
        untuned = selector.choose(backward_of(head_dim=64), DEVICE)
        assert (untuned.how, untuned.family) == ("default", name)
        assert selector.choose(backward_of(dtype="fp32"), DEVICE).family == "backward"
        assert selector.choose(backward_of(softcap=True), DEVICE).family == "backward"


def test_tuning_only_tiny_shapes_never_decides_for_a_huge_one():  # case B26
    tiny = [winner_of(prefill_of(seqlen_q=n, seqlen_k=n)) for n in (1, 8)]
    selector = selector_of(export(tiny).text)
    huge = prefill_of(seqlen_q=8192, seqlen_k=8192)
    choice = selector.choose(huge, DEVICE)
    assert choice.how == "default"
    default = winner_of(huge).decision.default
    assert Config.of("prefill", choice.knobs) == default


def test_no_row_serves_other_semantics():  # case B48
    selector = selector_of(export([winner_of(prefill_of()), winner_of(decode_of())]).text)
    for other in (
        prefill_of(dtype="fp16"),
        prefill_of(dtype="fp32"),
        prefill_of(causal=False),
        prefill_of(head_dim=128),
        prefill_of(num_heads=2),
        prefill_of(layout="bhsd"),
        decode_of(page_size=16),
        decode_of(kv_layout="hnd"),
        decode_of(dtype="fp32"),
    ):
        assert selector.choose(other, DEVICE).how == "default", other


def test_keys_and_buckets_are_the_same_in_the_tuner_and_in_the_module():  # case B26
    module = module_of(export([winner_of(prefill_of())]).text)
    for seqlen in (*range(1, 4098), 10**6):
        ours = prefill_of(seqlen_q=seqlen, seqlen_k=seqlen)
        theirs = module["Problem"](**dataclasses.asdict(ours))
        assert module["match_key"](theirs) == match_key(ours)
        assert tuple(module["match_sizes"](theirs)) == tuple(match_sizes(ours))
        bucket = module["match_bucket"](module["match_sizes"](theirs))
        assert tuple(bucket) == tuple(match_bucket(match_sizes(ours)))


def test_rows_of_a_gpu_that_only_shares_the_name_are_not_used():  # case B16
    selector = selector_of(export([winner_of(prefill_of())]).text)
    for other in (
        DEVICE._replace(arch="sm_80"),
        DEVICE._replace(num_sms=114),
        DEVICE._replace(memory_gib=80),
        DEVICE._replace(mig_profile="1g.18gb"),
        DEVICE._replace(name="NVIDIA H100"),
    ):
        with pytest.warns(UserWarning, match="no measurements for"):
            assert selector.choose(prefill_of(), other).how == "default"
        with pytest.raises(LookupError, match="no measurements for"):
            selector.require_rows(other)
    selector.require_rows(DEVICE)


def test_several_gpus_live_in_one_module():
    a100 = known("NVIDIA_A100_SXM4_80GB")
    ours, theirs = candidates(prefill_of())[3], candidates(prefill_of(), a100)[1]
    text = export([winner_of(prefill_of(), ours), winner_of(prefill_of(), theirs, gpu=a100)]).text
    selector = selector_of(text)
    other = Device(**{name: getattr(a100, name) for name in Device._fields})
    assert Config.of("prefill", selector.choose(prefill_of(), DEVICE).knobs) == ours
    assert Config.of("prefill", selector.choose(prefill_of(), other).knobs) == theirs


def test_rows_made_with_another_triton_serve_with_one_notice():
    old = dataclasses.replace(CHAIN, triton="3.5.9")
    selector = selector_of(export([winner_of(prefill_of(), chain=old)]).text)
    with pytest.warns(UserWarning, match=r"measured with triton 3\.5\.9.*unverified"):
        assert selector.choose(prefill_of(), DEVICE).how == "exact"


def test_what_is_left_out_is_said():  # case B17
    stale = winner_of(prefill_of(seqlen_q=64), kernel_digest="0" * 12)
    predicted = winner_of(prefill_of(seqlen_q=128), source="predicted")
    alien = winner_of(prefill_of(seqlen_q=256), Config.of("prefill", {"BLOCK_M": 0}))
    good = winner_of(prefill_of())
    exported = export([stale, predicted, alien, good])
    assert [row.problem for row in exported.rows] == [good.decision.problem]
    reasons = [reason.split(":")[0].split(",")[0] for _, reason in exported.left_out]
    assert reasons == ["stale", "predicted", "the config is not valid"]
    allowed = export([predicted, good], allow_predicted=True)
    assert {row.source for row in allowed.rows} == {"predicted", "measured"}


def test_with_nothing_left_the_reasons_are_the_error():
    with pytest.raises(ExportError, match="nothing to export: no winners are stored"):
        export([])
    with pytest.raises(ExportError, match="nothing to export: predicted, not measured"):
        export([winner_of(prefill_of(), source="predicted")])
    with pytest.raises(ExportError, match="of a GPU that was not asked for"):
        export([winner_of(prefill_of())], gpus=["NVIDIA_A10"])


def test_a_portfolio_is_kept_small_and_says_what_it_loses():
    configs = candidates(prefill_of())[:3]
    winners = []
    for i, seqlen in enumerate((512, 1024, 2048)):
        times = {config: 10.0 + 0.2 * abs(i - j) for j, config in enumerate(configs)}
        ordered = tuple(sorted(times.items(), key=lambda item: item[1]))
        problem = prefill_of(seqlen_q=seqlen)
        winners.append(winner_of(problem, configs[i], times=ordered))
    one = export(winners, most_configs=1)
    assert {row.config for row in one.rows} == {configs[1]}
    assert sorted(row.regret for row in one.rows) == pytest.approx([0.0, 0.02, 0.02])
    assert len({row.config for row in export(winners, most_configs=3).rows}) == 3


def test_what_a_shape_would_lose_untuned_is_served_as_the_module_serves_it():
    configs = candidates(prefill_of())[:2]
    winners = []
    for i, seqlen in enumerate((512, 1024, 2048)):
        times = {configs[0]: 10.0 + i, configs[1]: 11.0}
        ordered = tuple(sorted(times.items(), key=lambda item: item[1]))
        best, us = ordered[0]
        problem = prefill_of(seqlen_q=seqlen)
        winners.append(winner_of(problem, best, winner_us=us, times=ordered))
    rows = {row.problem.seqlen_q: row for row in export(winners).rows}
    for left_out in winners:
        problem, times = left_out.decision.problem, dict(left_out.decision.times)
        others = [winner for winner in winners if winner != left_out]
        choice = selector_of(export(others).text).choose(problem, DEVICE)
        served = times[Config.of("prefill", choice.knobs)]
        expected = served / min(times.values()) - 1
        assert rows[problem.seqlen_q].unseen_regret == pytest.approx(expected)


def test_a_module_says_at_its_top_what_untuned_shapes_may_lose():
    configs = candidates(prefill_of())[:2]
    times = [(configs[0], 10.0), (configs[1], 10.5)], [(configs[1], 10.0), (configs[0], 12.0)]
    winners = [
        winner_of(prefill_of(seqlen_q=seqlen), ordered[0][0], winner_us=10.0, times=tuple(ordered))
        for seqlen, ordered in zip((512, 2048), times, strict=True)
    ]
    module = export(winners)
    assert sorted(row.unseen_regret for row in module.rows) == pytest.approx([0.05, 0.2])
    head = module.text.split('"""')[1]
    assert "would lose 12.2 % (geometric mean of 2);\nworst 20.0 %: prefill bf16" in head
    assert "2048 queries" in head and "would lose" not in export(winners[:1]).text.split('"""')[1]


@pytest.mark.parametrize("name", ["1bad.py", "class.py", "my-module.py", "my-package"])
def test_a_module_that_could_not_be_imported_is_not_written(tmp_path, name):
    module = export([winner_of(prefill_of())])
    with pytest.raises(ExportError, match=f"{Path(name).stem} is no name of a Python module"):
        write_module(module, tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_module_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    module = export([winner_of(prefill_of())])
    with pytest.raises(ExportError, match=r"the module's name must end in \.py"):
        write_module(module, tmp_path / "module.txt")
    for name in ("module.py", "package"):
        with pytest.raises(ExportError, match=r"cannot write .*No such file or directory"):
            write_module(module, tmp_path / "missing" / name)
    path = tmp_path / "module.py"
    path.write_text("before")
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(full))
    with pytest.raises(ExportError, match=r"cannot write .*No space left on device"):
        write_module(module, path)
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == ["module.py"]


def test_a_problem_that_no_family_serves_is_an_error_and_not_a_default():
    selector = selector_of(export([winner_of(prefill_of())]).text)
    for problem, reason in (
        (prefill_of(head_dim_v=20), "prefill: head_dim_v"),
        (prefill_of(kv_dtype="fp16"), "prefill: kv_dtype"),
        (decode_of(batch_invariant=True), "decode: batch_invariant"),
    ):
        with pytest.raises(ValueError, match=reason):
            selector.choose(problem, DEVICE)


def test_the_command_serves_a_variant_by_as_many_configs_as_the_function():
    """The command names the number itself: it imports nothing heavy for its help."""
    assert inspect.signature(command).parameters["max_configs"].default == MOST_CONFIGS
