"""A bundle on a GPU: the first calls of a process compile nothing and give the same bits."""

import os
import subprocess
import sys

import pytest
import torch
import triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not triton.__version__.startswith("3.6."), reason="tables and launchers of triton 3.6"
    ),
]

SCRIPT = """
import importlib.util, sys, time
import torch, triton
from triton.runtime import build
path, bundle, way, result = sys.argv[1:]
spec = importlib.util.spec_from_file_location("cold_dispatch", path)
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)

def compiles(*given, **more):
    raise SystemExit("something is compiled")

if way != "compiled":
    triton.compile = build._build = compiles
    assert module.use_bundle(bundle)
if way == "warm":
    assert module.warmup() > 3
torch.manual_seed(0)
torch.cuda.synchronize()
device = module.device_at(0)
results = []
for table in module.installed().tables.gpus:
    for row in table.rows:
        if table.device.identity != device.identity:
            continue
        p = module.tuned_problem(row)
        dtype = module.WARM_DTYPES[p.dtype]

        def normal(*shape):
            return torch.randn(shape, device="cuda").to(dtype)

        if p.op == "prefill":
            q = normal(p.batch, p.seqlen_q, p.num_heads, p.head_dim)
            k, v = (normal(p.batch, p.seqlen_k, p.num_kv_heads, p.head_dim) for _ in "kv")
            call = lambda: module.prefill(q, k, v, causal=p.causal)
        else:
            pages = p.batch * -(-p.seqlen_k // p.page_size)
            q = normal(p.batch, p.num_heads, p.head_dim)
            k, v = (normal(pages, p.page_size, p.num_kv_heads, p.head_dim) for _ in "kv")
            lengths = torch.full((p.batch,), p.seqlen_k, device="cuda", dtype=torch.int32)
            rows = torch.arange(pages, device="cuda", dtype=torch.int32).view(p.batch, -1)
            call = lambda: module.decode(q, k, v, lengths, block_table=rows, lengths=p.lengths)
        torch.cuda.synchronize()
        start = time.perf_counter()
        results.append(call().cpu())
        print(way, p.op, f"first call {1e3 * (time.perf_counter() - start):.0f} ms")
torch.save(results, result)
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A module of two problems, of this GPU, and its bundle; the module of the shipped winners."""
    from autoflash.bundle import write_bundle
    from autoflash.export import export
    from autoflash.gpu import detect
    from autoflash.store import shipped_winners

    here = [each for each in shipped_winners() if each.gpu.identity == detect().identity]
    wanted = []
    for op in ("prefill", "decode"):
        wanted += [
            each
            for each in here
            if each.decision.problem.op == op
            and each.decision.problem.dtype == each.decision.problem.kv_dtype == "bf16"
            and each.decision.problem.layout == "bshd"
            and each.decision.problem.kv_layout == "nhd"
            and each.decision.problem.seqlen_k <= 4096
            and each.decision.problem.paged == (op == "decode")
            and not each.decision.problem.modifiers
            and not each.decision.problem.windowed
            and (op == "prefill" or each.decision.problem.seqlen_q == 1)
        ][:1]
    if len(wanted) < 2:
        pytest.skip("nothing that was tuned for this GPU is shipped")
    folder = tmp_path_factory.mktemp("bundled")
    (folder / "dispatch.py").write_text(export(wanted).text)
    write_bundle(folder / "dispatch.py", folder / "bundle")
    return folder


def run(made, way):
    """The results of the first calls of a process of its own, whose triton has no cache."""
    cache = {"TRITON_CACHE_DIR": str(made / f"cache_{way}")}
    paths = [str(made / name) for name in ("dispatch.py", "bundle")]
    command = [sys.executable, "-c", SCRIPT, *paths, way, str(made / f"{way}.pt")]
    done = subprocess.run(command, env={**os.environ, **cache}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stdout)
    return torch.load(made / f"{way}.pt")


@pytest.mark.parametrize("way", ["bundle", "warm"])
def test_first_calls_with_a_bundle_compile_nothing_and_give_the_same_bits(made, way):
    expected = run(made, "compiled")
    for ours, theirs in zip(run(made, way), expected, strict=True):
        assert torch.equal(ours, theirs)
