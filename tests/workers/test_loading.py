"""A base model in memory: equal to the stock one, frozen, and honest about itself."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from openrl.scheduler.models import describe
from openrl.tasks.errors import InvalidRequest
from openrl.workers.model.attention import hidden_states, packed, positions
from openrl.workers.model.families import FAMILIES, max_context
from openrl.workers.model.loading import load
from openrl.workers.model.logprobs import head_logits
from tests.tiny import make_tiny_model

OTHERS = {
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "mistral": {"sliding_window": 20},
    "qwen2": {},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2},
    "smollm3": {"no_rope_layers": [1, 0]},
}


@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_forward_equals_the_stock_model_on_each_sequence_alone(tmp_path, model_type, tied):
    make_tiny_model(tmp_path, tied=tied, model_type=model_type)

    assert_packed_equals_stock(tmp_path)
    assert load(tmp_path).tied_embeddings is tied


@pytest.mark.parametrize("model_type", sorted(OTHERS))
def test_every_family_that_is_named_equals_its_stock_model(tmp_path, model_type):
    small = json.loads((make_tiny_model(tmp_path / "llama") / "config.json").read_text())
    for key in ("architectures", "model_type", "head_dim", "attention_bias"):
        small.pop(key)
    config = AutoConfig.for_model(model_type, **small, **OTHERS[model_type], initializer_range=0.1)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other")

    assert_packed_equals_stock(tmp_path / "other")


def test_a_context_is_longer_than_the_sliding_window_and_the_registry_says_the_same(tmp_path):
    config = json.loads((make_tiny_model(tmp_path) / "config.json").read_text())
    config |= {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert load(tmp_path).max_context == describe("m", tmp_path).max_context == 512


@pytest.mark.parametrize("model_type", sorted(FAMILIES))
def test_what_a_family_leaves_unsaid_is_read_as_the_stock_config_reads_it(model_type):
    for said in ({}, {"use_sliding_window": True, "max_window_layers": 0}):
        stock = AutoConfig.for_model(model_type, max_position_embeddings=8192, **said).to_dict()

        assert max_context({"model_type": model_type, "max_position_embeddings": 8192, **said}) == max_context(stock)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_neighbours_in_a_pack_are_refused(tmp_path, kind):
    config = json.loads((make_tiny_model(tmp_path) / "config.json").read_text())
    factors = {"factor": 2.0, "long_factor": [1.0] * 8, "short_factor": [1.0] * 8}
    config["rope_parameters"] |= {"rope_type": kind, "original_max_position_embeddings": 256, **factors}
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(InvalidRequest, match=f"'{kind}'"):
        load(tmp_path)


def test_a_base_is_frozen_and_knows_its_shape(tmp_path):
    loaded = load(make_tiny_model(tmp_path))

    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert not loaded.model.training
    assert (loaded.vocab_size, loaded.max_context, loaded.num_layers, loaded.hidden_size) == (260, 512, 2, 64)
    assert loaded.eos_token_ids == (258,)
    assert loaded.dtype == torch.float32
    assert loaded.shapes["model.layers.1.mlp.down_proj"] == (128, 64)


def test_the_flags_select_their_modules_and_no_others(tmp_path):
    loaded = load(make_tiny_model(tmp_path))

    leaves = {
        flags: {name.rsplit(".", 1)[-1] for name in loaded.targets(*flags)}
        for flags in [(True, False, False), (False, True, False), (False, False, True), (False, False, False)]
    }

    assert leaves[True, False, False] == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert leaves[False, True, False] == {"gate_proj", "up_proj", "down_proj"}
    assert loaded.targets(False, False, True) == ("lm_head",)
    assert loaded.targets(False, False, False) == ()
    assert len(loaded.targets(True, True, True)) == 2 * 7 + 1


def test_an_unknown_model_type_is_refused_naming_those_supported(tmp_path):
    AutoConfig.for_model("gpt2").save_pretrained(tmp_path)

    with pytest.raises(InvalidRequest, match=r"'gpt2'.*llama, mistral, qwen2, qwen3, qwen3_moe"):
        load(tmp_path)


def test_a_directory_without_a_model_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match=r"config\.json"):
        load(tmp_path)


def test_the_tiny_model_has_the_same_bits_twice_and_a_byte_tokenizer(tmp_path):
    first, second = make_tiny_model(tmp_path / "a"), make_tiny_model(tmp_path / "b")
    tokenizer = AutoTokenizer.from_pretrained(first)

    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    text = "caf\u00e9 \u4f60\n"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 257, 258)


def assert_packed_equals_stock(path):
    loaded, stock = load(path), AutoModelForCausalLM.from_pretrained(path)
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(0, 256, (length,), generator=generator) for length in (5, 90, 1, 33)]
    lengths = [len(sequence) for sequence in sequences]

    with torch.no_grad(), packed(lengths):
        hidden_TD = hidden_states(loaded, torch.cat(sequences), positions(lengths))
    logits_TV = head_logits(loaded, hidden_TD)

    with torch.no_grad():
        expected_TV = torch.cat([stock(sequence[None]).logits[0] for sequence in sequences])
    torch.testing.assert_close(logits_TV, expected_TV, atol=1e-5, rtol=1e-5)
