"""The exported functions under torch.compile: whole graphs, the same bits, torch's own checks."""

import importlib.util
import re
import sys
from inspect import signature

import pytest
import torch
from exported_calls import make_tensors
from making import shipped_forwards
from torch._dynamo.backends.common import aot_autograd

from autoflash.export import export
from autoflash.problem import Problem

PREFILL = Problem("prefill", "bf16", 1, 4, 2, 32, 20, 40)
PAGED = Problem("decode", "bf16", 3, 4, 2, 32, 1, 40, page_size=4, lengths="ragged")


@pytest.fixture(scope="module")
def text():
    return export(shipped_forwards()).text


@pytest.fixture(scope="module")
def module(text, tmp_path_factory):
    return imported(text, tmp_path_factory.mktemp("exported"), "compiled_dispatch")


def imported(text, folder, name):
    path = folder / "attention_dispatch.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()


def tensors_of(problem, seed=1):
    return make_tensors({**problem.__dict__, "seed": seed}, "cpu")


def prefill_call(seed=1):
    tensors = tensors_of(PREFILL, seed)
    return [tensors[name] for name in "qkv"]


def decode_call(seed=1):
    tensors = tensors_of(PAGED, seed)
    return [tensors[name] for name in ("q", "k", "v", "cache_seqlens", "block_table")]


def chunk_call():
    """Caches of a prefill over pages; how many keys there are, and where."""
    tensors = tensors_of(PAGED)
    pages = (tensors["cache_seqlens"][:1], tensors["block_table"][:1])
    return [tensors["k"], tensors["v"]], pages


def graphs_of(function, *arguments):
    """What the compiled function gives, and the names of the operators in each of its graphs."""
    graphs = []

    def backend(graph, inputs):
        names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        graphs.append([name for name in names if name.startswith("autoflash_")])
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    return torch.compile(function, fullgraph=True, backend=backend)(*arguments), graphs


def test_prefill_is_one_operator_of_one_graph(module):
    def layer(q, k, v):
        out, lse = module.prefill(q * 2, k, v, causal=True, window=(9, 0), return_lse=True)
        return out + 1, lse, module.prefill(q, k, v, softcap=2.0)

    for seed in (1, 2):
        call = prefill_call(seed)
        compiled, (names,) = graphs_of(layer, *call)
        assert names == [f"{module.operator_namespace()}.prefill.default"] * 2
        for ours, eager in zip(compiled, layer(*call), strict=True):
            assert torch.equal(ours, eager)


def test_every_tensor_and_number_that_modifies_reaches_the_operator(module):
    q, k, v = prefill_call()
    slopes, sinks, bias = torch.rand(4), torch.rand(4), torch.rand(20, 40).bfloat16()
    heads_first = [each.transpose(1, 2) for each in (q, k, v)]
    for tensors, more in (
        ((q, k, v), {"alibi_slopes": slopes, "sinks": sinks, "softmax_scale": 0.5, "softcap": 3.0}),
        ((q, k, v), {"bias": bias, "window": (7, 3)}),
        (heads_first, {"causal": True, "layout": "bhsd"}),
    ):
        compiled, _ = graphs_of(lambda *given, more=more: module.prefill(*given, **more), *tensors)
        assert torch.equal(compiled, module.prefill(*tensors, **more)), more
    q, k, v, lengths, table = decode_call()
    k8, v8 = ((cache * 8).nan_to_num().to(torch.int8) for cache in (k, v))
    by_head = torch.tensor([0.5, 2.0])
    for scales in ((by_head, 0.25), (0.25, by_head), (by_head, by_head + 1)):

        def decode(q, k, v, scales=scales):
            k_scale, v_scale = scales
            given = {"block_table": table, "k_scale": k_scale, "v_scale": v_scale}
            return module.decode(q, k, v, lengths, softmax_scale=0.1, max_seqlen_k=40, **given)

        assert torch.equal(graphs_of(decode, q, k8, v8)[0], decode(q, k8, v8))
    more = {"window": (9, 0), "alibi_slopes": slopes, "sinks": sinks, "softcap": 3.0}
    step_bias = torch.rand(3, 4, 1, 40).bfloat16()
    calls = [
        lambda *given, on=on: module.decode(*given, lengths, block_table=table, **on)
        for on in ({}, more, {"bias": step_bias})
    ]
    plain, *changed = (graphs_of(one, q, k, v)[0] for one in calls)
    for one, result in zip(calls[1:], changed, strict=True):
        assert torch.equal(result, one(q, k, v)) and not torch.equal(result, plain)


def test_packed_sequences_and_merged_parts_are_one_graph(module):
    q, k, v = (each[0] for each in prefill_call())
    starts_q, starts_k = torch.tensor([0, 7, 20]), torch.tensor([0, 30, 40])

    def layer(q, k, v, starts_q, starts_k):
        packing = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k, "max_seqlen_q": 13}
        call = {**packing, "max_seqlen_k": 30, "layout": "thd", "return_lse": True}
        parts = (*module.prefill(q, k, v, **call), *module.prefill(q, k * 2, v, **call))
        return module.merge(*parts, layout="thd")

    call = (q, k, v, starts_q, starts_k)
    compiled, (names,) = graphs_of(layer, *call)
    assert [name.split(".")[1] for name in names] == ["prefill", "prefill", "merge"]
    for ours, eager in zip(compiled, layer(*call), strict=True):
        assert torch.equal(ours, eager)


def test_chunks_over_pages_are_one_graph(module):
    (q, _, _), (caches, pages) = prefill_call(), chunk_call()
    out = torch.empty_like(q)

    def layer(q, k, v, lengths, table, out):
        given = {"cache_seqlens": lengths, "block_table": table, "causal": True}
        module.prefill(q, k, v, **given, out=out)
        return out * 2, *module.prefill(q, k, v, **given, window=(9, 0), return_lse=True)

    call = (q, *caches, *pages)
    compiled, (names,) = graphs_of(layer, *call, out)
    assert [name.split(".")[1] for name in names] == ["prefill_chunked_out", "prefill_chunked"]
    for ours, eager in zip(compiled, layer(*call, torch.empty_like(q)), strict=True):
        assert torch.equal(ours, eager)


def test_a_step_that_appends_and_decodes_is_one_graph(module):
    def step(q, k_cache, v_cache, lengths, table, k, v, slots, out):
        module.append_kv(k, v, k_cache, v_cache, slots)
        module.decode(q, k_cache, v_cache, lengths, block_table=table, out=out)
        flat, lse = module.decode(
            q[:, 0], k_cache, v_cache, lengths, block_table=table, return_lse=True
        )
        return out * 2, flat, lse

    new = [torch.full((3, 2, 32), 0.5).bfloat16() for _ in "kv"]
    results = []
    for run in (step, lambda *given: graphs_of(step, *given)[0]):
        call = decode_call()
        slots = call[4][:, 0].long() * 4
        out = torch.empty_like(call[0])
        results.append([*run(*call, *new, slots, out), out, *call[1:3]])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert (results[1][5] == 0.5).any()


def test_other_lengths_are_served_by_one_dynamic_graph(module):
    graphs = []

    def layer(q, k, v):
        return module.prefill(q, k, v, causal=True)

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(layer, fullgraph=True, backend=backend, dynamic=True)
    for keys in (40, 24, 33):
        q, k, v = prefill_call()
        k, v = k[0, :keys].clone()[None], v[0, :keys].clone()[None]
        assert torch.equal(compiled(q, k, v), layer(q, k, v))
    assert len(graphs) == 1


def test_a_gradient_and_what_is_not_served_are_refused_while_compiling(module):
    q, k, v = prefill_call()

    def layer(q, **more):
        return module.prefill(q, k, v, **more)

    with pytest.raises(Exception, match="no backward yet"):
        graphs_of(layer, q.clone().requires_grad_())
    with pytest.raises(Exception, match="k_scale is not supported yet"):
        graphs_of(lambda q: layer(q, k_scale=q), q)


def test_a_graph_draws_the_rng_that_the_eager_call_draws(module):
    q, k, v = prefill_call()

    def layer(q):
        return module.prefill(q, k, v, dropout_p=0.5)

    torch.manual_seed(5)
    expected = [layer(q), layer(q)]
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    compiled(q)
    torch.manual_seed(5)
    assert torch.equal(compiled(q), expected[0]) and torch.equal(compiled(q), expected[1])
    assert not torch.equal(*expected)


def every_operator(module):
    """Calls of the operators, each option given in one of them: positional arguments, options."""
    operators = getattr(torch.ops, module.operator_namespace())
    q, k, v = read = prefill_call()
    slopes, sinks = torch.rand(4), torch.rand(4)
    bias = torch.rand(20, 40).bfloat16()
    window = {"window_left": 9, "window_right": 5}
    numbers = {**window, "causal": True, "softmax_scale": 0.25, "softcap": 3.0, "layout": "bshd"}
    sloped = {**numbers, "alibi_slopes": slopes, "sinks": sinks, "deterministic": True}
    yield operators.prefill.default, read, {}
    yield operators.prefill.default, read, sloped
    yield operators.prefill.default, read, {**window, "bias": bias, "check": True}
    yield operators.prefill_out.default, (*read, torch.empty_like(q)), sloped
    starts_q, starts_k = torch.tensor([0, 7, 20]), torch.tensor([0, 30, 40])
    packing = {"cu_seqlens_q": starts_q, "cu_seqlens_k": starts_k}
    packing |= {"max_seqlen_q": 13, "max_seqlen_k": 30, "layout": "thd"}
    yield operators.prefill.default, (q[0], k[0], v[0]), packing
    rng = torch.tensor([3, 5])
    yield operators.prefill.default, read, {"bias": bias, "dropout_p": 0.5, "rng": rng}
    documents = torch.arange(40).int()[None] // 9
    told = {"document_ids": documents, "density": 20}
    yield operators.prefill_masked.default, read, {"causal": True, **told}
    yield operators.prefill_masked_out.default, (*read, torch.empty_like(q)), told
    counts, columns = torch.ones(1, 1, 2).int(), torch.zeros(1, 1, 2, 3).int()
    blocks = {"kv_num_blocks": counts, "kv_indices": columns, "mask_block_q": 16}
    full = {"full_kv_num_blocks": counts, "full_kv_indices": columns, "mask_block_k": 16}
    yield operators.prefill_masked.default, read, {**blocks, **full, "check": True}
    caches, pages = chunk_call()
    yield operators.prefill_chunked.default, (q, *caches, *pages), sloped
    both = [each.expand(2, *each.shape[1:]) for each in pages]
    chunks = {"cu_seqlens_q": starts_q, "max_seqlen_q": 13, "layout": "thd", "kv_layout": "nhd"}
    chunks["bias"] = bias[:13]
    operator = operators.prefill_chunked_out.default
    yield operator, (q[0], *caches, *both, torch.empty_like(q[0])), chunks
    prefixes = {"prefix_lens": torch.tensor([7], dtype=torch.int32), "causal": True}
    prefixes |= dict(zip(("cache_seqlens", "block_table"), pages, strict=True))
    yield operators.prefill_masked.default, (q, *caches), prefixes
    parts = (q[0], torch.rand(4, 20), q[0] * 2, torch.rand(4, 20))
    yield operators.merge.default, parts, {"layout": "thd"}
    *read, table = decode_call()
    q, k, v, lengths = read
    numbers = {"window_left": 9, "softcap": 2.0, "softmax_scale": 0.25, "max_seqlen_k": 40}
    plain = {**numbers, "block_table": table, "kv_layout": "nhd", "check": True}
    plain |= {"alibi_slopes": slopes, "sinks": sinks, "lengths": "equal", "pages": "contiguous"}
    yield operators.decode.default, read, plain
    yield operators.decode.default, (q[:, 0], *read[1:]), {"block_table": table}
    biased = {**plain, "alibi_slopes": None, "bias": bias[:1]}
    yield operators.decode_out.default, (*read, torch.empty_like(q)), biased
    k8, v8 = ((cache * 8).nan_to_num().to(torch.int8) for cache in (k, v))
    scaled = {**plain, "k_scale": torch.rand(2) + 1, "v_number": 0.5}
    yield operators.decode.default, (q, k8, v8, lengths), scaled
    new = [torch.rand(2, 2, 32).bfloat16() for _ in "kv"]
    slots = torch.tensor([3, -1])
    yield operators.append_kv.default, (*new, k, v, slots), {}
    token_scales = [torch.rand(k8.shape[:3]) for _ in "kv"]
    scales = dict(zip(("k_scale", "v_scale"), token_scales, strict=True))
    yield operators.append_kv.default, (*new, k8, v8, slots), {**scales, "kv_layout": "nhd"}


@pytest.mark.parametrize("number", range(19))
def test_torchs_own_check_of_operators_passes(module, number):
    operator, arguments, options = list(every_operator(module))[number]
    checks = torch.library.opcheck(operator, tuple(arguments), options)
    assert set(checks.values()) == {"SUCCESS"}


def test_what_an_operator_is_not_given_is_what_its_function_takes_it_for(module):
    """Else a call by the operator would mean another thing than one by the function."""
    # both sides of the window are one tuple of the function, and it sees who asks for gradients
    windows = {"window_left": -1, "window_right": -1, "training": False}
    elsewhere = {*windows, "k_number", "v_number", *module.FLAT_MASKS[:6]}
    elsewhere |= set(module.QueryLists._fields)  # of a block_mask too
    for name, schema in module.OPERATOR_SCHEMAS.items():
        operator = getattr(getattr(torch.ops, module.operator_namespace()), name).default
        given = {each.name: each for each in operator._schema.arguments}
        optional = [each.has_default_value() for each in given.values()]
        assert optional == sorted(optional), f"{schema}: an option before what is required"
        if name.endswith("_gradients"):
            continue
        function = signature(getattr(module, re.sub("_(out|masked|chunked)", "", name)))
        for option, each in given.items():
            if option in elsewhere:
                assert each.default_value == windows.get(option, 0 if "block_" in option else None)
            elif each.has_default_value():
                assert each.default_value == function.parameters[option].default, (name, option)


def test_a_graph_keeps_of_a_call_what_is_no_default(module):
    graphs = []

    def backend(graph, inputs):
        graphs.append([node for node in graph.graph.nodes if "autoflash" in str(node.target)])
        return graph

    def layer(q, k, v):
        return module.prefill(q, k, v, causal=True)

    compiler = aot_autograd(fw_compiler=backend)
    torch.compile(layer, fullgraph=True, backend=compiler)(*prefill_call())
    ((call,),) = graphs
    assert (len(call.args), call.args[3:], call.kwargs) == (4, (True,), {})


def test_two_imports_of_one_module_have_operators_of_their_own(module, text, tmp_path):
    other = imported(text, tmp_path, "compiled_dispatch_again")
    assert other.operator_namespace() != module.operator_namespace()
    before = sum(module.coverage().values())
    torch.compile(other.prefill, fullgraph=True, backend="eager")(*prefill_call())
    assert sum(module.coverage().values()) == before and sum(other.coverage().values()) == 1
