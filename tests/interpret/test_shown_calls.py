"""What the documents show of the exported module, and a Hugging Face model with it, interpreted."""

import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from autoflash.export import export
from autoflash.store import shipped_winners

ROOT = Path(__file__).parents[2]


def load(path: Path) -> ModuleType:
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = module
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def dispatch(tmp_path_factory) -> ModuleType:
    path = tmp_path_factory.mktemp("exported") / "attention_dispatch.py"
    path.write_text(export(shipped_winners()).text)
    return load(path)


DOCUMENTS = ("README.md", "docs/shipping.md")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_calls_that_the_documents_show_run(dispatch, name):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), flags=re.DOTALL)
    assert blocks
    bf16 = {"dtype": torch.bfloat16}
    tensors = {
        "longest": 20,
        "q": torch.randn(2, 8, 4, 64, **bf16),
        "k": torch.randn(2, 8, 2, 64, **bf16),
        "v": torch.randn(2, 8, 2, 64, **bf16),
        "new_k": torch.randn(3, 2, 64, **bf16),
        "new_v": torch.randn(3, 2, 64, **bf16),
        "k_cache": torch.randn(4, 16, 2, 64, **bf16),
        "v_cache": torch.randn(4, 16, 2, 64, **bf16),
        "slot_mapping": torch.tensor([0, 17, -1]),
        "packed_q": torch.randn(12, 4, 64, **bf16),
        "packed_k": torch.randn(12, 2, 64, **bf16),
        "packed_v": torch.randn(12, 2, 64, **bf16),
        "cu_seqlens": torch.tensor([0, 9, 12], dtype=torch.int32),
        **{f"out_{part}": torch.randn(2, 8, 4, 64, **bf16) for part in "ab"},
        **{f"lse_{part}": torch.randn(2, 4, 8) for part in "ab"},
        "cache_seqlens": torch.tensor([20, 9], dtype=torch.int32),
        "block_table": torch.tensor([[0, 1], [2, 3]], dtype=torch.int32),
    }
    for block in blocks:
        exec(compile(block, name, "exec"), tensors)
    assert torch.equal(tensors["k_cache"][1, 1], tensors["new_k"][1])
    assert tensors["out"].isfinite().all()


def test_a_hugging_face_model_computes_what_its_own_attention_does(dispatch):
    transformers = pytest.importorskip("transformers")
    dispatch.register_attention("shown")
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(50, (2, 21))
    arguments = inspect.signature(model.forward).parameters
    held = "cache" if "cache" in arguments else "past_key_values"  # by version

    def logits(attention, dtype):
        """Of a prompt of 20 tokens and a step."""
        model.to(dtype).set_attn_implementation(attention)
        cache = {held: transformers.DynamicCache(config=config)}
        with torch.no_grad():
            parts = [model(part, **cache).logits for part in tokens.split([20, 1], dim=1)]
        return torch.cat(parts, dim=1).double()

    ours, eager = (logits(name, torch.float32) for name in ("shown", "eager"))
    exact = logits("eager", torch.float64)
    unit = torch.finfo(torch.float32).eps * exact.abs().max()
    assert (ours - exact).abs().max() <= 2 * (eager - exact).abs().max() + unit
    assert dispatch.coverage()["default"] >= 4  # two layers, a prompt and a step
