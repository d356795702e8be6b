"""What a search times: the candidate's own kernels, launched on every set of buffers alike."""

import pytest
import torch
import triton
from fake_launches import FakeLaunches
from making import backward_of, decode_of, prefill_of

from autoflash.families import serving
from autoflash.gpu import known
from autoflash.inputs import make_inputs
from autoflash.kernel import new_results
from autoflash.runtime import bound
from autoflash.runtime.launch import run_plan
from autoflash.trial import CudaDevice

pytestmark = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="only triton 3.6's kernels are bound"
)

H200 = known("NVIDIA_H200")
PROBLEMS = {
    "prefill": prefill_of(causal=True, seqlen_q=128, seqlen_k=128),
    "modified": prefill_of(causal=True, seqlen_q=128, seqlen_k=128, sinks=True),
    "decode": decode_of(batch=2, seqlen_k=256, page_size=16, pages="permuted"),
    "backward": backward_of(seqlen_q=128, seqlen_k=128),
}


class DeviceOfTensors(CudaDevice):
    """One whose sets are on the CPU, which the driver takes for its card."""

    def __init__(self, problem):
        self._device, self._gpu = "cpu", H200
        self._readied = {}
        self._sets = []
        for number in range(2):
            inputs = make_inputs(problem, number, "cpu", poison=False)
            self._sets.append((inputs, new_results(inputs)[0]))

    def launched(self, config, i):
        self._call(config, i)

    def ready(self, config):
        return self._ready(config)

    def plan_on(self, config, i):
        inputs, out = self._sets[i]
        return self.plan(inputs, config, out, None)

    def tensors(self, i):
        return self._tensors(i)

    def places(self, i):
        return {tensor.data_ptr(): n for n, tensor in enumerate(self._tensors(i))}


@pytest.fixture
def driver(monkeypatch):
    driver = FakeLaunches(H200)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr("torch.cuda.current_device", lambda: None)
    monkeypatch.setattr(bound, "cuda_launcher", lambda: driver.cuda_launch)
    monkeypatch.setattr(bound, "map_address", driver.map_address)
    monkeypatch.setattr(
        "autoflash.trial._workspace", lambda shape, dtype: torch.empty(shape, dtype=dtype)
    )
    return driver


def told(driver, device, i):
    """The launches, with the number of a tensor in place of where it lies."""
    places = device.places(i)

    def name(argument):
        if hasattr(argument, "pointer"):
            return argument._replace(pointer=places[argument.pointer])
        is_place = type(argument) is int and argument > 2**32
        return places.get(argument, "workspace") if is_place else argument

    return [each._replace(parameters=[*map(name, each.parameters)]) for each in driver.launched]


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_what_is_timed_is_what_the_plan_launches_on_each_set(problem, driver):
    device = DeviceOfTensors(problem)
    config = serving(problem, H200)[0].default(problem, H200)
    assert device.ready(config).bound is not None
    assert not driver.launched  # made ready, not launched
    for i in range(2):
        run_plan(device.plan_on(config, i))
        expected = told(driver, device, i)
        driver.launched.clear()
        device.launched(config, i)
        assert told(driver, device, i) == expected
        driver.launched.clear()


def test_bound_kernels_are_not_launched_for_a_tensor_that_is_not_aligned(driver):
    problem = PROBLEMS["prefill"]
    device = DeviceOfTensors(problem)
    bound = device.ready(serving(problem, H200)[0].default(problem, H200)).bound
    q, *others = device.tensors(0)
    beside = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape)
    assert beside.data_ptr() % 16 and not bound.launch([beside, *others])
    assert not driver.launched
