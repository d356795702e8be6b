"""Run a model of transformers on an exported module: `attn_implementation="attention_dispatch"`.

    python examples/transformers_attention.py out/attention_dispatch.py

`register(module)` is what an application needs: every model then takes that name, with
caches that grow and static ones, sliding windows and softcaps. Batches of several lengths that are
padded are refused; a server keeps them in pages, as in paged_serving.py. Run as a script this
generates with a small Llama of random weights in fp32, eagerly and by the module, and compares the
tokens. Without a GPU the kernels run in triton's interpreter. Exits with 1 if they differ.
"""

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

NAME = "attention_dispatch"  # one with "flash" in it is taken for a package of transformers' own
DECODE_TOKENS = 16  # queries of a sequence that decode() takes at most


def register(module: ModuleType) -> None:
    """Make `attn_implementation="attention_dispatch"` call this exported module."""
    from transformers import AttentionInterface, AttentionMaskInterface

    def attention(
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        s_aux: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """query is (batch, heads, tokens, head_dim); gives (batch, tokens, heads, head_dim)."""
        if is_causal is None:
            is_causal = getattr(layer, "is_causal", True)
        modified = {
            "window": (sliding_window - 1, -1) if sliding_window else (-1, -1),
            "softmax_scale": scaling,
            "softcap": softcap or 0.0,
            "sinks": s_aux,
        }
        lengths = None if attention_mask is None else attention_mask.flatten()
        if query.shape[2] <= DECODE_TOKENS and is_causal and not dropout:
            if lengths is None:
                lengths = key.new_full(key.shape[:1], key.shape[2], dtype=torch.int32)
            q = query.transpose(1, 2)
            return module.decode(q, key, value, lengths, kv_layout="hnd", **modified), None
        if lengths is not None:  # what a static cache holds so far
            keys = int(lengths[0])
            key, value = key[:, :, :keys], value[:, :, :keys]
        out = module.prefill(
            query,
            key,
            value,
            causal=is_causal,
            layout="bhsd",
            dropout_p=dropout,
            **modified,
        )
        return out.transpose(1, 2), None

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, lengths_for_mask)


def lengths_for_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int | torch.Tensor = 0,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str | None = None,
    **_: Any,
) -> torch.Tensor | None:
    """In place of a mask: how many keys there are up to the last query, int32 (batch, 1, 1, 1).

    None where that is all of them, as in caches that grow. Raises ValueError for padded batches.
    """
    if attention_mask is not None and not attention_mask.all():
        raise ValueError("padded batches are not supported")
    keys = q_offset + q_length - kv_offset
    if isinstance(keys, int) and keys == kv_length:
        return None
    return (torch.zeros(batch_size, 1, 1, 1, dtype=torch.int32, device=device) + keys).int()


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate with transformers on a module.")
    parser.add_argument("module", type=Path, help="the exported attention_dispatch.py")
    parser.add_argument("--tokens", type=int, default=8, help="generated after a prompt of 20")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    register(import_by_path(arguments.module))
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config).to(device).eval()
    prompt = torch.randint(1, 97, (2, 20), device=device)
    wanted = {"max_new_tokens": arguments.tokens, "do_sample": False, "pad_token_id": 0}
    tokens = {}
    for name in ("eager", NAME):
        model.set_attn_implementation(name)
        for cache in ("dynamic", "static"):
            generated = model.generate(prompt, cache_implementation=cache, **wanted)
            tokens[name, cache] = generated[:, prompt.shape[1] :].tolist()
            print(f"{name}, {cache} cache: {tokens[name, cache]}")
    same = all(each == tokens["eager", "dynamic"] for each in tokens.values())
    print("the same tokens" if same else "DIFFERENT tokens")
    return 0 if same else 1


def import_by_path(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"error: {path} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
