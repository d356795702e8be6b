"""The example that trains a small model with an exported module, and its model elsewhere."""

import importlib.util
import sys
from functools import partial
from pathlib import Path

import pytest
from exported_calls import load_module
from making import backward_of, prefill_of, winner_of

from autoflash.export import export

pytestmark = pytest.mark.slow
EXAMPLE = Path(__file__).parents[2] / "examples" / "training_step.py"


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("training_step", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["training_step"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def exported(tmp_path):
    path = tmp_path / "attention_dispatch.py"
    path.write_text(export([winner_of(prefill_of()), winner_of(backward_of())]).text)
    return path


def test_the_example_trains_beside_sdpa_and_its_loss_falls(example, exported, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["training_step.py", str(exported), "--steps", "3"])
    assert example.main() == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert len(lines) == 3
    first = [float(number) for number in lines[0].split() if "." in number]
    assert first[0] == pytest.approx(first[1], rel=2**-8)  # before any gradient: of bf16


def test_the_gradients_are_felt_by_the_weights_as_those_of_sdpa_are(example, exported):
    attend = partial(load_module(exported).prefill, causal=True)
    ours = example.losses(attend, example.SMALL, 3, "cpu")
    sdpas = example.losses(example.sdpa, example.SMALL, 3, "cpu")
    still = example.losses(lambda *qkv: attend(*(t.detach() for t in qkv)), example.SMALL, 3, "cpu")
    off = [abs(a - b) for a, b in zip(ours, sdpas, strict=True)]
    lost = [abs(a - b) for a, b in zip(still, sdpas, strict=True)]
    assert off[1] < lost[1] and off[2] < lost[2]
