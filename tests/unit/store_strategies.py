"""Hypothesis strategies for every record that a database or a winners file holds."""

from dataclasses import fields

from hypothesis import strategies as st

from autoflash.config import Config
from autoflash.families import FAMILIES
from autoflash.gpu import Gpu
from autoflash.problem import Problem
from autoflash.records import (
    REGIMES,
    SOURCES,
    STAGES,
    STATUSES,
    Clocks,
    Decision,
    Resources,
    Trial,
    Winner,
)
from autoflash.runtime.problem import (
    CHOSEN,
    DTYPE_BYTES,
    KV_DTYPE_BYTES,
    KV_SCALES,
    LENGTHS,
    PAGES,
    QUANTISED_BYTES,
)
from autoflash.toolchain import Toolchain

GPU_FIELDS = [(field.name, field.type) for field in fields(Gpu)]
texts = st.text(st.characters(codec="utf-8"), max_size=12)
counts = st.integers(0, 2**63 - 1)
floats = st.floats(allow_nan=False, allow_infinity=False)
gpus = st.builds(Gpu, **{name: texts if kind is str else counts for name, kind in GPU_FIELDS})
toolchains = st.builds(Toolchain, texts, texts, texts, texts, texts, st.booleans())
dtypes = st.sampled_from(sorted(DTYPE_BYTES))


@st.composite
def problems(draw):
    num_kv_heads = draw(st.integers(1, 80))
    kv_dtype = draw(st.sampled_from(sorted(KV_DTYPE_BYTES)))
    position = draw(st.sampled_from(("", "alibi", "bias")))
    op = draw(st.sampled_from(("prefill", "decode")))
    masked_by = draw(st.sampled_from(("", "blocks", "documents"))) if op == "prefill" else ""
    windowed = masked_by != "blocks"  # which excludes a window
    blocks = masked_by == "blocks"
    dropout = op == "prefill" and draw(st.booleans())
    rules = st.sampled_from(("", "q_idx >= kv_idx", "b == 0 or h % 3 < kv_idx // 16"))
    mask = draw(rules) if op == "prefill" else ""
    paged = op == "decode" or not (mask or masked_by or position == "bias")
    pages = draw(st.sampled_from([name for name in PAGES if op == "decode" or name != CHOSEN]))
    captured = op == "decode" and pages != CHOSEN
    return Problem(
        op=op,
        dtype=draw(dtypes),
        batch=draw(st.integers(1, 2**40)),
        num_heads=num_kv_heads * draw(st.integers(1, 80)),
        num_kv_heads=num_kv_heads,
        head_dim=8 * draw(st.integers(2, 32)),
        seqlen_q=draw(st.integers(1, 16)),
        seqlen_k=draw(st.integers(0, 2**40)),
        causal=draw(st.booleans()),
        page_size=draw(st.integers(0, 512)) if paged and not dropout else 0,
        layout=draw(st.sampled_from(("bshd", "bhsd"))),
        kv_layout=draw(st.sampled_from(("nhd", "hnd"))),
        lengths=draw(st.sampled_from([n for n in LENGTHS if captured or n != "captured"])),
        kv_dtype=kv_dtype,
        out_dtype=draw(dtypes),
        head_dim_v=draw(st.integers(1, 512)),
        deterministic=draw(st.booleans()),
        batch_invariant=draw(st.booleans()),
        pages=pages,
        window_left=draw(st.integers(-1, 2**40)) if windowed else -1,
        window_right=draw(st.integers(-1, 2**40)) if windowed else -1,
        mask=mask,
        masked_by=masked_by,
        density=draw(st.integers(1, 100)) if masked_by else 0,
        mask_block_q=16 * draw(st.integers(1, 4096)) if blocks else 0,
        mask_block_k=16 * draw(st.integers(1, 4096)) if blocks else 0,
        softcap=draw(st.booleans()),
        alibi=position == "alibi",
        bias=position == "bias",
        sinks=draw(st.booleans()),
        dropout=dropout,
        kv_scales=draw(st.sampled_from(KV_SCALES)) if kv_dtype in QUANTISED_BYTES else "",
    )


@st.composite
def configs(draw):
    """Knobs that the family has, with values it may well refuse."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    values = st.integers() | texts
    return Config.of(family, {knob.name: draw(values) for knob in FAMILIES[family].knobs})


@st.composite
def trials(draw):
    regime = draw(st.sampled_from(REGIMES))
    timed = st.none() if regime == "none" else st.none() | floats
    some = st.none() | counts
    ratios = st.none() | st.floats(allow_nan=False)
    return Trial(
        problem=draw(problems()),
        config=draw(configs()),
        kernel_digest=draw(texts),
        status=draw(st.sampled_from(STATUSES)),
        stage=draw(st.sampled_from(STAGES)),
        source=draw(st.sampled_from(SOURCES)),
        regime=regime,
        median_us=draw(timed),
        p20_us=draw(timed),
        p80_us=draw(timed),
        samples=draw(counts),
        max_ratio=draw(ratios),
        rms_ratio=draw(ratios),
        lse_error=draw(ratios),
        seconds=draw(floats),
        error=draw(texts),
        asked_at=draw(texts),
        compiled_at=draw(texts),
        resources=Resources(*(draw(some) for _ in range(5))),
        clocks=Clocks(draw(some), draw(some), draw(st.none() | floats), draw(some), draw(some)),
    )


@st.composite
def winners(draw):
    timed = st.tuples(configs(), floats)
    verdict = Decision(
        problem=draw(problems()),
        kernel_digest=draw(texts),
        winner=draw(configs()),
        winner_us=draw(floats),
        default=draw(configs()),
        default_us=draw(floats),
        margin=draw(floats),
        margin_low=draw(floats),
        margin_high=draw(floats),
        tied=tuple(draw(st.lists(configs(), max_size=2))),
        times=tuple(draw(st.lists(timed, max_size=2))),
        regret=draw(floats),
        source=draw(st.sampled_from(SOURCES)),
    )
    at = draw(st.datetimes()).isoformat()
    return Winner(draw(gpus), draw(toolchains), verdict, draw(floats), at)
