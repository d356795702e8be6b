"""The exported module at home in torch on a GPU: compiled graphs, forked children, its own test."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "attention_dispatch.py"
    command = [sys.executable, "-m", "autoflash", "export", "-o", str(path)]
    subprocess.run(command, check=True, env={**os.environ, "AUTOFLASH_DB": f"{path}.db"})
    return path


@pytest.fixture(scope="module")
def module(path):
    spec = importlib.util.spec_from_file_location("dispatch_in_torch", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def normal(*shape):
    return torch.randn(shape, device="cuda").bfloat16()


def decode_call(batch=4, keys=512):
    pages = batch * keys // 16
    table = torch.randperm(pages, device="cuda", dtype=torch.int32).view(batch, -1)
    lengths = torch.randint(1, keys, (batch,), device="cuda", dtype=torch.int32)
    caches = [normal(pages, 16, 8, 128) for _ in "kv"]
    return [normal(batch, 32, 128), *caches, lengths, table]


def test_a_module_that_was_exported_passes_its_own_test(module):
    assert all(case.passed for case in module.self_test())


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor_compiles_a_layer_to_one_graph_with_the_same_bits(module, mode):
    def layer(q, k, v):
        out = module.prefill(q * 2, k, v, causal=True)
        return out + 1

    def step(q, k_cache, v_cache, lengths, table, new_k, new_v, slots):
        module.append_kv(new_k, new_v, k_cache, v_cache, slots)
        return module.decode(q, k_cache, v_cache, lengths, block_table=table) + 1

    with torch.no_grad():
        compiled_layer = torch.compile(layer, fullgraph=True, mode=mode)
        compiled_step = torch.compile(step, fullgraph=True, mode=mode)
        for _ in range(4):
            call = (normal(2, 512, 8, 128), normal(2, 512, 2, 128), normal(2, 512, 2, 128))
            assert torch.equal(compiled_layer(*call).clone(), layer(*call))
            call = [*decode_call(), normal(4, 8, 128), normal(4, 8, 128)]
            slots = call[4][:, 0].long() * 16
            copies = [tensor.clone() for tensor in call]
            assert torch.equal(compiled_step(*call, slots).clone(), step(*copies, slots))
            assert torch.equal(call[1], copies[1]) and torch.equal(call[2], copies[2])


def test_checking_names_a_bad_page_inside_the_used_range(module):  # case B13
    call = decode_call()
    q, k, v, lengths, table = call
    lengths.fill_(33)
    for _ in range(3):
        module.decode(q, k, v, lengths, block_table=table, check=True)
    table[:, 3:] = 2**30
    module.decode(q, k, v, lengths, block_table=table, check=True)
    table[1, 2] = -1
    with pytest.raises(ValueError, match=r"block_table\[1, 2\] is -1, the cache has pages 0\.\."):
        module.decode(q, k, v, lengths, block_table=table, check=True)


def test_autocast_changes_nothing(module):
    q, k, v = normal(1, 128, 4, 64), normal(1, 128, 2, 64), normal(1, 128, 2, 64)
    expected = module.prefill(q, k, v)
    with torch.autocast("cuda", dtype=torch.float16):
        assert torch.equal(module.prefill(q, k, v), expected)


def test_a_forked_child_may_call_what_its_parent_imported(path):  # case B30
    script = (
        "import importlib.util, multiprocessing, sys, torch\n"
        f"spec = importlib.util.spec_from_file_location('forked_dispatch', {str(path)!r})\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['forked_dispatch'] = module\n"
        "spec.loader.exec_module(module)\n"
        "assert not torch.cuda.is_initialized()\n"
        "def child():\n"
        "    q = torch.ones(1, 64, 2, 64, device='cuda', dtype=torch.bfloat16)\n"
        "    assert (module.prefill(q, q, q, causal=True) == 1).all()\n"
        "process = multiprocessing.get_context('fork').Process(target=child)\n"
        "process.start()\n"
        "process.join()\n"
        "sys.exit(process.exitcode)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
