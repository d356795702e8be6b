"""In a graph's capture only what is on the device may be launched: compiled and loaded kernels."""

import pytest

from autoflash.families import FAMILIES, family_of, sample
from autoflash.gpu import known
from autoflash.inputs import make_inputs
from autoflash.kernel import compile_only, load, new_outputs, plan_of
from autoflash.problem import Problem
from autoflash.render import render
from autoflash.runtime.capture import CaptureError, is_loaded, refuse_unloaded
from autoflash.runtime.launch import compile_plan

H200 = known("NVIDIA_H200")


def plan(problem, module, with_lse=True):
    """The plan of the portable family's default, its kernels those of `module`."""
    config = FAMILIES[problem.op].default(problem, H200)
    inputs = make_inputs(problem, device="meta", poison=False)
    out, lse = new_outputs(inputs)
    return plan_of(module, inputs, out, lse if with_lse else None, H200, config)


@pytest.fixture
def capturing(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)


@pytest.mark.parametrize("op", ["prefill", "decode"])
@pytest.mark.usefixtures("capturing")
def test_a_plan_is_refused_until_every_kernel_of_it_is_loaded(op):  # case B21
    compile_only(H200)
    module = load(render(family_of(op).variant(sample(op))))  # kernels that nothing compiled yet
    problem = Problem(op, "bf16", 2, 8, 2, 64, 128 if op == "prefill" else 1, 4096)
    launches = plan(problem, module)
    with pytest.raises(CaptureError, match="call this once before the capture"):
        refuse_unloaded(launches)
    compiled = compile_plan(launches)
    assert not any(map(is_loaded, launches))  # compiled, and not on the device
    for kernel in compiled[:-1]:
        kernel.module = object()
    with pytest.raises(CaptureError):
        refuse_unloaded(launches)
    compiled[-1].module = object()
    refuse_unloaded(launches)
    with pytest.raises(CaptureError):  # without lse it is another kernel
        refuse_unloaded(plan(problem, module, with_lse=False))


def test_outside_a_capture_nothing_is_asked(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    refuse_unloaded([(None, (1,), (), {})])


@pytest.mark.usefixtures("capturing")
def test_a_triton_that_keeps_its_kernels_elsewhere_is_left_to_cuda(monkeypatch):
    compile_only(H200)
    module = load(render(family_of("prefill").variant(sample("prefill"))))
    launches = plan(Problem("prefill", "bf16", 1, 2, 2, 64, 64, 64), module)
    monkeypatch.delattr("triton.runtime.jit.compute_cache_key")
    refuse_unloaded(launches)
