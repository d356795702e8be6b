"""A bundle: what it holds is not compiled again, and what is not for here is not taken."""

import importlib.util
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
import triton
from fake_calls import normal
from fake_launches import FakeLaunches
from triton import knobs
from triton.backends.nvidia import driver as nvidia

from autoflash.bundle import write_bundle
from autoflash.config import Config
from autoflash.errors import ExportError
from autoflash.export import export
from autoflash.gpu import known
from autoflash.records import Winner
from autoflash.store import shipped_winners

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not triton.__version__.startswith("3.6."), reason="tables and launchers of triton 3.6"
    ),
]

H200 = known("NVIDIA_H200")
NUMBERS = count()


def tuned() -> Winner:
    """A decode that was tuned, without the launches that CPU tensors never have."""
    winner = next(
        each
        for each in shipped_winners()
        if each.decision.winner.family == "decode"
        and each.decision.problem.paged
        and each.decision.problem.kv_dtype == "bf16"
        and each.decision.problem.seqlen_q == 1
    )
    knobs_of = {**winner.decision.winner.as_dict(), "DEPENDENT_LAUNCH": 0}
    config = Config.of("decode", knobs_of)
    return replace(winner, decision=replace(winner.decision, winner=config, times=()))


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """An exported module and its bundle."""
    folder = tmp_path_factory.mktemp("bundled")
    (folder / "attention_dispatch.py").write_text(export([tuned()]).text)
    assert write_bundle(folder / "attention_dispatch.py", folder / "bundle", jobs=1) == 5
    return folder


@pytest.fixture
def module(made, monkeypatch, tmp_path):
    """The module on an H200 whose triton has compiled nothing yet and must not."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    monkeypatch.setattr(triton.runtime.driver, "_active", FakeLaunches(H200))
    monkeypatch.setattr("torch.cuda.current_device", lambda: None)
    return imported(made, monkeypatch)


def imported(made, monkeypatch):
    name = f"bundled_{next(NUMBERS)}"
    spec = importlib.util.spec_from_file_location(name, made / "attention_dispatch.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    h200 = module.Device(**{field: getattr(H200, field) for field in module.Device._fields})
    monkeypatch.setattr(module, "device_of", lambda tensor, interpreted_as: h200)
    monkeypatch.setattr(module, "bind_recipe", lambda *_: None)
    monkeypatch.setattr(module, "recall_module", lambda: None)

    def compiles(src, **_):
        raise RuntimeError(f"{src.name} is compiled")

    monkeypatch.setattr(triton, "compile", compiles)
    return module


def decode(module, lse=False, tokens=16):
    p = tuned().decision.problem
    pages = p.batch * -(-p.seqlen_k // tokens)
    caches = [normal(pages, tokens, p.num_kv_heads, p.head_dim) for _ in "kv"]
    table = torch.arange(pages, dtype=torch.int32).view(p.batch, -1)
    lengths = torch.full((p.batch,), p.seqlen_k, dtype=torch.int32)
    new = [normal(p.batch, p.num_kv_heads, p.head_dim) for _ in "kv"]
    module.append_kv(*new, *caches, torch.arange(p.batch))
    q = normal(p.batch, p.num_heads, p.head_dim)
    more = {"block_table": table, "lengths": p.lengths, "return_lse": lse}
    module.decode(q, *caches, lengths, **more)


@pytest.mark.parametrize("lse", [False, True])
def test_calls_like_the_tuned_ones_compile_nothing(made, module, lse):
    assert module.use_bundle(made / "bundle")
    decode(module, lse, tuned().decision.problem.page_size)


def test_no_source_is_hashed_for_a_kernel_of_a_bundle(made, module, monkeypatch):
    """It takes long, and triton's hash depends on which kernels it was asked of before."""
    module.use_bundle(made / "bundle")
    monkeypatch.setattr("triton.runtime.jit.DependenciesFinder", None)
    decode(module, tokens=tuned().decision.problem.page_size)


def test_what_kernels_are_written_in_is_imported_with_their_bundle(
    made, module, monkeypatch, tmp_path
):
    told = json.loads((made / "bundle/manifest.json").read_text())
    assert told["gluon"] is False  # decode is written in triton
    other = shutil.copytree(made / "bundle", tmp_path / "other")
    (other / "manifest.json").write_text(json.dumps({**told, "gluon": True}))
    imported = []
    monkeypatch.setattr(module, "import_module", imported.append)
    module.use_bundle(made / "bundle")
    assert imported == []
    module.use_bundle(other)
    assert imported == ["triton.experimental.gluon"]


def test_what_a_c_compiler_made_finds_the_driver_by_itself(made):
    """Nobody else in a process need have loaded it where its functions are found."""
    built = {each.name.split(".")[0]: each for each in (made / "bundle/built").rglob("*.so")}
    for name in ("__triton_launcher", "cuda_utils"):
        command = ["readelf", "-d", str(built[name])]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        assert "[libcuda.so.1]" in told, name


def test_a_process_is_told_of_a_bundle_by_its_environment(made, module, monkeypatch):
    monkeypatch.setenv("AUTOFLASH_BUNDLE", str(made / "bundle"))
    decode(imported(made, monkeypatch), tokens=tuned().decision.problem.page_size)


def test_without_its_bundle_and_where_it_has_no_such_kernel_triton_compiles(made, module):
    with pytest.raises(RuntimeError, match="append_kv is compiled"):
        decode(module)
    module.use_bundle(made / "bundle")
    other = 2 * tuned().decision.problem.page_size
    with pytest.raises(RuntimeError, match="decode is compiled"):
        decode(module, tokens=other)


def test_a_bundle_of_another_triton_is_not_used_and_it_says_so(made, module, tmp_path):
    other = shutil.copytree(made / "bundle", tmp_path / "other")
    told = json.loads((other / "manifest.json").read_text())
    (other / "manifest.json").write_text(json.dumps({**told, "triton": "3.5.1"}))
    with pytest.warns(UserWarning, match=r"other is not used: made with triton 3\.5\.1, this is"):
        assert not module.use_bundle(other)
    with pytest.raises(RuntimeError, match="is compiled"):
        decode(module)


def test_a_bundle_for_another_gpu_is_not_used_and_it_says_so(made, module, monkeypatch):
    module.use_bundle(made / "bundle")
    monkeypatch.setattr(
        triton.runtime.driver, "_active", FakeLaunches(known("NVIDIA_A100_SXM4_80GB"))
    )
    with (
        pytest.warns(UserWarning, match="is not used: it is for cuda:90, this is cuda:80"),
        pytest.raises(RuntimeError, match="is compiled"),
    ):
        decode(module)


def test_what_a_c_compiler_would_make_lies_in_tritons_cache(made, module, monkeypatch):
    module.use_bundle(made / "bundle")
    monkeypatch.setattr("triton.runtime.build._build", None)
    monkeypatch.setattr("triton.runtime.build._load_module_from_path", lambda name, path: path)
    assert triton.runtime.build.compile_module_from_src(*module.RECALL_SOURCE)
    utils = Path(nvidia.__file__).with_name("driver.c").read_text()
    assert triton.runtime.build.compile_module_from_src(utils, "cuda_utils")
    launchers = {each.parent.name for each in (made / "bundle/built").rglob("*launcher*.so")}
    assert launchers <= {path.name for path in Path(knobs.cache.dir).iterdir()}
    assert len(launchers) == len(set((made / "bundle/kernels").iterdir()))


def test_a_folder_that_is_no_bundle_is_refused(made, module, tmp_path):
    with pytest.raises(ValueError, match="is no bundle of kernels"):
        module.use_bundle(tmp_path)
    (tmp_path / "mine").mkdir()
    with pytest.raises(ExportError, match="exists and is no bundle"):
        write_bundle(made / "attention_dispatch.py", tmp_path / "mine")
