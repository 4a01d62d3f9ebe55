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
from openrl.scheduler.needs import Budget, Needs
from openrl.scheduler.resources import Pool
from openrl.scheduler.shape import Shape
from openrl.scheduler.sizes import in_words
from openrl.tasks import keys
from openrl.tasks.errors import InvalidRequest
from openrl.tasks.messages import CreateModel, LoadWeights, OptimStep, SaveWeights, SaveWeightsForSampler
from openrl.tasks.registry import BaseModel
from openrl.workers.model import recomputing
from openrl.workers.model.attention import hidden_states, packed, positions
from openrl.workers.model.loading import load
from openrl.workers.model.lora import Segment, routing
from openrl.workers.trainer import optimizer
from openrl.workers.trainer.full import FullTuning
from openrl.workers.trainer.residency import STATE
from openrl.workers.trainer.runs import Run
from tests.model_families.zoo import SMALL, ZOO, make_model
from tests.trainer.bench import BASE, Bench, forward_backward

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


def test_a_full_trainer_of_eight_billion_parameters_is_sized_as_its_settings_say():
    num = 8_190_735_360

    def each(**environ: str) -> tuple[int, int]:
        budget = Budget.from_env({f"OPENRL_TRAINER_{name}": value for name, value in environ.items()})
        size = sizing.full_trainer(Shape.of(QWEN3_8B), dtype=budget.dtype, token_budget=budget.token_budget,
                                   compute_dtype=budget.compute_dtype, offloads=budget.offloads)  # fmt: skip
        return sum(part.size_bytes for part in size.device[:-2]) // num, (size.host_bytes - GIB) // num

    assert each() == each(COMPUTE_DTYPE="auto", MOMENTS="device") == (28, 34)
    assert each(COMPUTE_DTYPE="float32") == (28, 36)
    assert each(MOMENTS="host") == (20, 34)


@pytest.mark.parametrize("name", ["COMPUTE_DTYPE", "MOMENTS"])
def test_a_setting_of_full_trainers_that_makes_no_sense_is_refused_by_its_name(name):
    with pytest.raises(ValueError, match=f"OPENRL_TRAINER_{name}='int4' must be one of"):
        Budget.from_env({f"OPENRL_TRAINER_{name}": "int4"})


def test_a_trainer_of_adapters_says_how_many_runs_it_has_room_for():
    size = sizing.lora_trainer(Shape.of(QWEN3_8B), dtype="bfloat16", rank=32, token_budget=16384, on_bytes=80 * GIB)
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


def test_a_vllm_takes_its_device_alone_and_is_sized_by_what_it_starts_on(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_8B))
    model = BaseModel(name="m", slug="m", path=str(tmp_path), vocab_size=8, max_context=40960, arch="qwen3",
                      tokenizer_id="m", hidden_size=8, num_layers=1, tied_embeddings=False)  # fmt: skip
    own, full = (Pool(slug=slug, kind="sampler", base="m") for slug in ("m", keys.pool_slug("m", "ann", "run")))

    def needs(**environ: str):
        return Needs(Budget.from_env(environ)).of([own, full], [model], {full.slug: "ann"})

    on_vllm = {"OPENRL_SAMPLER_ENGINE": "vllm", "OPENRL_SAMPLER_KV_TOKENS": str(1 << 22)}
    assert [each.exclusive for each in needs().values()] == [False, False]
    assert [each.exclusive for each in needs(**on_vllm).values()] == [True, False]
    both = needs(**on_vllm, OPENRL_SAMPLER_FULL_ENGINE="vllm")
    assert [each.exclusive for each in both.values()] == [True, True]
    weights, cache = 2 * 8_190_735_360, 40960 * 144 * 1024
    assert both[full].device_bytes == pytest.approx((weights + cache + sizing.CONTEXT_BYTES) / 0.9, rel=1e-6)
    assert both[full].host_bytes == sizing.VLLM_PROCESS_BYTES, "it is never parked"
    asleep = needs(**on_vllm, OPENRL_SAMPLER_FULL_ENGINE="vllm", OPENRL_SAMPLER_BETWEEN_TURNS="sleeps")[full]
    assert not asleep.exclusive and asleep.device_bytes == both[full].device_bytes
    assert asleep.host_bytes == sizing.VLLM_PROCESS_BYTES + weights
    shared = needs(**on_vllm, OPENRL_ACCELERATORS="1")
    assert not shared[own].exclusive, "a machine's one device is for the trainer too"
    with pytest.raises(ValueError, match="OPENRL_SAMPLER_GPU_MEMORY_UTILIZATION='2' must be above 0"):
        needs(OPENRL_SAMPLER_GPU_MEMORY_UTILIZATION="2")


def test_llama_of_eight_billion_parameters_starts_to_train_on_24_gib():
    size = sizing.lora_trainer(Shape.of(LLAMA31_8B), dtype="bfloat16", rank=32, token_budget=16384, parked_runs=8)
    one = 16 * Shape.of(LLAMA31_8B).adapter_parameters(32)
    assert size.device[1].size_bytes == one and size.host[1].size_bytes == 8 * one


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_full_trainer_takes_what_a_run_has_at_its_peak(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(optimizer, "PIECE", 1024)  # real models have more values than that
    torch.set_num_threads(1)
    loaded = load(make_model(tmp_path, "qwen3"), device="cpu", dtype=getattr(torch, dtype))
    bench = Bench(loaded, tmp_path, full=FullTuning(publishes=getattr(torch, dtype)), token_budget=8)
    run = Run(tenant="t", run_id="s-0:train:0", token=1)
    shape = Shape.of(json.loads((tmp_path / "config.json").read_text()))
    size = sizing.full_trainer(shape, dtype=dtype, token_budget=8)

    def did(message):
        outcome = bench.one(run, message)
        assert outcome.error is None, outcome.error
        return outcome

    with Peak() as peak:
        did(CreateModel(base_model=BASE, rank=0, seed=1, fine_tuning="full"))
        for number in range(4):  # two passes of two micro-batches in each step
            did(forward_backward(lengths=[6, 6], seed=number))
            if number == 1:
                did(OptimStep(learning_rate=1e-3))
        model = sum(parameter.nbytes for parameter in loaded.model.parameters())
        device = (peak.most + model) / sum(part.size_bytes for part in size.device[:-2])
        did(OptimStep(learning_rate=1e-3))
        saved = did(SaveWeights(name="a"))
        before = peak.now
        did(SaveWeightsForSampler(name="a"))
        compared = (peak.now - before) / size.host[-3].size_bytes
        peak.most = peak.now
        did(LoadWeights(checkpoint_path="x", checkpoint_dir=json.loads(saved.rows[0].value)["directory"],
                        with_optimizer=True))  # fmt: skip
        on_its_way = (peak.most - peak.now) / size.host[-2].size_bytes
    print(dtype, device, compared, on_its_way)
    assert 0.99 < device < 1.01
    assert 0.99 < compared < 1.1
    assert 0.99 < on_its_way < 1.1
