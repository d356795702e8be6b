"""Run a model of transformers on an exported module: `attn_implementation="attention_dispatch"`.

    python examples/transformers_attention.py out/attention_dispatch.py

`register_attention()` of the module is what an application needs: every model then takes that name,
with caches that grow and static ones, sliding windows, softcaps and sinks. Batches of several
lengths that are padded are refused; a server keeps them in pages, as in paged_serving.py. This
script generates with a small Llama of random weights in fp32, eagerly and by the module, and
compares the tokens. Without a GPU the kernels run in triton's interpreter. Exits with 1 if they
differ.
"""

import argparse
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import torch

NAME = "attention_dispatch"


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate with transformers on a module.")
    parser.add_argument("module", type=Path, help="the exported attention_dispatch.py")
    parser.add_argument("--tokens", type=int, default=8, help="generated after a prompt of 20")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    import_by_path(arguments.module).register_attention(NAME)
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
