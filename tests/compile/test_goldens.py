"""Rendered kernels: reviewed as goldens, compiled for every target with every family's default."""

import os
from pathlib import Path

import pytest

from autoflash import kernel
from autoflash.families import FAMILIES, serving, untuned_variants
from autoflash.gpu import KNOWN
from autoflash.kernel import CompileError, compile_candidate
from autoflash.problem import Problem, Variant
from autoflash.render import render
from autoflash.runtime.problem import MASKED_BY, MODIFIERS

GOLDEN = Path(__file__).resolve().parent.parent / "golden"

RULE = "(q_idx - kv_idx) % 4 == 0 or h < 2"
# Every switch alone; pairs of switches are added here where they meet in one kernel.
GOLDEN_VARIANTS = (
    Variant("prefill", "prefill"),
    Variant("prefill", "prefill", causal=True),
    Variant("prefill", "prefill", window=True),
    Variant("prefill", "prefill", softcap=True),
    Variant("prefill", "prefill", alibi=True),
    Variant("prefill", "prefill", bias=True),
    Variant("prefill", "prefill", sinks=True),
    Variant("prefill", "prefill", causal=True, softcap=True),
    Variant("prefill", "prefill", causal=True, alibi=True),
    Variant("prefill", "prefill", window=True, softcap=True),
    Variant("prefill", "prefill", window=True, sinks=True),
    Variant("prefill", "prefill", window=True, softcap=True, bias=True, sinks=True),
    Variant("prefill", "prefill", causal=True, dropout=True),
    Variant("prefill", "prefill", window=True, bias=True, dropout=True),
    Variant("prefill", "prefill", blocks=True),
    Variant("prefill", "prefill", causal=True, blocks=True, mask=RULE),
    Variant("prefill", "prefill", documents=True),
    Variant("prefill", "prefill", causal=True, documents=True),
    Variant("prefill", "prefill", window=True, softcap=True, documents=True, mask=RULE),
    Variant("prefill", "prefill", causal=True, prefix=True),
    Variant("prefill", "prefill", mask=RULE),
    Variant("prefill", "prefill", causal=True, head_dim_v=True),
    Variant("prefill", "prefill", varlen=True),
    Variant("prefill", "prefill", causal=True, varlen=True),
    Variant("prefill", "prefill", causal=True, dropout=True, varlen=True),
    Variant("prefill", "prefill", window=True, softcap=True, alibi=True, sinks=True, varlen=True),
    Variant("prefill", "prefill", causal=True, bias=True, varlen=True),
    Variant("prefill", "prefill", causal=True, varlen=True, mask=RULE),
    Variant("prefill", "prefill", causal=True, prefix=True, varlen=True),
    Variant("prefill", "prefill", causal=True, documents=True, varlen=True),
    Variant("prefill", "prefill", documents=True, paged=True),
    Variant("prefill", "prefill", causal=True, documents=True, varlen=True, paged=True),
    Variant("prefill", "prefill", window=True, documents=True, paged=True, mask=RULE),
    Variant("prefill", "prefill", paged=True),
    Variant("prefill", "prefill", causal=True, paged=True),
    Variant("prefill", "prefill", window=True, varlen=True, paged=True),
    Variant("prefill", "prefill", causal=True, paged=True, mask=RULE),
    Variant("prefill", "prefill", blocks=True, paged=True),
    Variant("prefill", "prefill", causal=True, bias=True, blocks=True, paged=True, mask=RULE),
    Variant("prefill", "prefill", causal=True, prefix=True, paged=True),
    Variant("prefill", "prefill", window=True, bias=True, varlen=True, paged=True, mask=RULE),
    Variant("prefill", "prefill", causal=True, bias=True, paged=True),
    Variant("prefill", "prefill", window=True, bias=True, varlen=True, paged=True),
    Variant("prefill_hopper", "prefill"),
    Variant("prefill_hopper", "prefill", causal=True),
    Variant("prefill_hopper", "prefill", window=True),
    Variant("prefill_hopper", "prefill", causal=True, softcap=True, sinks=True),
    Variant("prefill_hopper", "prefill", window=True, softcap=True),
    Variant("prefill_hopper", "prefill", window=True, sinks=True),
    Variant("decode", "decode"),
    Variant("decode", "decode", paged=True),
    Variant("decode", "decode", queries=True),
    Variant("decode", "decode", paged=True, queries=True),
    Variant("decode", "decode", quantised=True),
    Variant("decode", "decode", paged=True, quantised=True),
    Variant("decode", "decode", quantised=True, token_scales=True),
    Variant("decode", "decode", paged=True, quantised=True, token_scales=True),
    Variant("decode", "decode", paged=True, queries=True, quantised=True),
    Variant("decode", "decode", paged=True, queries=True, quantised=True, token_scales=True),
    Variant("decode", "decode", modified=True),
    Variant("decode", "decode", modified=True, paged=True, queries=True),
    Variant(
        *("decode", "decode"),
        **dict.fromkeys(("modified", "paged", "queries", "quantised", "token_scales"), True),
    ),
    Variant("decode", "decode", bias=True, modified=True),
    Variant("decode", "decode", bias=True, modified=True, paged=True, queries=True),
    Variant("decode", "decode", bias=True, modified=True, paged=True, quantised=True),
    Variant("decode_last", "decode"),
    Variant("decode", "decode", modified=True, mask=RULE),
    Variant("decode", "decode", modified=True, paged=True, queries=True, mask=RULE),
    Variant("decode", "decode", bias=True, modified=True, paged=True, quantised=True, mask=RULE),
    Variant("decode", "decode", documents=True, modified=True),
    Variant("decode", "decode", documents=True, modified=True, paged=True, queries=True),
    Variant("decode", "decode", prefix=True, modified=True, queries=True),
    Variant(
        "decode_last", "decode", bias=True, prefix=True, modified=True, paged=True, queries=True
    ),
    Variant(
        *("decode", "decode"),
        **dict.fromkeys(("documents", "modified", "paged", "queries", "quantised"), True),
    ),
    Variant("decode_latent", "decode", documents=True, modified=True, queries=True),
    Variant("decode", "decode", blocks=True, modified=True),
    Variant("decode", "decode", blocks=True, modified=True, paged=True, queries=True, mask=RULE),
    Variant("decode", "decode", blocks=True, modified=True, paged=True, quantised=True),
    Variant("decode_last", "decode", bias=True, blocks=True, modified=True, paged=True),
    Variant("decode_latent", "decode", blocks=True, modified=True, queries=True),
    Variant("decode_last", "decode", bias=True, modified=True, paged=True),
    Variant("decode_last", "decode", modified=True, paged=True, mask=RULE),
    Variant("decode_last", "decode", modified=True, paged=True),
    Variant("decode_last", "decode", paged=True),
    Variant("decode_last", "decode", paged=True, queries=True, quantised=True, token_scales=True),
    Variant("decode_latent", "decode", queries=True),
    Variant("decode_latent", "decode", paged=True, queries=True),
    Variant("decode_latent", "decode", modified=True, paged=True, queries=True),
    Variant("decode_latent", "decode", bias=True, modified=True, paged=True, queries=True),
    Variant("decode_latent", "decode", modified=True, paged=True, queries=True, mask=RULE),
    Variant("backward", "backward"),
    Variant("backward", "backward", causal=True),
    Variant("backward", "backward", window=True),
    Variant("backward", "backward", softcap=True),
    Variant("backward", "backward", alibi=True),
    Variant("backward", "backward", bias=True),
    Variant("backward", "backward", sinks=True),
    Variant("backward", "backward", varlen=True),
    Variant("backward", "backward", window=True, softcap=True, bias=True, sinks=True),
    Variant("backward", "backward", causal=True, softcap=True, alibi=True, varlen=True),
    Variant("backward", "backward", causal=True, dropout=True),
    Variant("backward", "backward", bias=True, dropout=True),
    Variant("backward", "backward", bias=True, mask=RULE),
    Variant("backward", "backward", causal=True, bias=True, varlen=True),
    Variant("backward", "backward", causal=True, bias=True, blocks=True, mask=RULE),
    Variant("backward", "backward", causal=True, prefix=True),
    Variant("backward", "backward", causal=True, prefix=True, varlen=True),
    Variant("backward", "backward", window=True, varlen=True, mask=RULE),
    Variant("backward", "backward", window=True, documents=True),
    Variant("backward", "backward", causal=True, documents=True, varlen=True),
    Variant("backward", "backward", causal=True, blocks=True, mask=RULE),
    Variant("backward", "backward", causal=True, head_dim_v=True),
    Variant("backward", "backward", bias=True, head_dim_v=True),
    Variant("backward_single", "backward"),
    Variant("backward_single", "backward", causal=True),
    Variant("backward_single", "backward", causal=True, softcap=True, bias=True),
    Variant("backward_single", "backward", window=True, alibi=True, sinks=True, varlen=True),
    Variant("backward_single", "backward", causal=True, dropout=True, varlen=True),
    Variant("backward_single", "backward", documents=True),
    Variant("backward_single", "backward", window=True, bias=True, documents=True, varlen=True),
    Variant("backward_single", "backward", blocks=True),
    Variant("backward_single", "backward", head_dim_v=True),
    Variant("backward_single", "backward", head_dim_v=True, varlen=True),
    Variant("backward_single", "backward", causal=True, varlen=True, mask=RULE),
    Variant("backward_single", "backward", window=True, bias=True, dropout=True, varlen=True),
    Variant("backward_hopper", "backward"),
    Variant("backward_hopper", "backward", causal=True),
    Variant("backward_hopper_single", "backward"),
    Variant("backward_hopper_single", "backward", causal=True),
)

REVIEWED = (*GOLDEN_VARIANTS, *untuned_variants().values())

TARGETS = {gpu.arch: gpu for gpu in KNOWN.values() if gpu.name != "NVIDIA H100 80GB HBM3"}


def masks_of(variant: Variant) -> dict:
    masked_by = "".join(name for name in MASKED_BY if getattr(variant, name))
    fields = dict.fromkeys(("mask_block_q", "mask_block_k"), 128 if variant.blocks else 0)
    fields["density"] = 10 if masked_by else 0
    return {"mask": variant.mask, "masked_by": masked_by, **fields}


def takes_a_window(variant: Variant) -> bool:
    return variant.modified and not (variant.prefix or variant.blocks)


def problem_of(variant: Variant, **changes) -> Problem:
    fields = {
        "op": variant.op,
        "dtype": "bf16",
        "batch": 2,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 128,
        "seqlen_q": (4 if variant.queries else 1) if variant.op == "decode" else 512,
        "seqlen_k": 512,
        "causal": variant.causal,
        "page_size": 16 if variant.paged else 0,
        "layout": "thd" if variant.varlen else "bshd",
        "kv_dtype": "fp8_e4m3" if variant.quantised else "",
        "kv_scales": "token" if variant.token_scales else "",
        "head_dim_v": 64 if variant.head_dim_v else 0,
        "window_left": 100 if variant.window or takes_a_window(variant) else -1,
        **{modifier: getattr(variant, modifier) for modifier in MODIFIERS},
        **dict.fromkeys(("softcap", "sinks") if variant.modified else (), True),
        **dict.fromkeys(("alibi",) if variant.modified and not variant.bias else (), True),
        **masks_of(variant),
    }
    latent = {"head_dim": 576, "head_dim_v": 512, "num_kv_heads": 1} if variant.latent else {}
    return Problem(**{**fields, **latent, **changes})


@pytest.mark.parametrize("variant", REVIEWED, ids=lambda variant: variant.name)
def test_the_rendered_text_is_the_reviewed_one(variant):
    """`make golden` rewrites the goldens; the diff is then reviewed as code."""
    path = GOLDEN / f"{variant.name}.py"
    if os.environ.get("AUTOFLASH_REWRITE_GOLDENS") == "1":
        path.write_text(render(variant).text)
    assert path.read_text() == render(variant).text


def test_every_golden_is_of_a_listed_variant():
    listed = {f"{variant.name}.py" for variant in REVIEWED}
    assert {path.name for path in GOLDEN.glob("*.py")} == listed


def test_every_family_has_goldens():
    assert {variant.family for variant in GOLDEN_VARIANTS} == set(FAMILIES)


def switches(variant: Variant) -> set[str]:
    return {name for name, on in vars(variant).items() if on is True}


def is_plain(variant: Variant) -> bool:
    """Whether it is one of the texts that the others are made from by switches.

    A backward is made from its prefill's, and takes three times as long to compile; decode_last
    ends decode's kernel in another way; a prefill over pages is causal as a rule.
    """
    made = variant.op == "backward" or variant.family == "decode_last"
    made |= variant.chunked and not variant.causal
    return switches(variant) <= {"causal", "paged"} and not made


def meets_others(variant: Variant) -> bool:
    """Whether its switches meet each other, or a backward's kernels: what holds the most."""
    added = len(switches(variant) - {"causal", "paged"})
    return added > (1 if variant.op == "backward" else 2) or (
        variant.op == "backward" and not added
    )


def compiled_for(variant: Variant) -> tuple[str, ...]:
    """All targets for plain ones; of others the measured one, and the extremes for what is most."""
    if is_plain(variant):
        return ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
    return ("sm_80", "sm_90", "gfx942") if meets_others(variant) else ("sm_90",)


def marks_of(variant: Variant) -> tuple[pytest.MarkDecorator, ...]:
    return () if is_plain(variant) else (pytest.mark.slow,)


COMPILED = [
    pytest.param(variant, arch, id=f"{variant.name}-{arch}", marks=marks_of(variant))
    for variant in GOLDEN_VARIANTS
    for arch in compiled_for(variant)
    if FAMILIES[variant.family] in serving(problem_of(variant), TARGETS[arch])
]


@pytest.mark.parametrize(("variant", "arch"), COMPILED)
def test_the_default_config_compiles_and_fits_on_the_target(variant, arch):
    gpu, problem, family = TARGETS[arch], problem_of(variant), FAMILIES[variant.family]
    resources = compile_candidate(problem, family.default(problem, gpu), gpu)
    assert 0 < resources.smem_bytes <= gpu.smem_per_block
    assert 0 < resources.registers <= 512
    assert resources.spill_bytes <= family.max_spills


SCARCE = [
    pytest.param(variant, dtype, head_dim, id=f"{variant.name}-{dtype}-{head_dim}")
    for variant in GOLDEN_VARIANTS
    for dtype, head_dim in (("fp16", 256), ("fp32", 256), ("bf16", 80))
    if is_plain(variant) or (dtype == "fp16" and meets_others(variant) and not variant.latent)
    if FAMILIES[variant.family] in serving(problem_of(variant), TARGETS["sm_86"])
]


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "dtype", "head_dim"), SCARCE)
def test_wide_types_and_odd_head_dims_fit_where_shared_memory_is_scarce(variant, dtype, head_dim):
    gpu, family = TARGETS["sm_86"], FAMILIES[variant.family]
    problem = problem_of(variant, dtype=dtype, head_dim=head_dim)
    resources = compile_candidate(problem, family.default(problem, gpu), gpu)
    assert resources.smem_bytes <= gpu.smem_per_block


def test_a_compile_error_names_the_line_and_the_template_part(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOFLASH_CACHE", str(tmp_path))
    problem, gpu = problem_of(GOLDEN_VARIANTS[0]), TARGETS["sm_90"]
    rendered = render(GOLDEN_VARIANTS[0])
    broken = rendered.text.replace("tl.math.exp2(m_i", "tl.math.no_such_function(m_i")
    assert broken != rendered.text
    line = 1 + next(i for i, text in enumerate(broken.splitlines()) if "no_such_function" in text)
    wrong = type(rendered)(rendered.variant, broken, rendered.digest)
    monkeypatch.setattr("autoflash.kernel.render", lambda variant: wrong)
    monkeypatch.setattr(kernel, "_loaded", kernel._loaded.__wrapped__)  # not what was loaded before
    with pytest.raises(CompileError, match=rf"\.py:{line} \(prefill/.*\.jinja\): .*no_such_func"):
        compile_candidate(problem, FAMILIES["prefill"].default(problem, gpu), gpu)
