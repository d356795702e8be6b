"""Workload files: what they mean, and every mistake told in one line with file, key and reason."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from autoflash import workload
from autoflash.errors import WorkloadError
from autoflash.problem import Problem
from autoflash.runtime.problem import DTYPE_BYTES, KV_DTYPE_BYTES
from autoflash.workload import MAX_PROBLEMS, Workload, load_workload, workload_schema

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = "model: {num_heads: 8, num_kv_heads: 2, head_dim: 64, dtype: bf16}\n"


def load(folder: Path, text: str) -> Workload:
    path = folder / "llama.yaml"
    path.write_text(text)
    return load_workload(path)


def mistakes(folder: Path, text: str) -> list[str]:
    with pytest.raises(WorkloadError) as error:
        load(folder, text)
    return str(error.value).splitlines()


def test_an_entry_takes_what_it_does_not_say_from_the_model(tmp_path):
    text = MODEL + "decode: [{batch: 3, seqlen_k: 100, head_dim: 128}]"
    expected = Problem(
        op="decode",
        dtype="bf16",
        batch=3,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        seqlen_q=1,
        seqlen_k=100,
    )
    assert load(tmp_path, text).problems == ((expected, 1.0),)


def test_lists_expand_to_their_product_and_keep_their_order(tmp_path):
    text = MODEL + "decode: [{batch: [1, 8], seqlen_k: [64, 32], page_size: [0, 16]}]"
    problems = [problem for problem, _ in load(tmp_path, text).problems]
    shapes = [(p.batch, p.seqlen_k, p.page_size) for p in problems]
    assert shapes == [(b, k, p) for b in (1, 8) for k in (64, 32) for p in (0, 16)]


def test_lists_of_the_model_expand_too(tmp_path):
    text = MODEL.replace("bf16", "[bf16, fp16]") + "prefill: [{seqlen_q: 32}]"
    assert [p.dtype for p, _ in load(tmp_path, text).problems] == ["bf16", "fp16"]


def test_a_prompt_without_seqlen_k_attends_to_itself(tmp_path):
    problems = load(tmp_path, MODEL + "prefill: [{seqlen_q: [32, 48]}]").problems
    assert [(p.seqlen_q, p.seqlen_k) for p, _ in problems] == [(32, 32), (48, 48)]
    ((chunk, _),) = load(tmp_path, MODEL + "prefill: [{seqlen_q: 32, seqlen_k: 80}]").problems
    assert (chunk.seqlen_q, chunk.seqlen_k) == (32, 80)


def test_every_key_of_an_entry_reaches_the_problem(tmp_path):
    text = (
        MODEL
        + """
prefill:
  - {seqlen_q: 32, causal: [true, false], layout: bhsd}
  - {seqlen_q: 32, seqlen_k: 96, layout: thd, page_size: 16, kv_layout: hnd, pages: contiguous}
decode:
  - {seqlen_k: 64, seqlen_q: 2, kv_layout: hnd, lengths: ragged, page_size: 16}
"""
    )
    causal, full, chunk, decode = (problem for problem, _ in load(tmp_path, text).problems)
    assert (causal.causal, full.causal, full.layout) == (True, False, "bhsd")
    assert (chunk.layout, chunk.seqlen_k, chunk.page_size) == ("thd", 96, 16)
    assert (chunk.kv_layout, chunk.pages) == ("hnd", "contiguous")
    assert (decode.seqlen_q, decode.kv_layout, decode.lengths) == (2, "hnd", "ragged")


def test_windows_and_modifiers_are_told_in_the_words_of_problem(tmp_path):
    text = (
        MODEL
        + """
prefill:
  - {seqlen_q: 64, window_left: [16, -1], softcap: true, alibi: true}
  - {seqlen_q: 64, causal: false, window_right: 8, bias: true, sinks: [true, false]}
  - {seqlen_q: [16, 64], window_left: 32}
  - {seqlen_q: 64, dropout: true}
decode:
  - {seqlen_k: [16, 64], window_left: 32, softcap: true, alibi: true, sinks: true}
  - {seqlen_k: 16, bias: true}
"""
    )
    told = [
        (p.seqlen_q, p.causal, p.window_left, p.window_right, p.modifiers)
        for p, _ in load(tmp_path, text).problems
    ]
    assert told == [
        (64, True, 16, -1, ("softcap", "alibi")),
        (64, True, -1, -1, ("softcap", "alibi")),
        (64, False, -1, 8, ("bias", "sinks")),
        (64, False, -1, 8, ("bias",)),
        (16, True, -1, -1, ()),  # a window that all keys are in is none
        (64, True, 32, -1, ()),
        (64, True, -1, -1, ("dropout",)),
        # in decode it stays: the next step has more keys
        *[(1, True, 32, -1, ("softcap", "alibi", "sinks"))] * 2,
        (1, True, -1, -1, ("bias",)),
    ]
    (line,) = mistakes(tmp_path, MODEL + "prefill: [{seqlen_q: 2, window_left: -2}]")
    assert line.endswith(
        "prefill[0].window_left: -2 is neither a number of keys nor -1 for unbounded"
    )
    (line,) = mistakes(tmp_path, MODEL + "prefill: [{seqlen_q: 2, alibi: true, bias: true}]")
    assert "prefill[0]: alibi and bias exclude each other" in line


def test_masks_are_switches_with_a_density_and_blocks_of_their_own(tmp_path):
    text = """prefill:
  - {seqlen_q: 64, masked_by: blocks, mask: h>0, causal: false}
  - {seqlen_q: 64, masked_by: [documents, prefix], density: 5}
  - {seqlen_q: 64, mask: kv_idx - q_idx < 4, head_dim_v: 32}
decode:
  - {seqlen_k: 64, mask: kv_idx%4<h}
  - {seqlen_k: 64, seqlen_q: [1, 2], masked_by: [documents, prefix], density: 5}
"""
    found = [
        (p.masked_by, p.density, p.mask_block_q, p.mask, p.head_dim_v)
        for p, _ in load(tmp_path, MODEL + text).problems
    ]
    width = found[0][4]
    assert found == [
        ("blocks", 10, 128, "h > 0", width),
        ("documents", 5, 0, "", width),
        ("prefix", 5, 0, "", width),
        ("none", 0, 0, "kv_idx - q_idx < 4", 32),
        ("none", 0, 0, "kv_idx % 4 < h", width),
        ("documents", 5, 0, "", width),
        ("none", 0, 0, "", width),  # one query token sees all keys, those of a prefix too
        ("documents", 5, 0, "", width),
        ("prefix", 5, 0, "", width),
    ]
    entry = "decode: [{seqlen_k: 64, masked_by: blocks, mask_block_k: [64, 32], density: 3}]"
    steps = [problem for problem, _ in load(tmp_path, MODEL + entry).problems]
    assert [(p.masked_by, p.density, p.mask_block_k) for p in steps] == [
        ("blocks", 3, 64),
        ("blocks", 3, 32),
    ]
    entry = "decode: [{seqlen_k: 64, page_size: 16, pages: chosen, masked_by: blocks}]"
    (line,) = mistakes(tmp_path, MODEL + entry)
    assert line.endswith(
        "decode[0]: blocks and chosen pages exclude each other: both say which keys are read"
    )


@pytest.mark.parametrize(
    ("entry", "mistake"),
    [
        ("masked_by: trees", "prefill[0].masked_by: 'trees' is none of blocks, documents"),
        ("masked_by: blocks, density: 0", "prefill[0].density: 0 is not positive"),
        ("masked_by: blocks, density: 101", "prefill[0].density: 101 is more than 100"),
        ("masked_by: blocks, mask_block_k: 24", "prefill[0]: blocks of 128 by 24: sizes are"),
        ("masked_by: prefix, causal: false", "prefill[0]: prefix: what is beyond it is causal"),
        ("density: 7", "prefill[0]: density 7 is not from 1 to 100 percent, or 0 without"),
        ("mask: q_idx > x", "prefill[0]: mask 'q_idx > x': x is none of b, h, q_idx, kv_idx"),
        ("mask: import os", "prefill[0]: mask 'import os' is not an expression"),
        ("masked_by: blocks, layout: thd, training: true", "prefill[0]: blocks: packed sequences"),
    ],
)
def test_masks_that_do_not_fit_are_told(tmp_path, entry, mistake):
    (line,) = mistakes(tmp_path, MODEL + f"prefill: [{{seqlen_q: 64, {entry}}}]")
    assert mistake in line


def test_each_problem_of_an_entry_has_its_weight(tmp_path):
    text = MODEL + "decode: [{batch: [1, 2], seqlen_k: 64, weight: 2.5}]"
    assert [weight for _, weight in load(tmp_path, text).problems] == [2.5, 2.5]


def test_a_problem_given_twice_is_one_with_the_weights_added(tmp_path):
    text = MODEL + "decode: [{seqlen_k: [32, 64], weight: 2}, {seqlen_k: 64, weight: 3}]"
    weights = {p.seqlen_k: weight for p, weight in load(tmp_path, text).problems}
    assert weights == {32: 2.0, 64: 5.0}


def test_a_workload_is_called_by_its_name_or_else_by_its_file(tmp_path):
    text = MODEL + "prefill: [{seqlen_q: 32}]"
    assert load(tmp_path, text).name == "llama"
    assert load(tmp_path, "name: other\n" + text).name == "other"


KEY_MISTAKES = [
    ("prefil: []", "unknown key prefil; did you mean prefill?"),
    ("decode: [{bacth: 1, seqlen_k: 2}]", "decode[0]: unknown key bacth; did you mean batch?"),
    ("decode: [{seqlen_k: 2, weigth: 1}]", "decode[0]: unknown key weigth; did you mean weight?"),
    (
        "model: {zzz: 1}",
        "model: unknown key zzz; known are dtype, head_dim, num_heads, num_kv_heads",
    ),
    ("decode: [{seqlen_k: 2, 5: 1}]", "decode[0]: unknown key; a key is a word"),
    ("decode: [{batch: 1}]", "decode[0].seqlen_k: is missing"),
    ("prefill: [{batch: 1}]", "prefill[0].seqlen_q: is missing"),
]
TYPE_MISTAKES = [
    ("decode: [{seqlen_k: true}]", "decode[0].seqlen_k: true is not an integer"),
    ("decode: [{seqlen_k: yes}]", "decode[0].seqlen_k: true is not an integer"),
    ("decode: [{seqlen_k: '64'}]", "decode[0].seqlen_k: '64' is not an integer"),
    ("decode: [{seqlen_k: 64.0}]", "decode[0].seqlen_k: 64.0 is not an integer"),
    ("decode: [{seqlen_k: 1e3}]", "decode[0].seqlen_k: '1e3' is not an integer"),
    ("decode: [{seqlen_k: }]", "decode[0].seqlen_k: nothing is not an integer"),
    ("decode: [{seqlen_k: [[1]]}]", "decode[0].seqlen_k[0]: a list is not an integer"),
    ("decode: [{seqlen_k: {a: 1}}]", "decode[0].seqlen_k: a mapping is not an integer"),
    ("prefill: [{seqlen_q: 2, causal: 1}]", "prefill[0].causal: 1 is not true or false"),
    ("decode: [{seqlen_k: 2, weight: true}]", "decode[0].weight: true is not a finite number"),
    ("decode: [{seqlen_k: 2, weight: .nan}]", "decode[0].weight: nan is not a finite number"),
    ("decode: [{seqlen_k: 2, weight: .inf}]", "decode[0].weight: inf is not a finite number"),
    ("decode: {seqlen_k: 2}", "decode: a mapping is not a list"),
    ("decode: [3]", "decode[0]: 3 is not a mapping of keys to values"),
    ("decode:", "decode: nothing is not a list"),
    ("name: 3", "name: 3 is not a name"),
]
VALUE_MISTAKES = [
    ("decode: [{seqlen_k: []}]", "decode[0].seqlen_k: the list is empty"),
    ("decode: [{seqlen_k: 0}]", "decode[0].seqlen_k: 0 is not positive"),
    ("decode: [{seqlen_k: [64, -1]}]", "decode[0].seqlen_k[1]: -1 is not positive"),
    ("decode: [{seqlen_k: 2, page_size: -1}]", "decode[0].page_size: -1 is negative"),
    ("decode: [{seqlen_k: 2147483648}]", "decode[0].seqlen_k: 2147483648 is more than 2147483647"),
    ("decode: [{seqlen_k: 2, weight: 0}]", "decode[0].weight: 0 is not positive"),
    ("decode: [{seqlen_k: 2, dtype: fp8}]", "decode[0].dtype: 'fp8' is none of bf16, fp16 or fp32"),
    ("decode: [{seqlen_k: 2, kv_layout: nh}]", "decode[0].kv_layout: 'nh' is none of nhd or hnd"),
    (
        "decode: [{seqlen_k: 2, num_heads: 5}]",
        "decode[0]: num_heads 5 is not a multiple of num_kv_heads 2",
    ),
    (
        "decode: [{seqlen_k: 2, head_dim: 65}]",
        "decode[0]: head_dim 65 is not a multiple of 8 from 16 to 256",
    ),
    (
        "decode: [{seqlen_k: 64, seqlen_q: 17}]",
        "decode[0]: seqlen_q 17 is more than the 16 query tokens a decode step may have;"
        " prefill has any number, over pages too",
    ),
    ("", "prefill, decode: neither has an entry, so there is nothing to tune"),
]


@pytest.mark.parametrize(("text", "expected"), KEY_MISTAKES + TYPE_MISTAKES + VALUE_MISTAKES)
def test_a_mistake_is_one_line_of_file_key_and_reason(tmp_path, text, expected):
    model = "" if text.startswith("model") else MODEL
    assert mistakes(tmp_path, model + text) == [f"llama.yaml: {expected}"]


NOT_YAML = [
    ("", "is empty"),
    ("# nothing but this", "is empty"),
    ("- 1", "a list is not a mapping of keys to values"),
    ("a: 1\nb: 2\na: 3", "line 3, column 1: a is given twice"),
    ("model: {dtype: fp16, dtype: bf16}", "line 1, column 22: dtype is given twice"),
    ("x: [", "line 1, column 5: expected the node content, but found '<stream end>'"),
    ("\x00", "not YAML: unacceptable character #x0000: special characters are not allowed"),
    ("a: 2024-13-45", "not YAML: month must be in 1..12"),
    ("[" * 5000, "not YAML: nested too deeply"),
    (
        "name: !!python/object/apply:os.getcwd []",
        "line 1, column 7: could not determine a constructor for the tag "
        "'tag:yaml.org,2002:python/object/apply:os.getcwd'",
    ),
]


@pytest.mark.parametrize(("text", "expected"), NOT_YAML, ids=lambda value: value[:20])
def test_what_is_not_yaml_is_told_by_its_place(tmp_path, text, expected):
    assert mistakes(tmp_path, text) == [f"llama.yaml: {expected}"]


def test_every_mistake_of_a_file_is_told_at_once(tmp_path):
    text = MODEL + "decode: [{seqlen_k: 0}, {seqlen_k: 1}, {seqlen_k: '4', dtype: fp8}]"
    assert mistakes(tmp_path, text) == [
        "llama.yaml: decode[0].seqlen_k: 0 is not positive",
        "llama.yaml: decode[2].dtype: 'fp8' is none of bf16, fp16 or fp32",
        "llama.yaml: decode[2].seqlen_k: '4' is not an integer",
    ]


def test_a_file_of_mistakes_is_cut_short(tmp_path):
    lines = mistakes(tmp_path, MODEL + f"decode: [{'{seqlen_k: 0}, ' * 50}]")
    assert len(lines) == workload.MAX_MISTAKES + 1
    assert lines[-1] == "llama.yaml: 30 more mistakes"


def test_a_head_count_that_nobody_gives_is_asked_for(tmp_path):
    text = "decode: [{seqlen_k: 64, dtype: bf16, num_heads: 4, head_dim: 64}]"
    assert mistakes(tmp_path, text) == [
        "llama.yaml: decode[0]: num_kv_heads is given neither here nor in model"
    ]


def test_an_expansion_past_the_limit_is_refused_before_it_is_made(tmp_path):
    thousand = ", ".join(str(n) for n in range(1, 1001))
    every = ", ".join(f"{key}: [{thousand}]" for key in ("batch", "seqlen_q", "seqlen_k"))
    (line,) = mistakes(tmp_path, MODEL + f"prefill: [{{{every}}}]")
    expected = f"its lists expand to 1000000000 problems; a workload may have {MAX_PROBLEMS} in all"
    assert line == f"llama.yaml: prefill[0]: {expected}"


def test_a_file_that_cannot_be_read_is_told_by_its_path(tmp_path):
    for path, reason in (
        (tmp_path / "none.yaml", "No such file or directory"),
        (tmp_path, "is a folder; a workload is one YAML file"),
    ):
        with pytest.raises(WorkloadError) as error:
            load_workload(path)
        assert str(error.value) == f"{path}: {reason}"


def test_a_file_too_large_to_be_a_workload_is_refused(tmp_path):
    (line,) = mistakes(tmp_path, "#" * (workload.MAX_FILE_BYTES + 1))
    assert line == "llama.yaml: is larger than 1048576 bytes"


def test_the_words_of_the_format_are_those_of_problem():
    assert get_args(workload.Dtype) == tuple(DTYPE_BYTES)
    assert get_args(workload.KvDtype) == tuple(KV_DTYPE_BYTES)


def test_caches_and_their_pages_are_told_in_the_words_of_problem(tmp_path):
    shared = "{seqlen_k: 64, page_size: [0, 16], pages: shared, kv_dtype: [bf16, fp8_e4m3]}"
    scaled = "{seqlen_k: 64, kv_dtype: int8, kv_scales: [head, token]}"
    loaded = load(tmp_path, f"{MODEL}decode: [{shared}, {scaled}]")
    told = [(p.page_size, p.pages, p.kv_dtype, p.kv_scales) for p, _ in loaded.problems]
    assert told == [
        (0, "none", "bf16", "none"),
        (0, "none", "fp8_e4m3", "tensor"),
        (16, "shared", "bf16", "none"),
        (16, "shared", "fp8_e4m3", "tensor"),
        (0, "none", "int8", "head"),
        (0, "none", "int8", "token"),
    ]


def test_training_adds_the_backward_of_each_problem_with_its_weight(tmp_path):
    trained = "{seqlen_q: [64, 128], training: true, weight: 3, causal: false}"
    loaded = load(tmp_path, f"{MODEL}prefill: [{trained}, {{seqlen_q: 64, causal: false}}]")
    told = [(p.op, p.seqlen_q, weight) for p, weight in loaded.problems]
    assert told == [
        ("prefill", 64, 4),
        ("backward", 64, 3),
        ("prefill", 128, 3),
        ("backward", 128, 3),
    ]
    (forward, _), (backward, _) = loaded.problems[:2]
    assert backward == replace(forward, op="backward")


def test_training_has_values_of_another_width(tmp_path):
    widths = "{head_dim: 192, head_dim_v: 128, seqlen_q: 64, training: true}"
    loaded = load(tmp_path, f"{MODEL}prefill: [{widths}]")
    told = [(p.op, p.head_dim, p.head_dim_v, p.switches) for p, _ in loaded.problems]
    switches = ("causal", "head_dim_v")
    assert told == [("prefill", 192, 128, switches), ("backward", 192, 128, switches)]


@pytest.mark.parametrize("on", ["masked_by: prefix", "mask: h > kv_idx", "bias: true"])
def test_training_has_packed_sequences_under_masks_and_with_a_bias(tmp_path, on):
    loaded = load(
        tmp_path, f"{MODEL}prefill: [{{seqlen_q: 64, layout: thd, {on}, training: true}}]"
    )
    (forward, _), (backward, _) = loaded.problems
    assert forward.varlen and backward == replace(forward, op="backward")


def test_deterministic_is_said_of_the_backward_alone(tmp_path):
    trained = "{seqlen_q: 64, training: true, deterministic: [false, true]}"
    problems = dict(load(tmp_path, f"{MODEL}prefill: [{trained}]").problems)
    assert sorted((p.op, p.deterministic) for p in problems) == [
        ("backward", False),
        ("backward", True),
        ("prefill", False),
    ]
    with pytest.raises(WorkloadError, match=r"prefill\[0\]: deterministic is for training"):
        load(tmp_path, f"{MODEL}prefill: [{{seqlen_q: 64, deterministic: true}}]")


def test_keys_in_pages_have_no_backward_and_it_is_said_at_once(tmp_path):
    trained = "{seqlen_q: 64, page_size: 16, training: true}"
    with pytest.raises(WorkloadError, match="page_size 16: no backward has keys in pages yet"):
        load(tmp_path, f"{MODEL}prefill: [{trained}]")


def test_training_is_a_word_of_an_entry_and_no_list(tmp_path):
    with pytest.raises(WorkloadError, match=r"prefill\[0\]\.training: .* is not true or false"):
        load(tmp_path, f"{MODEL}prefill: [{{seqlen_q: 64, training: [true]}}]")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_example_loads_and_is_called_by_its_file_name(path):
    loaded = load_workload(path)
    assert loaded.name == path.stem
    ops = {problem.op for problem, _ in loaded.problems}
    assert ops == {"prefill", "decode"}


def test_llama_covers_prompts_and_contexts_up_to_32768():
    problems = [problem for problem, _ in load_workload(EXAMPLES / "llama-3-8b.yaml").problems]
    prefill = {(p.batch, p.seqlen_q) for p in problems if p.op == "prefill" and p.causal}
    decode = {(p.batch, p.page_size) for p in problems if p.op == "decode"}
    assert {(1, 512), (4, 512), (1, 32768), (4, 32768)} <= prefill
    assert decode == {(batch, page) for batch in (1, 8, 64) for page in (0, 16)}
    assert {(p.num_heads, p.num_kv_heads, p.head_dim, p.dtype) for p in problems} == {
        (32, 8, 128, "bf16")
    }


positive = st.integers(1, 64)
choices = st.one_of(positive, st.lists(positive, min_size=1, max_size=2))
entries = st.fixed_dictionaries(
    {"seqlen_k": choices},
    optional={
        "batch": choices,
        "page_size": st.one_of(st.just(0), st.lists(st.integers(0, 16), min_size=1, max_size=2)),
        "kv_layout": st.sampled_from(["nhd", "hnd", ["nhd", "hnd"]]),
        "weight": st.floats(0.5, 100),
        "dtype": st.sampled_from(["fp16", ["fp16", "fp32"]]),
    },
)
files = st.fixed_dictionaries({"decode": st.lists(entries, min_size=1, max_size=2)})


@given(files)
@settings(deadline=None, max_examples=50)
def test_what_the_loader_accepts_the_schema_accepts(tmp_path_factory, content):
    content = {**yaml.safe_load(MODEL), **content}
    load(tmp_path_factory.getbasetemp(), yaml.safe_dump(content))
    jsonschema.validate(content, workload_schema())


@pytest.mark.parametrize(("text", "_expected"), KEY_MISTAKES[:4] + TYPE_MISTAKES[:3])
def test_what_the_schema_accepts_is_no_mistake_of_spelling(text, _expected):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(yaml.safe_load(text), workload_schema())


def test_the_schema_is_one_that_validators_accept():
    jsonschema.Draft202012Validator.check_schema(workload_schema())
