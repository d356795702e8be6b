"""PTX of inline assembly on numpy: a warpgroup's threads at once, each with its part of a tensor.

Knows the instructions that a softmax is written in, no memory, and branches that a warp takes as
one. Tensors lie as the matrix unit leaves them: (64, n / 8, 4, 2), or (64, 4), by row and lane.
"""

import re
from typing import Any

import numpy as np

THREADS, WARP = 128, 32
FORMS = {
    "neg.f32": lambda x: -x,
    "abs.f32": np.abs,
    "mov.f32": lambda x: x,
    "mov.b32": lambda x: x,
    "ex2.approx.ftz.f32": np.exp2,
    "rcp.approx.ftz.f32": lambda x: np.float32(1.0) / x,
    "max.f32": np.fmax,
    "min.f32": np.fmin,
    "mul.f32": np.multiply,
    "sub.f32": np.subtract,
    "fma.rn.f32": lambda x, y, z: (np.float64(x) * y + z).astype(np.float32),
    "selp.f32": lambda x, y, condition: np.where(condition, x, y),
    "selp.b32": lambda x, y, condition: np.where(condition, x, y),
    "setp.gt.f32": np.greater,
    "setp.ne.s32": np.not_equal,
    "not.pred": np.logical_not,
    "vote.sync.any.pred": lambda x, _: np.repeat(x.reshape(-1, WARP).any(1), WARP),
    "shfl.sync.bfly.b32": lambda x, distance, *_: x[np.arange(THREADS) ^ int(distance[0])],
}


def of_threads(tensor: np.ndarray) -> np.ndarray:
    """(threads, elements of each): rows i and i + 8 of a warp's 16, in the order of registers."""
    columns, bits = (1, 1) if tensor.ndim == 2 else (tensor.shape[1], 2)
    parts = tensor.reshape(4, 2, 8, columns, 4, bits)
    return parts.transpose(0, 2, 4, 3, 1, 5).reshape(THREADS, -1)


def of_tensor(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The inverse of `of_threads`."""
    columns, bits = (1, 1) if len(shape) == 2 else (shape[1], 2)
    parts = values.reshape(4, 8, 4, columns, 2, bits)
    return parts.transpose(0, 4, 1, 3, 2, 5).reshape(shape)


def run(
    text: str, constraints: str, operands: list[Any], dtypes: tuple[Any, ...], pack: int
) -> tuple[list[np.ndarray], set[bool]]:
    """The results of a text for operands of one shape, and whether warps jumped: {True, False}."""
    shape = np.broadcast_shapes(*(np.shape(operand) for operand in operands))
    # a number of the host's is of 32 bits on the device
    given = [np.float32(each) if isinstance(each, float) else each for each in operands]
    wide = [of_threads(np.broadcast_to(operand, shape)) for operand in given]
    assert wide[0].shape[1] == pack, "a thread has other elements than the text takes"
    kinds = constraints.split(",")
    outputs = [kind for kind in kinds if kind.startswith("=")]
    # without & a result may have the register of an operand that is still to be read
    assert all(kind.startswith("=&") for kind in outputs) and len(outputs) == pack * len(dtypes)
    registers = {}
    values = [column for each in wide for column in each.T.copy()]
    for i, (kind, value) in enumerate(zip(kinds[len(outputs) :], values, strict=True)):
        registers[f"${kind}" if kind.isdigit() else f"${len(outputs) + i}"] = value
    jumps = _execute(text, registers)
    results = []
    for first, dtype in zip(range(0, len(outputs), pack), dtypes, strict=True):
        columns = [registers[f"${i}"] for i in range(first, first + pack)]
        results.append(of_tensor(np.stack(columns, axis=1).astype(dtype), shape))
    return results, jumps


def _execute(text: str, registers: dict[str, np.ndarray]) -> set[bool]:
    at_work, label, jumps = np.ones(THREADS, bool), "", set()
    for line in re.split(r"[;\n]", text):
        line = line.strip("{} \n")
        if not line or line.startswith(".reg"):
            continue
        if line.endswith(":"):
            assert line == f"{label}:"
            at_work = np.ones(THREADS, bool)
        elif found := re.match(r"@!(\w+) bra\.uni (\w+)", line):
            stay, label = registers[found[1]], found[2]
            by_warp = stay.reshape(-1, WARP)
            assert (by_warp == by_warp[:, :1]).all(), "a warp branches two ways"
            at_work = stay
            jumps |= {not each for each in by_warp[:, 0].tolist()}
        else:
            name, *terms = re.split(r"[ ,]+", line)
            result, *given = terms
            value = FORMS[name](*(_value(term, registers) for term in given))
            before = registers.setdefault(result, value)
            registers[result] = np.where(at_work, value, before)
    return jumps


def _value(term: str, registers: dict[str, np.ndarray]) -> np.ndarray:
    if term in registers:
        return registers[term]
    number = np.float32(term) if "." in term else np.int64(int(term, 0))
    return np.full(THREADS, number)
