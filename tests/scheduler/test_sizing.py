"""Sizes from a config.json alone agree with torch's own counts, published models, and what training holds at most."""

from __future__ import annotations

import json
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

from openrl.scheduler import sizing
from openrl.scheduler.shape import Shape
from openrl.scheduler.sizes import in_words
from openrl.tasks.errors import InvalidRequest
from openrl.workers.model import recomputing
from openrl.workers.model.attention import hidden_states, packed, positions
from openrl.workers.model.loading import load
from openrl.workers.model.lora import Segment, routing
from openrl.workers.trainer.residency import STATE
from tests.model_families.zoo import SMALL, ZOO, make_model
from tests.trainer.bench import Bench

QWEN3_06B = {
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128,
    "num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
}  # fmt: skip
QWEN3_8B = QWEN3_06B | {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
    "tie_word_embeddings": False,
}  # fmt: skip
LLAMA31_8B = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False,
    "max_position_embeddings": 131072,
}  # fmt: skip
GIB = 1 << 30


def config_of(said: dict):
    said = dict(said)
    return AutoConfig.for_model(said.pop("model_type"), **said)


def count(said: dict) -> int:
    """Return torch's own count, of a model that has shapes and no values."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config_of(said))
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", ZOO)
def test_parameters_are_as_many_as_torch_counts_in_every_family(name):
    said = SMALL | ZOO[name]
    assert Shape.of(json.loads(config_of(said).to_json_string())).parameters == count(said)


@pytest.mark.parametrize(("said", "known"), [
    (QWEN3_06B, 596_049_920), (QWEN3_8B, 8_190_735_360), (LLAMA31_8B, 8_030_261_248),
])  # fmt: skip
def test_parameters_of_published_models_are_those_that_their_authors_state(said, known):
    assert Shape.of(said).parameters == known == count(said)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers for an attribute under its old name
def test_an_adapter_has_as_many_values_as_peft_gives_it():
    peft = pytest.importorskip("peft")
    said = SMALL | ZOO["llama3"]
    model = AutoModelForCausalLM.from_config(config_of(said))
    targets = [*"q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split(), "lm_head"]
    tuned = peft.get_peft_model(model, peft.LoraConfig(r=5, target_modules=targets))
    trained = sum(parameter.numel() for parameter in tuned.parameters() if parameter.requires_grad)
    assert Shape.of(said).adapter_parameters(5) == trained


def test_the_constants_are_those_of_the_workers():
    assert (sizing.STATE, sizing.KEPT_OVER_LINEARS) == (STATE, recomputing.KEPT_OVER_LINEARS)


def test_a_full_trainer_of_seven_billion_parameters_parks_fourteen_bytes_for_each_and_its_gradient():
    size = sizing.full_trainer(Shape.of(QWEN3_8B), dtype="bfloat16", token_budget=8192)
    parked = size.host_bytes - sizing.PROCESS_BYTES
    assert parked == (14 + 4) * 8_190_735_360
    assert size.device_bytes > parked, "activations come on top"


def test_a_trainer_of_adapters_says_how_many_runs_it_has_room_for():
    size = sizing.lora_trainer(
        Shape.of(QWEN3_8B), dtype="bfloat16", rank=32, token_budget=16384, runs=1, on_bytes=80 * GIB
    )
    one = 4 * 4 * Shape.of(QWEN3_8B).adapter_parameters(32)
    others = size.device_bytes - one
    assert size.runs == (80 * GIB - others) // one > 10
    assert sizing.lora_trainer(
        Shape.of(QWEN3_8B), dtype="bfloat16", rank=32, token_budget=16384, on_bytes=8 * GIB
    ).runs == 0  # fmt: skip


def test_the_cache_of_a_sampler_is_what_its_layers_keep_for_each_position():
    size = sizing.sampler(Shape.of(LLAMA31_8B), dtype="bfloat16", kv_tokens=65536)
    assert size.device[1].size_bytes == 65536 * 2 * 32 * 8 * 128 * 2 == 8 * GIB


def test_a_size_says_in_words_how_it_comes_about():
    words = sizing.sampler(Shape.of(QWEN3_06B), dtype="bfloat16", kv_tokens=4096).words
    assert words.startswith(
        "accelerator 2.17 GiB = weights (596M x 2 bytes) 1.11 GiB + cache of 4096 positions (112 KiB"
    )
    assert [in_words(size) for size in (0, 1023, 1 << 20, 1500 << 20, 1 << 40)] == [
        "0 bytes", "1023 bytes", "1 MiB", "1.46 GiB", "1 TiB",
    ]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [("hidden_size", None), ("num_hidden_layers", 0), ("vocab_size", "many")])
def test_a_config_that_lacks_what_sizes_follow_from_is_refused_by_the_fields_name(field, value):
    with pytest.raises(InvalidRequest, match=field):
        Shape.of(QWEN3_06B | {field: value})


def test_a_family_that_is_not_served_has_no_size():
    with pytest.raises(InvalidRequest, match="bert"):
        Shape.of({"model_type": "bert"})


class Peak(TorchDispatchMode):
    """The most bytes that tensors made within had at once, each storage counted once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if torch.is_tensor(leaf) and leaf.untyped_storage()._cdata not in self.known | given:
                self._count(leaf.untyped_storage())
        return made

    def _count(self, storage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self.known.add(key)
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key, size) -> None:
        self.known.discard(key)
        self.now -= size


@pytest.mark.parametrize("name", ["qwen3", "llama3", "gemma3"])
def test_activations_are_about_what_a_pass_has_at_its_peak(name, tmp_path):
    torch.set_num_threads(1)
    loaded = load(make_model(tmp_path, name), device="cpu", dtype=torch.float32)
    adapter = Bench(loaded, tmp_path).run(0, rank=1, train_unembed=False).weights()
    num = 512
    tokens, lengths = torch.arange(num) % 256, [64] * (num // 64)
    with Peak() as peak, packed(lengths), routing([Segment(0, num, adapter)]), recomputing.recomputed():
        hidden_states(loaded, tokens, positions(lengths)).sum().backward()
    shape = Shape.of(json.loads((tmp_path / "config.json").read_text()))
    estimate = sizing.activations(shape, 4, num) - sizing.LOGITS_BYTES
    print(name, peak.most / estimate)
    assert 0.5 < peak.most / estimate < 1.25
