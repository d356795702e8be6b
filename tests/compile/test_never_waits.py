"""A call reads no number of a tensor on the host, and waits for no stream, event or device."""

import pytest
import torch
import triton
from fake_calls import (
    append,
    chunks,
    chunks_with_documents,
    decode,
    decode_with_blocks,
    decode_with_documents,
    decode_with_modifiers,
    decode_with_prefixes,
    packed,
    packed_with_documents,
    prefill,
    prefill_with_dropout,
)

pytestmark = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="only triton 3.6's kernels are bound"
)

# whatever else brings a number to the host ends in one of these
READS = ["item", "tolist", "numpy", "nonzero", "equal", "__array__", "__iter__"]
READS += ["__bool__", "__int__", "__float__", "__index__"]
WAITS = ["cuda.synchronize", "cuda.Stream.synchronize", "cuda.Event.synchronize", "equal"]


def prefill_of_documents(module):
    return prefill(module, document_ids=torch.zeros(1, 64, dtype=torch.int32))


def refusal(name):
    def refused(*_, **__):
        raise AssertionError(f"the call waits for the device: {name}")

    return refused


@pytest.fixture
def nobody_waits(monkeypatch):
    for name in READS:
        monkeypatch.setattr(torch.Tensor, name, refusal(name))
    for name in WAITS:
        monkeypatch.setattr(f"torch.{name}", refusal(name))


@pytest.mark.parametrize(
    "call",
    [
        prefill,
        prefill_with_dropout,
        prefill_of_documents,
        packed,
        packed_with_documents,
        chunks,
        chunks_with_documents,
        decode,
        decode_with_modifiers,
        decode_with_blocks,
        decode_with_documents,
        decode_with_prefixes,
        append,
    ],
)
@pytest.mark.usefixtures("nobody_waits")
def test_no_call_reads_a_length_or_waits_planned_by_its_form_or_recalled(  # case B21
    call, driver, new_module
):
    module, numbers = new_module(), []
    for _ in range(3):
        call(module)
        numbers.append(len(driver.launched))
    assert numbers[0] > 0 and numbers[2] == 3 * numbers[0]


@pytest.mark.usefixtures("nobody_waits")
def test_a_check_that_is_asked_for_does_read_lengths(driver, new_module):
    """So the test above sees what it looks for."""
    with pytest.raises(AssertionError, match="the call waits"):
        decode(new_module(), check=True)
    assert driver.launched == []
