"""Matrix: the cases by which the contract is verified, of every kind of problem there is."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autoflash.config import Config
from autoflash.families import sample
from autoflash.gradient_probes import GRADIENT_PROBES
from autoflash.inputs import Inputs, make_inputs
from autoflash.kinds import like
from autoflash.probes import PROBES, Probe
from autoflash.problem import Problem, title

EVERY_PROBE = PROBES | GRADIENT_PROBES
FEW_TILES, ALL_TILES = (64,), (16, 64, 128)  # whose edges an exported module is asked about
NEAR = (-1, 0, 1)  # on both sides of a size and at it
ALIKE = ("lse", "strides", "addresses")  # clauses that one kind of an op answers for all
MANY = 65_537  # one more than two of a grid's axes hold


@dataclass(frozen=True)
class Case:
    """A probe and the problem it is put on; `lengths` are the tokens of each sequence.

    Of packed sequences they are pairs, of queries and keys.
    """

    probe: str
    problem: Problem
    lengths: tuple[int | tuple[int, int], ...] | None = None

    @property
    def clause(self) -> str:
        return self.asked.clause

    @property
    def asked(self) -> Probe:
        return EVERY_PROBE[self.probe]

    @property
    def name(self) -> str:
        told = f"{self.probe}: {title(self.problem)}"
        return told if self.lengths is None else f"{told}, lengths {list(self.lengths)}"

    def make(self, seed: int, device: str, **options: Any) -> Inputs:
        lengths = None if self.lengths is None else list(self.lengths)
        return make_inputs(self.problem, seed, device, lengths, **options)


def tiles_of(config: Config) -> tuple[int, ...]:
    """The tile sizes at whose edges a config may go wrong."""
    knobs = config.as_dict()
    return tuple(sorted({int(v) for k, v in knobs.items() if k.endswith(("BLOCK_M", "BLOCK_N"))}))


def cases_of(kind: Problem, tiles: Sequence[int], small: bool, brief: bool = False) -> list[Case]:
    """The cases of one kind, each once; `brief` leaves out what all kinds have in common."""
    of_op = _prefill_cases if kind.op == "prefill" else _decode_cases
    of_kind = _packed_cases if kind.varlen else of_op
    if kind.op == "prefill" and kind.paged:
        of_kind = _chunk_cases
    if kind.op == "backward":
        of_kind = _packed_gradient_cases if kind.varlen else _gradient_cases
    cases = dict.fromkeys(of_kind(kind, tiles, small))
    return [case for case in cases if not brief or case.clause not in ALIKE]


def far_cases_of(op: str) -> list[Case]:
    """Those that only a GPU's memory and speed allow, of which one kind is enough."""
    if op == "backward":
        return []
    probe = "more programs than 65535"
    if op == "prefill":
        sizes = {"batch": 10_923, "num_heads": 6, "seqlen_q": 16, "seqlen_k": 16}
        heads = Case(probe, like(sample("prefill"), **sizes))
        packed = {"batch": 65_600, "num_heads": 8, "seqlen_q": 1, "seqlen_k": 1, "layout": "thd"}
        over_pages = like(sample("prefill"), **packed, page_size=16)
        return [heads, Case(probe, like(sample("prefill"), **packed)), Case(probe, over_pages)]
    sizes = {"batch": MANY, "num_heads": 8, "seqlen_k": 1, "page_size": 16}
    return [Case(probe, like(sample("decode"), **sizes), (1,) * MANY)]


def _prefill_cases(kind: Problem, tiles: Sequence[int], small: bool) -> Iterator[Case]:
    t = max(tiles)
    few = replace(kind, batch=1) if small else replace(kind, batch=2)

    def case(probe: str, seqlen_q: int, seqlen_k: int, **changes: Any) -> Case:
        return Case(probe, replace(few, seqlen_q=seqlen_q, seqlen_k=seqlen_k, **changes))

    yield case("random values", t // 2 + 5, t + 9)
    counted = "visible keys are counted"
    if small:
        edges = [(t + 1, t + 1), (1, t)]
    else:
        lengths = sorted({1, *(size + d for size in tiles for d in NEAR), 2 * t + 1})
        edges = [pair for n in lengths for pair in ((n, n), (t + 1, n), (n, 2 * t + 1))]
    for seqlen_q, seqlen_k in edges:
        yield case(counted, seqlen_q, seqlen_k)
    if kind.windowed:
        for left in (0, t) if small else (0, 1, t - 1, t, t + 1):
            yield case(counted, 40 if small else t + 9, t + 9, window_left=left)
        for right in () if small or kind.causal else (1, t - 1, t, t + 1):
            yield case(counted, t + 9, t + 9, window_right=right)
    if kind.causal or kind.windowed or kind.masks:
        yield case("hidden keys change no bit", t // 2, t + 9)
        yield case("rows without keys", t // 2 + 9, t // 4 + 1)
    yield case("rows without keys", 17, 0)
    yield case("a scale of its own", 40, t + 9)
    if kind.softcap:
        yield case("scores far beyond a softcap", 40, t + 9)
    yield case("lse is the natural logarithm", 40, t + 9)
    yield case("out without lse", 40, t + 9)
    yield case("neighbours are not read", 33, t + 9)
    yield case("keys beyond 32 bits", 9, t + 9, batch=1)
    yield case("wide rows", 33, t - 7)
    yield case("each tensor in another order", 33, t + 9)
    yield case("each tensor unaligned", 33, t + 9)
    yield case("keys shared by the batch", 33, 40, batch=2)
    yield case("two runs agree in every bit", 33, t + 9)
    yield case("the largest score comes last", 33, 2 * t + 9)
    yield case("scores far from zero", 37, 37)
    if kind.num_heads > 1:
        yield case("heads are apart", 20, t + 9)


def _packed_cases(kind: Problem, tiles: Sequence[int], small: bool) -> Iterator[Case]:
    t = max(tiles)
    some = ((t + 1, t + 1), (0, 7), (1, 1), (9, 2 * t), (t // 2, 3), (5, 0))
    edges = (1, t - 1, t, t + 1) if small else sorted({1, *(s + d for s in tiles for d in NEAR)})

    def case(probe: str, *lengths: tuple[int, int], **changes: Any) -> Case:
        rows, keys = (max(each) for each in zip(*lengths, strict=True))
        sizes = {"batch": len(lengths), "seqlen_q": rows, "seqlen_k": keys, "lengths": "ragged"}
        return Case(probe, replace(kind, **sizes, **changes), lengths)

    yield case("random values", *some)
    yield case("visible keys are counted", *((n, n) for n in edges), *((3, n) for n in edges))
    if not small:
        yield case("visible keys are counted", *((n, 2 * t + 1) for n in edges))
    yield case("rows without keys", (5, 0), (0, 0), (t, 3))
    yield case("a scale of its own", *some[:4])
    yield case("lse is the natural logarithm", *some)
    yield case("out without lse", *some)
    yield case("sequences are apart", *some[:4])
    yield case("wide rows", *some[:4])
    yield case("each tensor unaligned", *some[2:5])
    yield case("two runs agree in every bit", *some)
    yield case("scores far from zero", (37, 37), (1, 9))


def _chunk_cases(kind: Problem, tiles: Sequence[int], small: bool) -> Iterator[Case]:
    t, p = max(tiles), kind.page_size
    edges = (0, 1, p + 1, t, t + 1) if small else _decode_edges(tiles, p)

    def case(probe: str, rows: int, *keys: int, **changes: Any) -> Case:
        sizes = {"batch": len(keys), "seqlen_q": rows, "seqlen_k": max(1, *keys)}
        lengths = keys
        if kind.varlen:  # chunks of different lengths, and none at last
            lengths = tuple((max(0, rows - 3 * n), each) for n, each in enumerate(keys))
        return Case(probe, replace(kind, **sizes, lengths="ragged", **changes), lengths)

    yield case("random values", t // 2 + 5, t + 9, 37, 0)
    for rows in (t + 1,) if small else (1, 17, t - 1, t + 1):
        yield case("visible keys are counted", rows, *edges)
    if kind.windowed:
        for left in (t,) if small else (0, 1, t - 1, t, t + 1):
            yield case("visible keys are counted", t // 2, *edges, window_left=left)
        yield case("keys before all windows change no bit", 19, 2 * t + 9, 1, t + 1)
    yield case("rows without keys", t // 2 + 9, 0, 40, t // 4 + 1)
    if kind.softcap:
        yield case("scores far beyond a softcap", 40, t + 9, 41)
    yield case("lse is the natural logarithm", 40, 2 * t + 1, 1)
    yield case("out without lse", 40, t + 9, 41)
    yield case("dead slots change no bit", 20, t + 1, 1, p, 0)
    yield case("pages lie anywhere", 20, t + 9, 40)
    yield case("page ids beyond 32 bits", 17, min(40, 3 * p), 1)
    yield case("wide rows", 33, t + 9, 37)
    yield case("each tensor unaligned", 33, t + 9, 37)
    yield case("lengths and table are views", 33, t + 9, 3)
    yield case("the largest score comes last", 33, 2 * t + 9, 37)
    if not small:  # of what other kinds of prefill answer for
        yield case("a scale of its own", 40, t + 9, 41)
        yield case("two runs agree in every bit", 33, t + 9, 37)
        yield case("scores far from zero", 37, 37, 9)
    if not kind.varlen:
        yield case("each tensor in another order", 33, t + 9, 9)
        yield case("heads are apart", 20, t + 9, 9)


def _gradient_cases(kind: Problem, tiles: Sequence[int], small: bool) -> Iterator[Case]:
    t = max(tiles)
    few = replace(kind, batch=1 if small else 2)

    def case(probe: str, seqlen_q: int, seqlen_k: int, **changes: Any) -> Case:
        sizes = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, **changes}
        return Case(f"gradients {probe}", replace(few, **sizes))

    yield case("of random values", t // 2 + 5, t + 9)
    edges = [(t + 1, t + 1)]
    if not small:
        lengths = sorted({1, *(size + d for size in tiles for d in NEAR)})
        edges = [pair for n in lengths for pair in ((n, n), (t + 1, n), (n, 2 * t + 1))]
    for seqlen_q, seqlen_k in edges:
        yield case("at the edges of tiles", seqlen_q, seqlen_k)
    if kind.windowed:
        for left in (t,) if small else (0, 1, t - 1, t, t + 1):
            yield case("at the edges of tiles", t + 9, t + 9, window_left=left)
    if kind.causal or kind.windowed or kind.masks:
        yield case("of rows without keys", t // 2 + 9, t // 4 + 1)
    yield case("of rows without keys", 17, 0)
    yield case("under a scale of their own", 40, t + 9)
    if kind.softcap:
        yield case("far beyond a softcap", 40, t + 9)
    yield case("of lse alone", 40, t + 9)
    yield case("of wide rows", 33, t - 7)
    yield case("of tensors in another order", 33, t - 7)
    yield case("of unaligned tensors", 33, t - 7)
    yield case("of keys that the batch shares", 33, 40, batch=2)
    yield case("of scores far from zero", 37, 37)


def _packed_gradient_cases(kind: Problem, tiles: Sequence[int], small: bool) -> Iterator[Case]:
    t = max(tiles)
    some = ((t + 1, t + 1), (0, 7), (1, 1), (9, 2 * t), (t // 2, 3), (5, 0))

    def case(probe: str, *lengths: tuple[int, int]) -> Case:
        rows, keys = (max(each) for each in zip(*lengths, strict=True))
        sizes = {"batch": len(lengths), "seqlen_q": rows, "seqlen_k": keys, "lengths": "ragged"}
        return Case(f"gradients {probe}", replace(kind, **sizes), lengths)

    yield case("of random values", *some)
    for size in () if small else tiles:
        yield case("at the edges of tiles", *((size + d, size + e) for d in NEAR for e in NEAR))
    yield case("of rows without keys", (5, 0), (0, 0), (t // 2, 3))
    yield case("under a scale of their own", *some[3:5])
    yield case("of lse alone", *some[3:5])
    yield case("of sequences apart", *some[3:5], (9, 20))
    yield case("of wide rows", *some[3:5])
    yield case("of unaligned tensors", *some[3:5])
    yield case("of scores far from zero", (37, 37), (1, 9))


def _decode_cases(kind: Problem, tiles: Sequence[int], small: bool) -> Iterator[Case]:
    t = max(tiles)
    p = kind.page_size or t
    edges = (0, 1, p + 1, t, t + 1) if small else _decode_edges(tiles, p)

    def case(probe: str, *lengths: int, **changes: Any) -> Case:
        sizes = {"batch": len(lengths), "seqlen_k": max(lengths)}
        return Case(probe, replace(kind, **sizes, **changes), lengths)

    yield case("random values", t + 9, 37)
    yield case("visible keys are counted", *edges)
    if kind.windowed:
        for left in (0, t) if small else (0, 1, t - 1, t, t + 1):
            yield case("visible keys are counted", *edges, window_left=left)
        if kind.pages != "chosen":  # whose table the probe does not read
            yield case("keys before all windows change no bit", 2 * t + 9, 1, t + 1)
    yield case("rows without keys", 0, 40, kind.seqlen_q - 1)
    yield case("a scale of its own", t + 9)
    if kind.softcap:
        yield case("scores far beyond a softcap", t + 9)
    yield case("lse is the natural logarithm", 2 * t + 1, 1)
    yield case("out without lse", t + 9)
    yield case("dead slots change no bit", t + 1, 1, p, 0)
    if kind.paged:
        yield case("pages lie anywhere", t + 9, 40)
        if not kind.quantised:
            yield case("page ids beyond 32 bits", min(40, 3 * p))
    elif not kind.quantised:
        yield case("keys beyond 32 bits", t + 9)
    yield case("wide rows", t + 9, 37)
    yield case("each tensor unaligned", t + 9)
    if not kind.quantised:
        yield case("each tensor in another order", t + 9, 9)
        yield case("the largest score comes last", 2 * t + 9)
        yield case("scores far from zero", 37)
    yield case("lengths and table are views", t + 9, 3)
    yield case("two runs agree in every bit", t + 9)
    if kind.num_heads > 1:
        yield case("heads are apart", t + 9)


def _decode_edges(tiles: Sequence[int], page_size: int) -> tuple[int, ...]:
    sizes = {*tiles, page_size, 2 * max(tiles)}
    return tuple(sorted({0, 1, 2, *(size + d for size in sizes for d in NEAR)}))
