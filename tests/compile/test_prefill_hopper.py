"""prefill_hopper compiled for sm_90: products run side by side, spills and memory are bounded."""

import re
from dataclasses import replace

import pytest
from assembled import assembler_report, counted, loops_with

from autoflash import families
from autoflash.config import Config
from autoflash.families.prefill_hopper import FAMILY
from autoflash.gpu import known
from autoflash.kernel import _compiled, compile_candidate
from autoflash.problem import Problem, title
from autoflash.runtime.hopper_validity import prefill_hopper_smem_bytes

H200 = known("NVIDIA_H200")


@pytest.fixture(autouse=True)
def registered(monkeypatch) -> None:
    monkeypatch.setitem(families.FAMILIES, FAMILY.name, FAMILY)


def problem(head_dim: int, causal: bool, seqlen: int, **on) -> Problem:
    heads = max(1, 2048 // head_dim)
    sizes = (4, heads, heads, head_dim, seqlen, seqlen)
    return Problem("prefill", "bf16", *sizes, causal=causal, **on)


def compiled(p: Problem, config: Config, wide_rows: int = 0) -> list:
    return _compiled(p, config, H200, with_lse=True, wide_rows=wide_rows)[0]


def product_loops(kernel, p: Problem, config: Config) -> list[tuple[list[str], list[str]]]:
    """Each warpgroup's loop over key blocks, and what of it no branch jumps over.

    It has both products. Waits are loops too, some of them round one product; and round more than
    the loop over blocks, as those over tiles are.
    """
    whole, unskipped = (loops_with(kernel, "HGMMA", "MUFU.EX2", unskipped=u) for u in (False, True))
    both = {"HGMMA": p.head_dim // 16 + int(config["BLOCK_N"]) // 16}
    pairs = zip(whole, unskipped, strict=True)
    found = [(body, always) for body, always in pairs if counted(body, "HGMMA") == both]
    return found[: int(config["WARPGROUPS"])]


# The recommended ways of each head_dim, by the length that makes them the default.
RECOMMENDED = [
    problem(head_dim, causal, seqlen)
    for head_dim, causal, seqlens in (
        (64, True, (2048, 4096)),
        (64, False, (1024, 4096)),
        (128, True, (512, 4096)),
        (128, False, (4096,)),
        (256, True, (4096,)),
        (256, False, (4096,)),
    )
    for seqlen in seqlens
]


@pytest.mark.parametrize("p", RECOMMENDED, ids=title)
def test_products_run_side_by_side_and_a_warp_that_raises_no_maximum_multiplies_no_sum(p):
    """Nor does it take exponentials of factors, ask the other lanes of its rows, permute bytes."""
    config = FAMILY.default(p, H200)
    *others, kernel = compiled(p, config)
    assert len(others) == (config["SCHEDULE"] != "static")
    report = assembler_report(kernel)
    # C7510 and C7512: a product was serialised, which costs a third of the speed
    assert not re.findall(r"C75\d\d", report)
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill", report)]
    # 192 causal rows spill a few words between tiles, and were measured to win all the same
    assert max(spills) <= (FAMILY.max_spills if config["WARPGROUPS"] == 3 and p.causal else 0)
    loops = product_loops(kernel, p, config)
    assert len(loops) == config["WARPGROUPS"]
    scores = 64 * int(config["BLOCK_N"]) // 128  # of a thread
    for body, always in loops:
        # one exponential for each score and two for the rescaling of a thread's rows
        wanted = {"EX2": scores + 2, "LDL": 0, "STL": 0}
        assert counted(body, *wanted) == wanted
        wanted = {"EX2": scores, "VOTE": 1, "FMUL": 0, "SHFL": 0, "PRMT": 0}
        assert counted(always, *wanted) == wanted
        assert counted(always, "HGMMA") == counted(body, "HGMMA")


MODIFIED = [
    problem(128, True, 4096, window_left=1000),
    problem(256, True, 4096, window_left=1000, softcap=True),
    problem(64, True, 4096, window_left=127, sinks=True),
    problem(64, True, 4096, softcap=True, sinks=True),
]


@pytest.mark.parametrize("p", MODIFIED, ids=title)
def test_windows_softcap_and_sinks_serialise_no_product_and_spill_in_no_block(p):
    config = FAMILY.default(p, H200)
    kernel = compiled(p, config)[-1]
    report = assembler_report(kernel)
    assert not re.findall(r"C75\d\d", report)
    assert max(int(n) for n in re.findall(r"(\d+) bytes spill", report)) <= FAMILY.max_spills
    loops = product_loops(kernel, p, config)
    assert len(loops) == config["WARPGROUPS"]
    scores = 64 * int(config["BLOCK_N"]) // 128  # of a thread
    for body, always in loops:
        assert counted(body, "LDL", "STL") == {"LDL": 0, "STL": 0}
        # what masks, and both ways to a tanh, are branched past
        wanted = {"EX2": scores, "FSEL": 0, "RCP": 0}
        assert counted(always, *wanted) == wanted
        assert counted(always, "HGMMA") == counted(body, "HGMMA")


@pytest.mark.parametrize(
    ("head_dim", "knobs"),
    [
        (64, {"WARPGROUPS": 1, "Q_BUFFERS": 1, "EPILOGUE": "direct"}),
        (64, {"Q_BUFFERS": 1, "EPILOGUE": "direct"}),
        (128, {"WARPGROUPS": 1, "BLOCK_N": 64, "num_stages": 3}),
        (256, {}),
    ],
    ids=str,
)
def test_the_bound_of_shared_memory_holds_and_is_near(head_dim, knobs):
    p = problem(head_dim, True, 2048)
    config = Config.of("prefill_hopper", FAMILY.default(p, H200).as_dict() | knobs)
    smem_bytes = compile_candidate(p, config, H200).smem_bytes
    bound = prefill_hopper_smem_bytes(p, config.as_dict())
    assert smem_bytes <= bound <= smem_bytes + 4096


def test_ragged_lengths_offset_diagonals_and_odd_strides_compile():
    p = replace(problem(96, True, 1000), dtype="fp16", kv_dtype="fp16", out_dtype="fp16")
    p = replace(p, seqlen_k=1100, num_kv_heads=3)
    names = [
        [kernel.name for kernel in compiled(p, FAMILY.default(p, H200), wide_rows)]
        for wide_rows in (0, 1)
    ]
    usual = ["zero_counter_kernel", "prefill_hopper_kernel"]
    assert names == [usual, ["copy_rows_kernel"] * 3 + usual]
    empty = replace(p, seqlen_k=0)
    assert [k.name for k in compiled(empty, FAMILY.default(p, H200))] == ["no_keys_kernel"]


def test_lengths_and_head_counts_do_not_compile_another_kernel():
    p = problem(64, True, 2048)
    config = FAMILY.default(p, H200)
    shapes = [
        {},
        {"seqlen_q": 128, "seqlen_k": 128},
        {"seqlen_q": 128, "seqlen_k": 4096},
        {"num_heads": 1, "num_kv_heads": 1, "batch": 1},
        {"num_heads": 32, "num_kv_heads": 4},
    ]
    kernels = [compiled(replace(p, **shape), config)[-1] for shape in shapes]
    assert len({kernel.hash for kernel in kernels}) == 1
