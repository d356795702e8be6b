"""The exported module in a CUDA graph's capture: replays follow lengths, nothing is compiled."""

import importlib.util
import os
import subprocess
import sys
from itertools import count

import pytest
import torch

pytestmark = pytest.mark.gpu

NUMBERS = count()
TUNED, UNTUNED = (8, 8192), (3, 777)  # sequences and keys, of which the shipped winners hold one


@pytest.fixture(scope="module")
def module_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "attention_dispatch.py"
    command = [sys.executable, "-m", "autoflash", "export", "-o", str(path)]
    subprocess.run(command, check=True, env={**os.environ, "AUTOFLASH_DB": f"{path}.db"})
    return path


@pytest.fixture
def module(module_path):
    """The module anew: nothing of it is compiled or loaded."""
    spec = importlib.util.spec_from_file_location(f"dispatch_{next(NUMBERS)}", module_path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def decode_call(batch, keys):
    """q, caches and lengths of Llama 3 8B."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape):
        return torch.randn(shape, device="cuda", generator=generator).bfloat16()

    caches = (normal(batch, keys, 8, 128) for _ in range(2))
    lengths = torch.full((batch,), keys // 2, device="cuda", dtype=torch.int32)
    return (normal(batch, 1, 32, 128), *caches, lengths)


def captured(module, call):
    """The graph of one call, and what it writes."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module.decode(*call)
    return graph, out


@pytest.mark.parametrize("shape", [TUNED, UNTUNED])
def test_a_warm_call_is_captured_and_its_replay_follows_lengths(module, shape):  # case B21
    call = decode_call(*shape)
    module.decode(*call)
    graph, out = captured(module, call)
    for length in (1, shape[1] // 3, shape[1]):
        call[-1].fill_(length)
        graph.replay()
        assert torch.equal(out, module.decode(*call)), length


@pytest.mark.parametrize("shape", [TUNED, UNTUNED])
def test_a_cold_call_is_refused_in_a_capture_and_harms_nothing(module, shape):  # case B21
    call = decode_call(*shape)
    with pytest.raises(RuntimeError, match="call this once before the capture"):
        captured(module, call)
    torch.cuda.synchronize()
    warm = module.decode(*call)
    graph, out = captured(module, call)
    graph.replay()
    assert torch.equal(out, warm)


def test_a_warm_shape_does_not_warm_the_one_with_lse(module):
    q, k, v = (torch.randn(1, 512, 8, 64, device="cuda").bfloat16() for _ in range(3))
    module.prefill(q, k, v, causal=True)
    refused = pytest.raises(RuntimeError, match="call this once before the capture")
    with refused, torch.cuda.graph(torch.cuda.CUDAGraph()):
        module.prefill(q, k, v, causal=True, return_lse=True)
    out, lse = module.prefill(q, k, v, causal=True, return_lse=True)
    assert torch.isfinite(out).all() and torch.isfinite(lse).all()
