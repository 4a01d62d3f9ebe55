"""The sampler as its process builds it: a tiny model, versions on disk, a real store."""

import time
from pathlib import Path

import pytest
import torch

from openrl.tasks.errors import InvalidRequest
from openrl.tasks.futures import Futures
from openrl.tasks.journal import Journal
from openrl.tasks.messages import Sample
from openrl.tasks.registry import BaseModel, Registry
from openrl.tasks.wire import codec
from openrl.workers.model.loading import load
from openrl.workers.sampler.__main__ import build
from openrl.workers.sampler.settings import SamplerSettings
from openrl.workers.sampler.tokenizer import tokenizer_of
from openrl.workers.weights import layout, manifest
from openrl.workers.weights.adapter import Adapter, save_adapter
from tests.tiny import make_tiny_model

torch.set_num_threads(1)


@pytest.fixture
def model(tmp_path, store) -> BaseModel:
    path = make_tiny_model(tmp_path / "model")
    row = BaseModel(
        name="Tiny", slug="tiny", path=str(path), vocab_size=260, max_context=512, arch="llama", tokenizer_id="Tiny",
        hidden_size=64, num_layers=2, tied_embeddings=True,
    )  # fmt: skip
    Registry(store).add_model(row)
    return row


@pytest.fixture
def draw(store, model):
    """Sample through the engine; returns the ended promise."""
    engine = build("Tiny", "sampler-1", store, SamplerSettings(slots=4, poll_s=0.05))
    engine.start()
    session = Registry(store).create_session("local")
    sampler = Registry(store).create_sampler(
        "local", session_id=session.session_id, seq=0, base_model="Tiny", slug=engine.slug
    )
    numbers = iter(range(100))

    def once(**fields):
        message = Sample(**({"adapter_dir": "", "prompt": tuple(b"hello"), "num_samples": 1, "max_tokens": 6} | fields))
        request_id = Journal(store).submit_sample("local", sampler, next(numbers), message).request_id
        deadline = time.monotonic() + 60
        while (future := Futures(store).get("local", request_id)).state == "pending":
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return future

    yield once
    engine.release_waiters()
    engine.stop()


def write_version(data_dir: Path, base: BaseModel, name: str) -> str:
    loaded = load(base.path)
    adapter = Adapter.init(loaded, rank=4, seed=3)
    with torch.no_grad():
        for _, b_OR in adapter.weights.values():
            b_OR.normal_(0, 0.2, generator=torch.Generator().manual_seed(1))
    relative = layout.sampler_dir("local", "s-1:train:0", name, 1)
    staged = layout.staging(data_dir / relative)
    save_adapter(staged, adapter, "Tiny")
    facts = manifest.Manifest(
        kind="sampler", base_model="Tiny", rank=4, alpha=32.0, targets=adapter.targets,
        train_attn=True, train_mlp=True, train_unembed=True, step=1,
    )  # fmt: skip
    manifest.write(staged, facts)
    layout.publish(staged, data_dir / relative)
    return relative


def test_a_version_on_disk_draws_other_tokens_than_the_base_and_the_same_ones_again(store, model, draw):
    version = write_version(store.settings.data_dir, model, "v1")
    base, first, again = (draw(adapter_dir=name, temperature=0.0) for name in ("", version, version))
    assert (base.state, first.state) == ("done", "done"), first.error
    assert first.result != base.result
    assert again.result == first.result


def test_a_damaged_or_missing_version_fails_its_request_naming_the_cause(store, model, draw):
    version = write_version(store.settings.data_dir, model, "v2")
    weights = store.settings.data_dir / version / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    damaged, missing = draw(adapter_dir=version), draw(adapter_dir=version + "0")
    assert (damaged.state, damaged.category) == ("failed", "server")
    assert "v2' can't be loaded" in damaged.error
    assert (missing.state, missing.category) == ("failed", "user") and "no longer on disk" in missing.error
    assert draw().state == "done"


def test_a_stop_string_is_found_by_the_models_own_tokenizer(model, draw):
    def one(**stop):
        future = draw(seed=4, max_tokens=40, stop_at_eos=False, **stop)
        return codec.sample_response_to_json(future.result)["sequences"][0]

    free = one()["tokens"]
    text = tokenizer_of(model.path)(free)
    pair = next(text[i : i + 2] for i in range(4, 60) if text[i : i + 2].isascii() and text[i : i + 2].isprintable())
    stopped = one(stop_strings=(pair,))
    assert stopped["stop_reason"] == "stop"
    assert stopped["tokens"] == free[: len(stopped["tokens"])]
    assert tokenizer_of(model.path)(stopped["tokens"]).endswith(pair)


def test_special_tokens_are_text_and_a_model_without_tokenizer_is_the_callers_mistake(model, tmp_path):
    assert tokenizer_of(model.path)([104, 105, 258]) == "hi<eos>"
    with pytest.raises(InvalidRequest, match="stop tokens"):
        tokenizer_of(str(tmp_path))([1])
