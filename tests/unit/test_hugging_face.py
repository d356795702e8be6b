"""Workloads of models: what their config.json asks of attention, and what is not served."""

import json

import pytest
from making import candidates
from typer.testing import CliRunner

from autoflash.cli import app
from autoflash.errors import WorkloadError
from autoflash.hugging_face import Shapes, import_config
from autoflash.workload import load_workload

# What the published configs say of attention, with fewer layers.
LLAMA = {
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": 4096}
QWEN = LLAMA | {
    "model_type": "qwen2",
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "hidden_size": 3584,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
QWEN3 = LLAMA | {
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_size": 1024,
    "num_attention_heads": 16,
}
GEMMA2 = LLAMA | {
    "model_type": "gemma2",
    "num_attention_heads": 16,
    "head_dim": 256,
    "num_hidden_layers": 42,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
}
GEMMA3 = {
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "text_config": LLAMA
    | {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "sliding_window": 1024,
        "num_hidden_layers": 12,
    },
}
GPT_OSS = LLAMA | {
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "head_dim": 64,
    "sliding_window": 128,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
DEEPSEEK = LLAMA | {
    "model_type": "deepseek_v3",
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}
FEW = Shapes((1,), (512, 8192), (8,), (1024, 8192), (16,))


@pytest.fixture
def imported(tmp_path):
    """The problems of a config, and what is noticed."""

    def of(config, shapes=FEW, tensor_parallel=1):
        path = tmp_path / "config.json"
        path.write_text(json.dumps(config))
        found = import_config(path, shapes, tensor_parallel)
        file = tmp_path / "workload.yaml"
        file.write_text(found.text)
        return load_workload(file).problems, found.notices

    return of


def test_llama_is_served_whole(imported):
    problems, notices = imported(LLAMA)
    assert notices == ()
    assert {weight for _, weight in problems} == {32}
    shapes = [(p.op, p.batch, p.seqlen_q, p.seqlen_k, p.page_size) for p, _ in problems]
    assert shapes == [
        ("prefill", 1, 512, 512, 0),
        ("prefill", 1, 8192, 8192, 0),
        ("decode", 8, 1, 1024, 16),
        ("decode", 8, 1, 8192, 16),
    ]
    heads = {(p.num_heads, p.num_kv_heads, p.head_dim, p.dtype) for p, _ in problems}
    assert heads == {(32, 8, 128, "bf16")}


def test_the_window_of_mistral_counts_the_query_itself(imported):
    problems, notices = imported(MISTRAL)
    windows = [(p.op, p.seqlen_k, p.window_left) for p, _ in problems]
    assert windows == [
        ("prefill", 512, -1),
        ("prefill", 8192, 4095),
        ("decode", 1024, 4095),
        ("decode", 8192, 4095),
    ]
    assert notices == ()
    assert not any(p.windowed for p, _ in imported(MISTRAL | {"sliding_window": None})[0])


def test_qwen_slides_only_where_it_says_so(imported):
    problems, notices = imported(QWEN)
    assert notices == () and not any(p.windowed for p, _ in problems)
    assert {(p.num_heads, p.num_kv_heads, p.head_dim) for p, _ in problems} == {(28, 4, 128)}
    assert not any(p.windowed for p, _ in imported(QWEN | {"sliding_window": 512})[0])
    sliding = QWEN | {"use_sliding_window": True, "sliding_window": 512}
    weights = {
        (p.op, p.window_left, weight) for p, weight in imported(sliding)[0] if p.seqlen_k > 999
    }
    every = {("prefill", -1, 28), ("prefill", 511, 4), ("decode", -1, 28), ("decode", 511, 4)}
    assert weights == every


def test_a_head_is_as_wide_as_the_config_says(imported):
    assert {p.head_dim for p, _ in imported(QWEN3)[0]} == {128}


def test_gemma_2_caps_scores_and_every_other_layer_slides(imported):
    problems, notices = imported(GEMMA2)
    assert all(p.softcap for p, _ in problems) and notices == ()
    found = {(p.op, p.seqlen_k, p.window_left, weight) for p, weight in problems}
    assert found == {
        ("prefill", 512, -1, 42.0),  # where a prompt is shorter than the window, layers are alike
        *(("prefill", 8192, left, 21.0) for left in (-1, 4095)),
        *(("decode", keys, left, 21.0) for keys in (1024, 8192) for left in (-1, 4095)),
    }


def test_gemma_3_slides_but_in_every_sixth_layer_and_its_text_config_counts(imported):
    problems, notices = imported(GEMMA3)
    found = {(p.op, p.seqlen_k, p.window_left): weight for p, weight in problems}
    assert found["prefill", 8192, 1023] == 10 and found["prefill", 8192, -1] == 2
    for keys in (1024, 8192):
        assert found["decode", keys, 1023] == 10 and found["decode", keys, -1] == 2
    assert notices == ()


def test_gpt_oss_has_sinks(imported):
    problems, notices = imported(GPT_OSS)
    found = {(p.op, p.window_left, p.sinks, p.head_dim) for p, _ in problems}
    assert found == {(op, left, True, 64) for op in ("prefill", "decode") for left in (-1, 127)}
    assert notices == ()


def test_latent_attention_is_decoded_from_one_head_that_every_gpu_has(imported):
    for gpus, heads in ((1, 128), (8, 16)):
        problems, notices = imported(DEEPSEEK, tensor_parallel=gpus)
        assert notices == ()
        decodes = [(p, weight) for p, weight in problems if p.op == "decode"]
        assert all(p.latent for p, _ in decodes)
        assert {(p.num_heads, p.num_kv_heads, w) for p, w in decodes} == {(heads, 1, 32)}


def test_latent_attention_has_a_key_and_a_value_for_each_head_in_prefill(imported):
    for gpus, heads in ((1, 128), (8, 16)):
        problems, _ = imported(DEEPSEEK, tensor_parallel=gpus)
        prefills = [p for p, weight in problems if p.op == "prefill" and weight == 32]
        assert [(p.seqlen_q, p.head_dim, p.head_dim_v) for p in prefills] == [
            (512, 192, 128),
            (8192, 192, 128),
        ]
        assert {(p.num_heads, p.num_kv_heads) for p in prefills} == {(heads, heads)}
        assert all(candidates(problem) for problem in prefills)
    wide = "v_head_dim: head_dim 320 is not a multiple of 8 from 16 to 256"
    with pytest.raises(WorkloadError, match=wide):
        imported(DEEPSEEK | {"qk_nope_head_dim": 256})


def test_what_is_not_latent_attention_of_these_widths_is_refused(imported):
    with pytest.raises(WorkloadError, match="kv_lora_rank, qk_rope_head_dim: head_dim 320 is not"):
        imported(DEEPSEEK | {"kv_lora_rank": 256})
    with pytest.raises(WorkloadError, match="num_attention_heads: 128 heads cannot be dealt to 3"):
        imported(DEEPSEEK, tensor_parallel=3)


def test_heads_are_dealt_to_gpus_and_few_kv_heads_copied(imported):
    for gpus, heads in ((4, (8, 2)), (16, (2, 1))):
        problems, _ = imported(LLAMA, tensor_parallel=gpus)
        assert {(p.num_heads, p.num_kv_heads) for p, _ in problems} == {heads}
    with pytest.raises(WorkloadError, match="num_attention_heads: 32 heads cannot be dealt to 3"):
        imported(LLAMA, tensor_parallel=3)


def test_lengths_end_where_the_models_positions_do(imported):
    short = LLAMA | {"max_position_embeddings": 256, "torch_dtype": None}
    problems, notices = imported(short)
    assert {p.seqlen_k for p, _ in problems} == {256}
    assert notices == ("it does not say its dtype: bf16 is taken",)


WRONG = {
    "no type": ({"model_type": None}, "model_type: is missing"),
    "an encoder": ({"model_type": "bert"}, "model_type: bert is not known; known are deepseek_v2"),
    "no heads": ({"num_attention_heads": None}, "num_attention_heads: is missing"),
    "no number": ({"num_attention_heads": "32"}, "'32' is not a positive integer"),
    "no layers": ({"num_hidden_layers": 0}, "num_hidden_layers: 0 is not a positive integer"),
    "wide heads": ({"head_dim": 512}, "head_dim 512 is not a multiple of 8 from 16 to 256"),
    "chunks": (
        {"sliding_window": 8, "layer_types": ["chunked_attention"]},
        "layer_types: chunked_attention is an attention that is not known",
    ),
}


@pytest.mark.parametrize(("changes", "reason"), WRONG.values(), ids=WRONG)
def test_a_config_that_does_not_say_its_attention_is_refused(imported, changes, reason):
    with pytest.raises(WorkloadError) as told:
        imported(LLAMA | changes)
    assert str(told.value).startswith("config.json: ") and reason in str(told.value)


def ask(*args):
    return CliRunner().invoke(app, ["workload", *map(str, args)])


def test_the_command_writes_a_workload_that_loads(tmp_path):
    folder = tmp_path / "Llama-3-8B"
    folder.mkdir()
    config = folder / "config.json"
    config.write_text(json.dumps(MISTRAL))
    output = tmp_path / "llama.yaml"
    told = ["--decode-batch", 2, "--decode-batch", 3, "--decode-keys", 777, "--page-size", 0]
    result = ask(config, "-o", output, *told, "--prefill-tokens", 64, "--tensor-parallel", 2)
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", "")
    workload = load_workload(output)
    assert workload.name == "Llama-3-8B"
    found = [(p.op, p.batch, p.seqlen_k, p.page_size) for p, _ in workload.problems]
    assert found[2:] == [("decode", 2, 777, 0), ("decode", 3, 777, 0)]
    assert ask(config, *told, "--prefill-tokens", 64, "--tensor-parallel", 2).stdout == (
        output.read_text()
    )
    config.write_text(json.dumps(MISTRAL | {"torch_dtype": None}))
    assert "it does not say its dtype" in ask(config).stderr


def test_what_cannot_be_read_or_written_is_one_line(tmp_path):
    def refusal(*args):
        return str(ask(*args).exception)

    none, text, array = (tmp_path / name for name in ("none.json", "text.json", "array.json"))
    text.write_text("model_type: llama")
    array.write_text("[]")
    assert refusal(none) == f"{none}: No such file or directory"
    assert refusal(text).startswith("text.json: not JSON: ")
    assert refusal(array) == "array.json: is no object of a model's config"
    array.write_text(json.dumps(LLAMA))
    nowhere = tmp_path / "no" / "w.yaml"
    assert refusal(array, "-o", nowhere) == f"cannot write {nowhere}: No such file or directory"
    assert ask(array, "--page-size", -1).exit_code == 2
