"""Canaries: tensors inside larger allocations whose margins tell of a write out of bounds."""

from dataclasses import dataclass, replace

import torch

from autoflash.inputs import Inputs
from autoflash.runtime.masks import BlockLists

MARGIN = 4096  # bytes before and after; keeps the alignment that the allocator gives
# NaN in every float format, though none that arithmetic gives, and -1 in every integer's
PATTERN = 0xFF


@dataclass(frozen=True)
class _Held:
    """One allocation. `kept` is what an input must still be, margins and all."""

    name: str
    storage: torch.Tensor
    kept: torch.Tensor | None = None

    def margins(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.storage[:MARGIN], self.storage[-MARGIN:]


class Canaries:
    """Tensors for a candidate to read and write, and whether it kept to them.

    A read out of bounds gives NaN or -1, and so shows in the result.
    """

    def __init__(self, device: str | torch.device) -> None:
        self._device = device
        self._held: list[_Held] = []
        self._workspaces = 0

    def new(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor to be written, full of NaN."""
        length = torch.Size(shape).numel() * dtype.itemsize
        storage = self._allocated(length)
        self._held.append(_Held(name, storage))
        return storage[MARGIN : MARGIN + length].view(dtype).view(shape)

    def workspace(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A workspace, as a plan asks for it; they are numbered in that order."""
        self._workspaces += 1
        return self.new(f"workspace {self._workspaces}", shape, dtype)

    def copied(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """The same values with the same strides, only to be read."""
        whole = _bytes_of(tensor)
        storage = self._allocated(len(whole))
        inside = storage[MARGIN : MARGIN + len(whole)]
        inside.copy_(whole)
        self._held.append(_Held(name, storage, storage.clone()))
        return inside.view(tensor.dtype)[tensor.storage_offset() :].as_strided(
            tensor.shape, tensor.stride()
        )

    def inputs(self, inputs: Inputs) -> Inputs:
        """The inputs of a call, all of them copied."""
        copies = {name: self.copied(name, tensor) for name, tensor in tensors_of(inputs).items()}
        if inputs.block_mask is not None:
            names = [name for name in BlockLists._fields if name in copies]
            lists = inputs.block_mask._replace(**{name: copies.pop(name) for name in names})
            return replace(inputs, block_mask=lists, **copies)
        return replace(inputs, **copies)

    def trespass(self) -> str | None:
        """What was written that must not be: which tensor, on which side of it."""
        for held in self._held:
            for margin, side in zip(held.margins(), ("before the start", "past the end")):
                if (margin != PATTERN).any():
                    return f"writes {side} of {held.name}"
            if held.kept is not None and not torch.equal(held.storage, held.kept):
                return f"writes to its input {held.name}"
        return None

    def _allocated(self, length: int) -> torch.Tensor:
        size = (length + 2 * MARGIN,)
        return torch.full(size, PATTERN, dtype=torch.uint8, device=self._device)


def tensors_of(inputs: Inputs) -> dict[str, torch.Tensor]:
    """The tensors of a call by name, those that there are."""
    names = ("q", "k", "v", "cache_seqlens", "block_table", "k_scale", "v_scale")
    names += ("page_positions", "alibi_slopes", "bias", "sinks", "rng")
    names += ("cu_seqlens_q", "cu_seqlens_k")
    names += ("out", "lse", "dout", "dlse", "document_ids", "prefix_lens")
    found = {name: getattr(inputs, name) for name in names}
    if inputs.block_mask is not None:
        found |= dict(zip(BlockLists._fields, inputs.block_mask.tensors, strict=False))
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def sums_of(inputs: Inputs) -> dict[str, int]:
    """A sum over the bits of each tensor, where there is no room for copies to compare with."""
    return {
        name: int(_bytes_of(tensor).view(torch.int16).sum())
        for name, tensor in tensors_of(inputs).items()
    }


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Everything in the tensor's storage, what lies between wide rows too."""
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage())
