"""Bits that do not depend on the batch, and caches that are not what they are said to be."""

import importlib.util
import sys

import pytest
import torch

from autoflash.export import export
from autoflash.store import shipped_winners

BATCH, KEYS, HEADS, KV_HEADS, HEAD_DIM = 3, 400, 4, 2, 32


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "attention_dispatch.py"
    path.write_text(export(shipped_winners()).text)
    spec = importlib.util.spec_from_file_location("invariant_dispatch", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


@pytest.fixture(scope="module")
def step():
    """Queries, pages of 8 tokens, lengths and a table."""
    pages = BATCH * KEYS // 8
    caches = [normal(pages, 8, KV_HEADS, HEAD_DIM), normal(pages, 8, KV_HEADS, HEAD_DIM)]
    lengths = torch.tensor([KEYS, 130, 7], dtype=torch.int32)
    return normal(BATCH, HEADS, HEAD_DIM), *caches, lengths, torch.arange(pages).view(BATCH, -1)


@pytest.fixture
def small(module, monkeypatch):
    """A GPU with so few programs at once that a batch gets fewer splits than a sequence alone."""
    first = module.installed().tables.gpus[0].device
    monkeypatch.setattr(module, "device_of", lambda *_: first._replace(num_sms=1))
    module.configure(strict=False)  # what was served on another is forgotten
    yield
    module.configure(strict=False)


@pytest.mark.filterwarnings("ignore:autoflash. no measurements")
def test_a_step_gives_a_sequence_the_bits_that_it_has_alone(module, step, small):
    q, k, v, lengths, table = step
    call = {"batch_invariant": True, "return_lse": True}
    out, lse = module.decode(q, k, v, lengths, block_table=table, **call)
    for b in range(BATCH):
        own = table[b : b + 1, : -(-int(lengths[b]) // 8)]  # of no more pages than it needs
        alone = module.decode(
            q[b : b + 1], k, v, lengths[b : b + 1], block_table=own, lengths="equal", **call
        )
        assert torch.equal(alone[0][0], out[b]) and torch.equal(alone[1][0], lse[b]), b


def test_a_config_is_chosen_for_one_sequence_of_prompts_or_of_any_packed_ones(module, monkeypatch):
    asked = []
    selector = module.installed()
    monkeypatch.setattr(selector, "choose", lambda problem, device: asked.append(problem))
    plain = module.Problem("prefill", "bf16", 7, 8, 2, 64, 300, 500)
    packed = module.replace(plain, layout="thd", lengths="ragged")
    for problem in (plain, packed, module.replace(packed, seqlen_q=9, seqlen_k=11, batch=2)):
        selector.choose_invariant(problem, selector.tables.gpus[0].device)
    assert asked[0] == module.replace(plain, batch=1)
    assert asked[1] == asked[2] and asked[1].varlen and asked[1].batch == 1


def test_one_config_serves_an_invariant_call_whatever_the_batch(module, step):
    q, k, v, lengths, table = step
    chosen = []
    for batch in (1, BATCH):
        call = (q[:batch], k, v, lengths[:batch])
        more = {"block_table": table[:batch], "batch_invariant": True}
        chosen.append(module.explain(module.decode, *call, **more)["knobs"])
    assert chosen[0] == chosen[1]
    assert (chosen[0]["SCHEDULE"], chosen[0]["PROGRAMS_PER_SM"]) == ("split", 1)


def test_a_cache_that_is_not_what_its_identity_says_is_refused(module, step):
    q, k, v, lengths, table = step
    named = module.kv_identity("nhd", 8)
    expected = module.decode(q, k, v, lengths, block_table=table)
    for _ in range(2):
        ours = module.decode(q, k, v, lengths, block_table=table, kv_layout=named)
        assert torch.equal(ours, expected)
    new = normal(2, KV_HEADS, HEAD_DIM)
    module.append_kv(new, new, k.clone(), v.clone(), torch.arange(2), kv_layout=named)
    for wrong in (module.kv_identity("nhd", 16), module.kv_identity("nhd"), "nhd:8:2"):
        told = f"kv_layout is {wrong}, this cache is {named}"
        with pytest.raises(module.ProblemError, match=f"decode: {told}"):
            module.decode(q, k, v, lengths, block_table=table, kv_layout=wrong)
    with pytest.raises(
        module.ProblemError, match=r"append_kv: kv_layout is hnd:8:1, this cache is"
    ):
        module.append_kv(new, new, k, v, torch.arange(2), kv_layout="hnd:8:1")
    with pytest.raises(module.ProblemError, match="is none of nhd, hnd"):
        module.decode(q, k, v, lengths, block_table=table, kv_layout="other:8:1")
    with pytest.raises(module.ProblemError, match="no caches are 'other'"):
        module.kv_identity("other")
