"""Masks that do not fit are refused in a line; what fits fills the problem."""

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from autoflash import gpu as gpus
from autoflash.families.family import space
from autoflash.families.prefill import FAMILY
from autoflash.runtime.arguments import prefill_problem
from autoflash.runtime.masks import BlockLists, block_lists
from autoflash.runtime.match import match_distance, match_key, match_sizes
from autoflash.runtime.modifiers import Modifiers, modifiers_of
from autoflash.runtime.problem import Problem, ProblemError

H200 = gpus.known("NVIDIA_H200")
IDS, PREFIX = torch.zeros(2, 70).int(), torch.zeros(2).int()
RULE = "q_idx - kv_idx < 8"


def posed(causal=False, layout="bshd", **given) -> Problem:
    """The problem of 2 sequences, 4 heads of 2 KV heads, 40 queries and 70 keys."""
    q, k, v = (torch.zeros(2, *shape, 32).half() for shape in ((40, 4), (70, 2), (70, 2)))
    if layout == "bhsd":
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return prefill_problem(q, k, v, causal, layout, Modifiers(**given))


def made(rule=None, heads=None, size: int | tuple[int, int] = 16, **options) -> BlockLists:
    """Of torch's own making."""
    rule = rule or (lambda b, h, i, j: i >= j)
    of_torch = create_block_mask(rule, None, heads, 40, 70, "cpu", BLOCK_SIZE=size, **options)
    return block_lists(of_torch)


LISTS = made()._replace(mask_mod=None)


def wrong(**changes) -> BlockLists:
    return LISTS._replace(**changes)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_what_is_given_is_a_mask_of_the_problem(layout):
    def masked(**given):
        p = posed(layout=layout, **given)
        return p.masked_by, p.mask, p.density

    assert masked() == ("none", "", 0)
    assert masked(mask=" q_idx-kv_idx<8") == ("none", RULE, 0)
    assert masked(document_ids=IDS) == ("documents", "", 10)
    assert masked(document_ids=IDS, mask=RULE, density=3) == ("documents", RULE, 3)
    assert masked(prefix_lens=PREFIX, causal=True)[0] == "prefix"
    assert masked(block_mask=LISTS, density=50) == ("blocks", "", 50)


@pytest.mark.parametrize(("heads", "apart"), [(None, True), (4, True), (4, False)])
def test_a_block_mask_of_torch_fits_and_gets_a_stride_for_every_head(heads, apart):
    lists = made(heads=heads, size=(16, 32), separate_full_blocks=apart)
    p = posed(causal=True, block_mask=lists)
    assert (p.mask_block_q, p.mask_block_k) == (16, 32)
    taken = modifiers_of(p, Modifiers(block_mask=lists)).block_mask
    assert taken is not None and taken.kv_num_blocks.shape == (2, 4, 3)
    assert taken.kv_indices.shape == (2, 4, 3, 3) and taken.kv_indices.stride(0) == 0
    assert (taken.full_kv_indices is None) == (not apart)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mask": "k > 1"}, "mask 'k > 1': k is none of b, h, q_idx, kv_idx"),
        ({"mask": torch.ones(3)}, "mask must be an expression, given Tensor"),
        ({"mask": RULE, "document_ids": IDS.long()}, "document_ids is torch.int64, expected"),
        ({"document_ids": IDS[:, :40]}, r"document_ids is \(2, 40\), expected \(2, 70\)"),
        ({"document_ids": IDS.T.contiguous().T}, "document_ids's last dimension must be"),
        ({"document_ids": IDS.to("meta")}, "document_ids is on meta, q is on cpu"),
        ({"document_ids": [0] * 70}, "document_ids is list, expected torch.int32"),
        ({"prefix_lens": PREFIX}, "prefix: what is beyond it is causal, so causal must be true"),
        ({"causal": True, "prefix_lens": PREFIX[:1]}, r"prefix_lens is \(1,\), expected \(2,\)"),
        ({"causal": True, "prefix_lens": PREFIX, "window": (4, 0)}, "prefix and a window exclude"),
        ({"prefix_lens": PREFIX, "document_ids": IDS}, "documents and prefix exclude each other"),
        ({"block_mask": LISTS, "document_ids": IDS}, "blocks and documents exclude each other"),
        ({"block_mask": LISTS, "window": (4, 0)}, "blocks and a window exclude each other"),
        ({"block_mask": LISTS, "density": 0}, "density 0 is not from 1 to 100 percent"),
        ({"density": 10}, "density 10 is of a mask, and none is given"),
        ({"block_mask": wrong(BLOCK_SIZE=(16, 24))}, "blocks of 16 by 24: sizes are multiples of"),
        ({"block_mask": wrong(BLOCK_SIZE=(32, 16))}, r"kv_num_blocks is \(1, 1, 3\), expected \(1"),
        ({"block_mask": wrong(BLOCK_SIZE=16)}, "has the BLOCK_SIZE 16"),
        ({"block_mask": wrong(kv_indices=LISTS.kv_indices.long())}, "kv_indices is torch.int64"),
        ({"block_mask": wrong(full_kv_indices=None)}, "only one of both lists of full blocks"),
        (
            {"block_mask": wrong(full_kv_num_blocks=LISTS.kv_num_blocks.expand(2, 4, 3))},
            "full_kv_num_blocks must be contiguous",
        ),
        (
            {"block_mask": wrong(kv_num_blocks=torch.zeros(2, 1, 3).int())},
            "block_mask's lists are of different shapes",
        ),
        ({"block_mask": made()}, "has the mask_mod <lambda>, which no kernel can call"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(given, message):
    with pytest.raises(ProblemError, match=message):
        posed(**given)


def test_what_is_no_block_mask_is_told():
    with pytest.raises(ProblemError, match=r"is no BlockMask: .*kv_num_blocks"):
        block_lists(torch.ones(3, 3))


def test_what_packed_sequences_pages_and_steps_take_of_masks():
    fields = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 64, "seqlen_q": 8, "seqlen_k": 8}
    documents = {"masked_by": "documents", "density": 5, "dtype": "bf16", "batch": 1, **fields}
    blocks = {**documents, "masked_by": "blocks", "mask_block_q": 16, "mask_block_k": 16}
    for where in ({"layout": "thd"}, {"page_size": 16}):
        assert Problem("prefill", **where, **documents).masks == ("documents",)
    assert Problem("prefill", page_size=16, **blocks).masks == ("blocks",)
    message = "blocks: packed sequences take documents, prefixes and rules of such masks"
    for where in ({"layout": "thd"}, {"layout": "thd", "page_size": 16}):
        with pytest.raises(ProblemError, match=message):
            Problem("prefill", **where, **blocks)
    assert Problem("backward", layout="thd", **documents).masks == ("documents",)
    step = Problem("decode", **blocks)
    # whatever is said of queries, which are of one block
    assert step == Problem("decode", **{**blocks, "mask_block_q": 0}) and step.masks == ("blocks",)
    with pytest.raises(ProblemError, match="blocks and chosen pages exclude each other"):
        Problem("decode", page_size=16, pages="chosen", **blocks)
    with pytest.raises(ProblemError, match="blocks and a window exclude each other"):
        Problem("decode", window_left=4, **blocks)
    with pytest.raises(ProblemError, match="density 5 is not from 1 to 100 percent, or 0 without"):
        Problem("prefill", **{**documents, "masked_by": ""})


def test_density_is_near_and_what_else_a_mask_is_must_be_the_same():
    """Calls need not tell it: no density is too far from another."""
    ids = posed(document_ids=IDS, density=4)
    for density, doublings in ((4, 0), (8, 1), (1, 2), (64, 4)):
        other = posed(document_ids=IDS, density=density)
        assert match_key(ids) == match_key(other)
        assert match_distance(match_sizes(ids), match_sizes(other)) == doublings
    keys = [posed(mask=RULE), posed(mask="q_idx > h"), posed(), ids, posed(block_mask=LISTS)]
    keys.append(posed(block_mask=made(size=(16, 32))._replace(mask_mod=None)))
    assert len({match_key(p) for p in keys}) == len(keys)


@pytest.mark.parametrize("sizes", [(16, 16), (32, 48), (64, 64), (128, 128), (192, 96)])
@pytest.mark.parametrize("gpu", gpus.KNOWN.values(), ids=lambda gpu: gpu.arch)
def test_tiles_divide_the_blocks_and_the_default_is_one_of_them(gpu, sizes):
    fields = {"head_dim": 128, "seqlen_q": 1024, "seqlen_k": 1024, "masked_by": "blocks"}
    fields |= {"num_heads": 8, "num_kv_heads": 2, "mask_block_q": sizes[0]}
    p = Problem("prefill", "bf16", 2, density=10, mask_block_k=sizes[1], **fields)
    assert FAMILY.refusal(p, FAMILY.default(p, gpu), gpu) is None
    if gpu is H200:
        tried = [config for config, reason in space(FAMILY, p, gpu) if reason is None]
        assert tried
        for config in tried:
            assert sizes[0] % int(config["BLOCK_M"]) == sizes[1] % int(config["BLOCK_N"]) == 0
