"""Choices without a GPU: labelled as predicted everywhere, and never a time."""

from dataclasses import replace

import pytest
from fake_device import GPU, machine

from autoflash.families import backward_single, serving, space
from autoflash.journal import Journal
from autoflash.model import launched, predicted_us
from autoflash.problem import Problem
from autoflash.records import Resources
from autoflash.roofline import floor
from autoflash.store import Store
from autoflash.toolchain import detect_toolchain
from autoflash.tune import tune
from autoflash.workload import Workload

PROBLEM = Problem("prefill", "fp16", 1, 2, 2, 32, 128, 128)
LONG = Problem("prefill", "bf16", 4, 32, 8, 128, 4096, 4096)
LEAN = Resources(registers=128, spill_bytes=0, smem_bytes=48 * 1024)


def default_of(problem):
    return serving(problem, GPU)[0].default(problem, GPU)


@pytest.fixture(scope="module")
def predicted(tmp_path_factory):
    db = tmp_path_factory.mktemp("predict") / "tune.db"
    family = serving(PROBLEM, GPU)[0]
    binaries = {family.binary(config) for config, why in space(family, PROBLEM, GPU) if not why}
    broken = sorted(binaries - {family.binary(default_of(PROBLEM))})[::2]
    here = replace(machine(compile_faults=dict.fromkeys(broken, "error")), device=None)
    return tune(Workload("test", ((PROBLEM, 1.0),)), db=db, effort="quick", machine=here)


def test_a_prediction_is_labelled_and_holds_no_measured_time(predicted):
    (decision,) = predicted.decisions
    assert decision.source == "predicted" and decision.times == ()
    with Store.open(predicted.db, readonly=True) as store:
        trials = store.trials(predicted.gpu, predicted.toolchain)
        (winner,) = store.winners()
    assert winner.decision == decision
    assert decision.winner in {trial.config for trial in trials if trial.status == "correct"}
    for trial in trials:
        assert (trial.source, trial.stage, trial.regime) == ("predicted", "predicted", "none")
        assert trial.median_us is None and trial.samples == 0


def test_predictions_are_for_the_target_with_this_machines_versions(predicted):
    assert predicted.gpu == GPU
    assert predicted.toolchain == detect_toolchain()


def test_the_first_line_says_that_nothing_is_measured(tmp_path, capsys):
    here = replace(machine(), device=None)
    workload = Workload("test", ((PROBLEM, 1.0),))
    tune(
        workload, db=tmp_path / "t.db", effort="quick", target="NVIDIA_A100_SXM4_80GB", machine=here
    )
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("No GPU here") and "NVIDIA A100-SXM4-80GB" in first
    assert "only predicted" in first


def config(problem=LONG, **knobs):
    default = default_of(problem)
    return default.of(default.family, default.as_dict() | knobs)


def test_the_model_prefers_what_is_known_to_be_faster():
    base = predicted_us(LONG, config(), LEAN, GPU)
    assert base < predicted_us(LONG, config(), replace(LEAN, spill_bytes=512), GPU)
    assert base < predicted_us(LONG, config(num_stages=1), LEAN, GPU)
    assert base < predicted_us(LONG, config(), replace(LEAN, smem_bytes=200 * 1024), GPU)
    assert base < predicted_us(LONG, config(BLOCK_M=16), LEAN, GPU)


def test_the_model_looks_at_the_tiles_of_both_kernels_of_a_backward():
    backward = replace(LONG, op="backward")
    base = predicted_us(backward, config(backward), LEAN, GPU)
    for part in ("KV", "Q"):
        for slower in ({"BLOCK_M": 16}, {"BLOCK_N": 16}, {"STAGES": 1}):
            knobs = {f"{part}_{name}": value for name, value in slower.items()}
            assert base < predicted_us(backward, config(backward, **knobs), LEAN, GPU), knobs
    assert base < predicted_us(backward, config(backward, LOAD="pointer"), LEAN, GPU)
    single = backward_single.FAMILY.default(backward, GPU)
    least = floor(backward, GPU).floor_us
    assert least <= predicted_us(backward, single, LEAN, GPU) < base
    assert (
        launched(backward, single, GPU).launches
        == launched(backward, config(backward), GPU).launches
        == 3
    )


def test_the_model_is_never_below_the_roofline():
    backward = replace(LONG, op="backward")
    for problem in (PROBLEM, LONG, backward, Problem("decode", "bf16", 64, 32, 8, 128, 1, 4096)):
        assert predicted_us(problem, default_of(problem), LEAN, GPU) >= floor(problem, GPU).floor_us


def test_a_measured_search_takes_nothing_from_predictions(predicted):
    with Store.open(predicted.db) as store:
        journal = Journal(store, predicted.run_id, predicted.gpu, predicted.toolchain)
        statuses = {trial.status for trial in store.trials(predicted.gpu, predicted.toolchain)}
    assert statuses == {"correct", "compile"}
    assert journal.known == 0 and journal.decided(PROBLEM) is None
