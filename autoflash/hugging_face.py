"""Hugging Face: the workload of a model's config.json, and what of the model cannot be served."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from autoflash.errors import WorkloadError
from autoflash.problem import Problem, ProblemError

DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
# Types of models whose attention is known here; of others nothing is guessed.
PLAIN = ("llama", "qwen2_moe", "qwen3_moe", "gemma")  # causal, over all keys
ALL_SLIDING = ("mistral", "mixtral", "phi3")  # every layer, where `sliding_window` is a number
UPPER_SLIDING = ("qwen2", "qwen3")  # from `max_window_layers` on, where `use_sliding_window`
EVERY_OTHER_SLIDING = ("gemma2", "gpt_oss")  # beginning with the first
MOST_SLIDING = ("gemma3", "gemma3_text")  # all but every `sliding_window_pattern`-th, or sixth
WITH_SINKS = ("gpt_oss",)
LATENT = ("deepseek_v2", "deepseek_v3")
KNOWN = (*PLAIN, *ALL_SLIDING, *UPPER_SLIDING, *EVERY_OTHER_SLIDING, *MOST_SLIDING, *LATENT)
GEMMA3_PATTERN = 6


@dataclass(frozen=True)
class Shapes:
    """Which batches and lengths the workload holds. `page_sizes` 0 is a contiguous cache."""

    prefill_batches: Sequence[int] = (1, 4)
    prefill_lengths: Sequence[int] = (512, 2048, 8192)
    decode_batches: Sequence[int] = (1, 8, 64)
    decode_lengths: Sequence[int] = (1024, 8192, 32768)
    page_sizes: Sequence[int] = (16,)


@dataclass(frozen=True)
class Attention:
    """The attention of some of a model's layers. `window` counts the query's own key; 0: all."""

    layers: int
    window: int = 0
    softcap: bool = False
    sinks: bool = False


@dataclass(frozen=True)
class Imported:
    """A workload file's text, and a line for each thing it leaves out or takes for granted."""

    text: str
    notices: tuple[str, ...]


def import_config(path: Path, shapes: Shapes, tensor_parallel: int = 1) -> Imported:
    """The workload of the model whose config.json is at `path`, on one of `tensor_parallel` GPUs.

    An entry's weight is the number of layers that make such calls. Raises WorkloadError, with file
    and key, for a file that is no config, for a model whose attention is not known, and for one of
    which nothing can be served.
    """
    config = _Config(path)
    model_type = config.text("model_type")
    if model_type not in KNOWN:
        raise config.mistake(
            "model_type", f"{model_type} is not known; known are {', '.join(sorted(KNOWN))}"
        )
    notices = []
    dtype = DTYPES.get(str(config.get("torch_dtype") or config.get("dtype")))
    if dtype is None:
        dtype = "bf16"
        notices.append("it does not say its dtype: bf16 is taken")
    told_by = _latent if model_type in LATENT else _plain
    entries = told_by(config, dtype, shapes, tensor_parallel)
    name = path.parent.name if path.name == "config.json" else path.stem
    return Imported(_written({"name": name or model_type, **entries}), tuple(notices))


class _Config:
    """A config.json: values by key, from `text_config` where the model reads pictures too."""

    def __init__(self, path: Path) -> None:
        self._file = path.name
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise WorkloadError(f"{path}: {error.strerror}") from None
        except ValueError as error:
            raise WorkloadError(f"{path.name}: not JSON: {error}") from None
        if not isinstance(config, dict):
            raise WorkloadError(f"{path.name}: is no object of a model's config")
        inner = config.get("text_config")
        self._values: Mapping[str, Any] = config | inner if isinstance(inner, dict) else config

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            raise self.mistake(key, "is missing" if value is None else f"{value!r} is no text")
        return value

    def number(self, key: str) -> int:
        value = self.get(key)
        if value is None:
            raise self.mistake(key, "is missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.mistake(key, f"{value!r} is not a positive integer")
        return value

    def mistake(self, key: str, reason: str) -> WorkloadError:
        return WorkloadError(f"{self._file}: {key}: {reason}")


def _plain(config: _Config, dtype: str, shapes: Shapes, tensor_parallel: int) -> dict[str, Any]:
    """What a workload says of a model whose keys and values are of one width."""
    longest = config.number("max_position_embeddings")
    heads: dict[str, Any] = _heads(config, tensor_parallel)
    try:
        Problem(op="prefill", dtype=dtype, batch=1, seqlen_q=1, seqlen_k=1, **heads)
    except ProblemError as error:
        raise config.mistake("num_attention_heads, head_dim", str(error)) from None
    attentions = _attentions(config, config.text("model_type"))
    return {
        "model": {**heads, "dtype": dtype},
        "prefill": [_prefill(each, shapes, longest) for each in attentions],
        "decode": [_decode(each, shapes, longest) for each in attentions],
    }


def _heads(config: _Config, tensor_parallel: int) -> dict[str, int]:
    """Heads of one GPU and their width; KV heads fewer than GPUs are copied, as engines do."""
    heads = config.number("num_attention_heads")
    given = config.get("num_key_value_heads")
    kv_heads = heads if given is None else config.number("num_key_value_heads")
    if config.get("head_dim") is None:
        head_dim = config.number("hidden_size") // heads
    else:
        head_dim = config.number("head_dim")
    for name, count in (("num_attention_heads", heads), ("num_key_value_heads", kv_heads)):
        copied = name == "num_key_value_heads" and tensor_parallel % count == 0
        if count % tensor_parallel and not copied:
            raise config.mistake(name, f"{count} heads cannot be dealt to {tensor_parallel} GPUs")
    return {
        "num_heads": heads // tensor_parallel,
        "num_kv_heads": max(1, kv_heads // tensor_parallel),
        "head_dim": head_dim,
    }


def _attentions(config: _Config, model_type: str) -> list[Attention]:
    """The kinds of attention of the model's layers, those over all keys first."""
    softcap = bool(config.get("attn_logit_softcapping"))
    sinks = model_type in WITH_SINKS
    layers = Counter(_sliding(config, model_type))
    window = config.number("sliding_window") if layers[True] else 0
    kinds = ((layers[False], 0), (layers[True], window))
    return [Attention(count, width, softcap, sinks) for count, width in kinds if count]


def _sliding(config: _Config, model_type: str) -> list[bool]:
    """Whether each layer's window slides."""
    layers = range(config.number("num_hidden_layers"))
    told = config.get("layer_types")
    if not config.get("sliding_window"):
        return [False for _ in layers]
    if isinstance(told, list):
        unknown = sorted({str(each) for each in told} - {"sliding_attention", "full_attention"})
        if unknown:
            raise config.mistake("layer_types", f"{unknown[0]} is an attention that is not known")
        return [each == "sliding_attention" for each in told]
    if model_type in ALL_SLIDING:
        return [True for _ in layers]
    if model_type in UPPER_SLIDING and config.get("use_sliding_window"):
        first = config.number("max_window_layers")
        return [layer >= first for layer in layers]
    if model_type in EVERY_OTHER_SLIDING:
        return [layer % 2 == 0 for layer in layers]
    if model_type in MOST_SLIDING:
        pattern = config.get("sliding_window_pattern") or GEMMA3_PATTERN
        return [(layer + 1) % pattern != 0 for layer in layers]
    return [False for _ in layers]


def _prefill(attention: Attention, shapes: Shapes, longest: int) -> dict[str, Any]:
    return {
        "batch": list(shapes.prefill_batches),
        "seqlen_q": _reached(shapes.prefill_lengths, longest),
        **_modifiers(attention),
        "weight": attention.layers,
    }


def _decode(attention: Attention, shapes: Shapes, longest: int) -> dict[str, Any]:
    return {
        "batch": list(shapes.decode_batches),
        "seqlen_k": _reached(shapes.decode_lengths, longest),
        "page_size": list(shapes.page_sizes),
        **_modifiers(attention),
        "weight": attention.layers,
    }


def _modifiers(attention: Attention) -> dict[str, Any]:
    """What the layers have beside the plain attention, of those that are on."""
    window = {"window_left": attention.window - 1} if attention.window else {}
    return window | {name: True for name in ("softcap", "sinks") if getattr(attention, name)}


def _reached(lengths: Sequence[int], longest: int) -> list[int]:
    """The lengths that the model's positions reach, in order; its longest where none is."""
    return sorted({length for length in lengths if length <= longest} or {longest})


def _latent(config: _Config, dtype: str, shapes: Shapes, tensor_parallel: int) -> dict[str, Any]:
    """What a workload says of latent attention.

    Decode reads one KV head that all GPUs have, keys and values; prefill has keys and values of
    each head, of different widths.
    """
    rope, rank = config.number("qk_rope_head_dim"), config.number("kv_lora_rank")
    width, wide = config.number("qk_nope_head_dim") + rope, config.number("v_head_dim")
    heads, layers = config.number("num_attention_heads"), config.number("num_hidden_layers")
    if heads % tensor_parallel:
        reason = f"{heads} heads cannot be dealt to {tensor_parallel} GPUs"
        raise config.mistake("num_attention_heads", reason)
    own = heads // tensor_parallel
    latent: dict[str, Any] = {"num_kv_heads": 1, "head_dim": rank + rope, "head_dim_v": rank}
    each: dict[str, Any] = {"num_kv_heads": own, "head_dim": width, "head_dim_v": wide}
    for op, widths, keys in (
        ("decode", latent, "kv_lora_rank, qk_rope_head_dim"),
        ("prefill", each, "qk_nope_head_dim, qk_rope_head_dim, v_head_dim"),
    ):
        try:
            Problem(op, dtype, 1, num_heads=own, **widths, seqlen_q=1, seqlen_k=1)
        except ProblemError as error:
            raise config.mistake(keys, str(error)) from None
    longest = config.number("max_position_embeddings")
    return {
        "model": {"num_heads": own, "dtype": dtype},
        "prefill": [{**each, **_prefill(Attention(layers), shapes, longest)}],
        "decode": [{**latent, **_decode(Attention(layers), shapes, longest)}],
    }


def _written(told: Mapping[str, Any]) -> str:
    given = {key: value for key, value in told.items() if value}
    return yaml.safe_dump(given, sort_keys=False, default_flow_style=None)
