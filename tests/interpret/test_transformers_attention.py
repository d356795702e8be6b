"""register_attention(): models of transformers choose the tokens of eager attention.

Skipped where transformers is not installed.
"""

import importlib.util
import sys

import pytest
import torch

from autoflash.export import export
from autoflash.store import shipped_winners

transformers = pytest.importorskip("transformers")

NAME = "a_module"
SMALL = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def imported(path, name):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "attention_dispatch.py"
    path.write_text(export(shipped_winners()).text)
    module = imported(path, "transformers_dispatch")
    module.register_attention(NAME)
    return module


def model_of(kind, **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL, **more)
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def tokens(model, name, cache, prompt):
    model.set_attn_implementation(name)
    wanted = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    return model.generate(prompt, cache_implementation=cache, **wanted)[:, prompt.shape[1] :]


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    "model",
    [
        ("Llama", {}),
        (
            "Gemma2",
            {"sliding_window": 7, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 9},
        ),
        ("Mistral", {"sliding_window": 7}),
    ],
    ids=lambda model: model[0],
)
def test_a_model_chooses_the_tokens_it_chooses_with_eager_attention(module, model, cache):
    kind, more = model
    model = model_of(kind, **more)
    prompt = torch.randint(1, 97, (2, 20))
    expected = tokens(model, "eager", cache, prompt)
    before = sum(module.coverage().values())
    assert torch.equal(tokens(model, NAME, cache, prompt), expected)
    assert sum(module.coverage().values()) == before + 2 * 3  # layers, steps


def test_the_comparison_would_see_an_attention_that_is_wrong(module, monkeypatch):
    model = model_of("Llama")
    prompt = torch.randint(1, 97, (2, 20))
    expected = tokens(model, "eager", "dynamic", prompt)
    monkeypatch.setattr(module, "prefill", lambda q, *_, **__: torch.zeros_like(q))
    assert not torch.equal(tokens(model, NAME, "dynamic", prompt), expected)


def test_a_padded_batch_is_refused(module):
    model = model_of("Llama")
    model.set_attn_implementation(NAME)
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])
    with pytest.raises(ValueError, match="padded batches are not supported"):
        model(torch.ones(2, 3, dtype=torch.long), attention_mask=mask)


def test_a_name_that_transformers_takes_for_its_own_is_refused(module):
    with pytest.raises(module.ProblemError, match="name 'autoflash' has 'flash' in it"):
        module.register_attention("autoflash")


def test_what_a_static_cache_holds_is_asked_of_the_device_once_a_step(module):
    lengths = module.lengths_for_mask(2, 20, 64, q_offset=torch.tensor(3))
    layer, (q, k) = torch.nn.Module(), (torch.randn(2, 4, 20, 16), torch.randn(2, 2, 64, 16))
    first, _ = module.attend_layer(layer, q, k, k, lengths)
    lengths.zero_()  # as if it said no more
    assert torch.equal(module.attend_layer(layer, q, k, k, lengths)[0], first)


@pytest.mark.parametrize("queries", [1, 20])
def test_a_layers_next_product_finds_the_result_as_it_reads_it(module, queries):
    layer, cache = torch.nn.Module(), torch.randn(2, 2, 64, 16)
    q = torch.randn(2, queries, 4, 16).transpose(1, 2)  # as projections leave it
    lengths = module.lengths_for_mask(2, queries, 64, q_offset=3)
    result, _ = module.attend_layer(layer, q, cache, cache, lengths)
    assert result.shape == (2, queries, 4, 16) and result.is_contiguous()
