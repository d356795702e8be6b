"""Small calls of an exported module, and what their launches were told, by names."""

import torch
from fake_launches import TensorMap

LENGTHS = torch.tensor([900, 70], dtype=torch.int32)


def normal(*shape):
    return torch.randn(shape).bfloat16()


def prefill(module, **more):
    q, k, v = normal(1, 64, 2, 64), normal(1, 64, 1, 64), normal(1, 64, 1, 64)
    tensors = {"q": q, "k": k, "v": v, "out": torch.empty_like(q), **more}
    module.prefill(**tensors, causal=True)
    return tensors


def prefill_with_sinks(module):
    return prefill(module, sinks=normal(2))


def prefill_with_dropout(module):
    """Of an rng that is given, and of one drawn for the call."""
    q, k, v = normal(1, 64, 2, 64), normal(1, 64, 1, 64), normal(1, 64, 1, 64)
    tensors = {"q": q, "k": k, "v": v, "out": torch.empty_like(q)}
    module.prefill(**tensors, causal=True, dropout_p=0.25)
    tensors["rng"] = torch.tensor([3, 5])
    module.prefill(**tensors, causal=True, dropout_p=0.25)
    return tensors


def packed(module, **more):
    q, k, v = normal(70, 2, 64), normal(70, 1, 64), normal(70, 1, 64)
    starts = torch.tensor([0, 30, 70], dtype=torch.int32)
    tensors = {"q": q, "k": k, "v": v, "out": torch.empty_like(q), "cu_seqlens_q": starts}
    tensors |= {"cu_seqlens_k": starts, **more}
    sizes = {"max_seqlen_q": 40, "max_seqlen_k": 40, "layout": "thd"}
    module.prefill(**tensors, **sizes, causal=True)
    return tensors


def packed_with_prefixes(module):
    return packed(module, prefix_lens=torch.tensor([3, 9], dtype=torch.int32))


def packed_with_documents(module):
    return packed(module, document_ids=torch.zeros(2, 40, dtype=torch.int32))


def chunks(module, **more):
    q, k, v = normal(2, 40, 2, 64), normal(9, 128, 1, 64), normal(9, 128, 1, 64)
    tensors = {"q": q, "k": k, "v": v, "out": torch.empty_like(q), "sinks": normal(2)}
    table = torch.arange(16, dtype=torch.int32).view(2, 8)
    tensors |= {"cache_seqlens": LENGTHS.clone(), "block_table": table, **more}
    tensors = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    module.prefill(**tensors, causal=True)
    return tensors


def chunks_with_prefixes(module):
    return chunks(module, sinks=None, prefix_lens=torch.tensor([3, 99], dtype=torch.int32))


def chunks_with_documents(module):
    return chunks(module, sinks=None, document_ids=torch.zeros(2, 1024, dtype=torch.int32))


def decode(module, tokens=1, **more):
    q = normal(2, tokens, 4, 64)
    caches = {"k_cache": normal(2, 4096, 2, 64), "v_cache": normal(2, 4096, 2, 64)}
    tensors = {"q": q, **caches, "cache_seqlens": LENGTHS.clone(), "out": torch.empty_like(q)}
    module.decode(**{**tensors, **more})
    return {**tensors, **more}


def decode_with_modifiers(module):
    return decode(module, alibi_slopes=torch.rand(4), sinks=normal(4))


def decode_with_bias(module):
    return decode(module, bias=normal(2, 4, 1, 4096), sinks=normal(4))


def decode_with_documents(module):
    return decode(module, document_ids=torch.zeros(2, 4096, dtype=torch.int32), sinks=normal(4))


def decode_with_prefixes(module):
    return decode(module, 3, prefix_lens=torch.tensor([899, 9], dtype=torch.int32))


def decode_with_blocks(module):
    shape = (2, 4, 1)
    counts, indices = torch.ones(shape).int(), torch.zeros(*shape, 32).int()
    given = {"kv_num_blocks": counts, "kv_indices": indices}
    given |= {"full_kv_num_blocks": counts.clone(), "full_kv_indices": indices + 1}
    lists = module.BlockLists(**given, BLOCK_SIZE=(128, 128))
    tensors = decode(module, 2, block_mask=lists, sinks=normal(4))
    del tensors["block_mask"]
    return {**tensors, **given}


def append(module):
    caches = {name: torch.zeros(3, 4, 2, 32, dtype=torch.float8_e4m3fn) for name in ("k_c", "v_c")}
    tensors = {"k": normal(2, 2, 32), "v": normal(2, 2, 32), **caches, "slots": torch.arange(2)}
    module.append_kv(*tensors.values(), k_scale=0.5, v_scale=0.25)
    return tensors


def told(launched, tensors):
    """The launches with names in place of where the call's tensors lie."""
    names = {tensor.data_ptr(): name for name, tensor in tensors.items()}

    def name(argument):
        if isinstance(argument, TensorMap):
            return argument._replace(pointer=names[argument.pointer])
        is_place = type(argument) is int and argument > 2**32
        return names.get(argument, "workspace") if is_place else argument

    return [each._replace(parameters=[*map(name, each.parameters)]) for each in launched]
