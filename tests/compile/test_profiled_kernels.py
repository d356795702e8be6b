"""What a profile says of each kernel is what compiling the candidate says of the largest."""

from autoflash.families.decode import FAMILY
from autoflash.gpu import known
from autoflash.kernel import compile_candidate
from autoflash.problem import Problem
from autoflash.profile import profile

H200 = known("NVIDIA H200")


def test_kernels_are_told_one_by_one_and_the_largest_is_the_candidates():
    problem = Problem("decode", "bf16", 1, 32, 8, 128, 1, 8192)
    config = FAMILY.default(problem, H200)
    found, whole = profile(problem, config, H200), compile_candidate(problem, config, H200)
    assert [each.kernel for each in found] == ["decode", "combine"]
    assert max(each.registers for each in found) == whole.registers
    assert max(each.smem_bytes for each in found) == whole.smem_bytes
    decode, combine = found
    assert decode.warps == config["num_warps"] and combine.warps == config["COMBINE_WARPS"]
    assert decode.programs > 1 and 0 < decode.occupancy_percent < 100
