"""The decode family's predicate and default: valid everywhere it serves, and refusals explain."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoflash import gpu as gpus
from autoflash.config import Config, grid
from autoflash.families.decode import FAMILY
from autoflash.families.decode_last import FAMILY as LAST
from autoflash.families.decode_latent import FAMILY as LATENT
from autoflash.families.family import space
from autoflash.gpu import KIB, Gpu
from autoflash.model import predicted_us
from autoflash.problem import Problem, ProblemError
from autoflash.records import Resources
from autoflash.runtime.validity import decode_refusal

H200 = gpus.known("NVIDIA_H200")
A10 = gpus.known("NVIDIA_A10")


def problem(**changed: int | str | bool) -> Problem:
    fields = {"op": "decode", "dtype": "bf16", "batch": 64, "num_heads": 32, "num_kv_heads": 8}
    fields |= {"head_dim": 128, "seqlen_q": 1, "seqlen_k": 4096, "page_size": 16}
    return Problem(**(fields | changed))  # pyright: ignore[reportArgumentType]


problems = st.builds(
    lambda group_size, num_kv_heads, types, added, **fields: problem(
        num_heads=group_size * num_kv_heads,
        num_kv_heads=num_kv_heads,
        **dict.fromkeys(added, True),
        **dict(zip(("dtype", "kv_dtype", "kv_scales"), types, strict=False)),
        **fields,
    ),
    group_size=st.sampled_from([1, 4, 7, 16, 40, 71, 200]),
    num_kv_heads=st.sampled_from([1, 2, 8, 128]),
    types=st.sampled_from(
        [
            ("bf16",),
            ("fp16",),
            ("fp32",),
            ("bf16", "fp8_e4m3", "head"),
            ("fp16", "int8", "token"),
        ]
    ),
    batch=st.integers(1, 100_000),
    head_dim=st.integers(2, 32).map(lambda n: 8 * n),
    seqlen_q=st.integers(1, 16),
    seqlen_k=st.integers(0, 2**20),
    page_size=st.sampled_from([0, 1, 3, 16, 480]),
    kv_layout=st.sampled_from(["nhd", "hnd"]),
    lengths=st.sampled_from(["equal", "ragged"]),
    window_left=st.sampled_from([-1, 0, 127, 4095]),
    softcap=st.booleans(),
    added=st.sampled_from([(), ("alibi",), ("bias",)]),
    sinks=st.booleans(),
)
latent_problems = st.builds(
    lambda **fields: problem(num_kv_heads=1, head_dim=576, head_dim_v=512, **fields),
    dtype=st.sampled_from(["bf16", "fp16"]),
    num_heads=st.sampled_from([1, 8, 16, 128]),
    batch=st.integers(1, 10_000),
    seqlen_q=st.integers(1, 16),
    seqlen_k=st.integers(0, 2**20),
    page_size=st.sampled_from([0, 1, 64]),
    lengths=st.sampled_from(["equal", "ragged"]),
    window_left=st.sampled_from([-1, 127]),
    softcap=st.booleans(),
    bias=st.booleans(),
)
any_gpu = st.builds(
    lambda gpu, smem_kib: replace(gpu, smem_per_block=smem_kib * KIB),
    st.sampled_from(sorted(gpus.KNOWN.values(), key=lambda gpu: gpu.name)),
    st.integers(64, 227),
)


@given(problems, any_gpu)
def test_the_default_is_valid_for_every_problem_on_every_gpu_of_64_kb_and_more(
    any_problem: Problem, gpu: Gpu
) -> None:
    for family in (FAMILY, LAST):
        assert family.unsupported(any_problem, gpu) is None
        assert family.refusal(any_problem, family.default(any_problem, gpu), gpu) is None


@given(problems, any_gpu)
@settings(max_examples=10, deadline=None)
def test_every_refusal_says_why_and_what_is_wrong_at_run_time_is_no_candidate(
    any_problem: Problem, gpu: Gpu
) -> None:
    candidates = 0
    for family in (FAMILY, LAST):
        for config, reason in space(family, any_problem, gpu):
            candidates += reason is None
            assert reason is None or len(reason.split()) >= 4
            if decode_refusal(any_problem, config.as_dict(), gpu):
                assert reason
    assert 1 <= candidates <= 200  # the search is exhaustive up to 200


@given(problems, any_gpu)
def test_the_default_is_one_of_the_configs_that_the_search_may_try(
    any_problem: Problem, gpu: Gpu
) -> None:
    for family in (FAMILY, LAST):
        values = {knob.name: knob.values for knob in family.knobs}
        default = family.default(any_problem, gpu).as_dict()
        assert default.keys() == values.keys()
        assert all(value in values[name] for name, value in default.items())


@given(latent_problems, any_gpu)
@settings(max_examples=25, deadline=None)
def test_latent_attention_has_a_valid_default_and_candidates_on_every_gpu(
    latent: Problem, gpu: Gpu
) -> None:
    default = LATENT.default(latent, gpu)
    assert LATENT.unsupported(latent, gpu) is None
    assert LATENT.refusal(latent, default, gpu) is None
    assert all(default[knob.name] in knob.values for knob in LATENT.knobs)
    reasons = [reason for _, reason in space(LATENT, latent, gpu)]
    assert 1 <= reasons.count(None) <= 200
    assert all(reason is None or len(reason.split()) >= 4 for reason in reasons)


def test_only_latent_attention_is_served_by_its_family() -> None:
    latent = problem(num_kv_heads=1, head_dim=576, head_dim_v=512)
    assert FAMILY.unsupported(latent, H200) == "head_dim_v 512 is not head_dim 576"
    assert LATENT.unsupported(problem(), H200) == (
        "serves decode of latent attention, head_dim 576 and head_dim_v 512"
    )
    fp32 = LATENT.unsupported(replace(latent, dtype="fp32", kv_dtype="", out_dtype=""), H200)
    assert fp32 == "dtype fp32 and kv_dtype fp32 are not one type of 16 bits"
    for changes, reason in (
        ({"num_kv_heads": 2}, "num_kv_heads 2: latent attention has one"),
        ({"head_dim_v": 0}, "head_dim 576 is not a multiple of 8 from 16 to 256; decode has 576"),
    ):
        with pytest.raises(ProblemError, match=reason):
            replace(latent, **changes)


def test_pages_of_128_channels_have_a_few_dozen_candidates_on_the_h200() -> None:
    for batch, low, high in ((1, 25, 50), (64, 50, 80)):
        reasons = [reason for _, reason in space(FAMILY, problem(batch=batch), H200)]
        assert low <= reasons.count(None) <= high


def test_the_best_known_configs_of_the_h200_are_candidates() -> None:
    swapped = {"SWAP": 1, "BLOCK_N": 64, "num_warps": 4}
    for head_dim, config in (
        (128, {**swapped, "num_stages": 3, "PROGRAMS_PER_SM": 2}),
        (128, {**swapped, "num_stages": 2, "PROGRAMS_PER_SM": 3}),
        (128, {"SWAP": 0, "BLOCK_N": 32, "num_warps": 2, "num_stages": 4}),
        (64, {**swapped, "num_stages": 3, "PROGRAMS_PER_SM": 4}),
        (256, {**swapped, "num_stages": 3, "PROGRAMS_PER_SM": 1}),
    ):
        p = problem(head_dim=head_dim)
        candidates = [c for c, no in space(FAMILY, p, H200) if no is None]
        schedules = {c["SCHEDULE"] for c in candidates if config.items() <= c.as_dict().items()}
        assert schedules == {"split", "group"}


def test_ragged_batches_are_balanced_by_default_and_others_split() -> None:
    for batch, lengths, schedule in (
        (64, "ragged", "group"),
        (64, "equal", "split"),
        (1, "ragged", "split"),
        (65_537, "ragged", "split"),
    ):
        default = FAMILY.default(problem(batch=batch, lengths=lengths), H200)
        assert default["SCHEDULE"] == schedule


def test_quantised_caches_have_candidates_of_both_schedules_and_no_swapped_ones() -> None:
    p = problem(kv_dtype="fp8_e4m3")
    for gpu in (H200, A10):
        candidates = [config for config, reason in space(FAMILY, p, gpu) if reason is None]
        assert {config["SCHEDULE"] for config in candidates} == {"split", "group"}
        assert {config["SWAP"] for config in candidates} == {0}
    swapped = FAMILY.default(problem(), H200)
    assert swapped["SWAP"] == 1
    assert "quantised bytes are widened first" in str(FAMILY.refusal(p, swapped, H200))


def test_the_last_program_merges_where_many_do_and_something_is_cut() -> None:
    for batch, schedules in ((8, set()), (64, {"group"}), (17, {"group", "split"})):
        p = problem(batch=batch, lengths="equal")
        configs = [config for config, reason in space(LAST, p, H200) if reason is None]
        configs.remove(LAST.default(p, H200))
        assert {config["SCHEDULE"] for config in configs} == schedules
    alone = LAST.refusal(problem(batch=8), Config.of("decode_last", MERGED), H200)
    assert alone == "few programs would merge while the rest of the GPU waits"
    whole = LAST.refusal(problem(), Config.of("decode_last", MERGED), H200)
    assert whole == "no sequence is cut, and nothing is left to merge"


def test_what_merges_without_a_kernel_is_predicted_by_the_kernel_that_does_the_work() -> None:
    p = problem(lengths="ragged")
    us = [
        predicted_us(p, family.default(p, H200), Resources(168, 0, 100 * KIB), H200)
        for family in (FAMILY, LAST)
    ]
    assert us[0] == us[1]  # of as many launches


PLAIN = {"SCHEDULE": "split", "SWAP": 0, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3}
REST = {"PROGRAMS_PER_SM": 1, "DEPENDENT_LAUNCH": 0, "COMBINE_WARPS": 4}
MERGED = {**PLAIN, "PROGRAMS_PER_SM": 1, "DEPENDENT_LAUNCH": 1}


@pytest.mark.parametrize(
    ("changed", "gpu", "expected"),
    [
        ({"DEPENDENT_LAUNCH": 1}, A10, "dependent launch needs sm_90, this is sm_86"),
        ({"SWAP": 1}, A10, "the swapped product is made for sm_90, this is sm_86"),
        ({"SWAP": 1, "BLOCK_N": 32}, H200, "needs 64 keys, 64 channels and 4 warps"),
        ({"num_stages": 4, "BLOCK_N": 128}, A10, "bytes of shared memory, a block of sm_86 has"),
        ({"num_warps": 2}, A10, "a warp of a plain product works on 16 keys"),
        ({"num_stages": 2}, A10, "two stages of a plain product leave one tile in flight"),
        ({}, H200, "dependent launch is never slower where the GPU has it"),
        ({"PROGRAMS_PER_SM": 8}, A10, "programs per SM are 1 or the 1 that fit"),
    ],
)
def test_a_refusal_names_the_knob_and_the_limit(
    changed: dict[str, int | str], gpu: Gpu, expected: str
) -> None:
    config = Config.of("decode", {**PLAIN, **REST, **changed})
    assert config in set(grid(FAMILY.name, FAMILY.knobs))
    assert expected in str(FAMILY.refusal(problem(), config, gpu))


def test_the_group_schedule_is_for_batches_that_one_program_can_add_up() -> None:
    group = {**PLAIN, **REST, "SCHEDULE": "group"}
    for batch, valid in ((1024, True), (1025, False)):
        assert (decode_refusal(problem(batch=batch), group, A10) is None) is valid
    one = FAMILY.refusal(problem(batch=1), Config.of("decode", group), A10)
    assert one == "one sequence needs no group schedule"


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"head_dim_v": 64}, "head_dim_v 64 is not head_dim 128"),
        ({"kv_dtype": "fp16"}, "kv_dtype fp16 and out_dtype bf16 are not both dtype bf16"),
        (
            {"dtype": "fp32", "kv_dtype": "int8"},
            "kv_dtype int8 is served for queries of 16 bits, not fp32",
        ),
        ({"batch_invariant": True}, "batch_invariant is not served yet"),
    ],
)
def test_what_is_not_served_yet_is_refused_by_name(
    changed: dict[str, int | str | bool], expected: str
) -> None:
    assert expected in str(FAMILY.unsupported(problem(**changed), H200))
    knobs = FAMILY.default(problem(), H200).as_dict()
    assert expected in str(decode_refusal(problem(**changed), knobs, H200))
