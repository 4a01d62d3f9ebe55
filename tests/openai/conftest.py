"""The API on a port of its own, a real sampler beside it in this process, and OpenAI's own client."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from werkzeug.serving import make_server

from openrl.app.context import EXTENSION, Services
from openrl.app.factory import create_app
from openrl.app.settings import AppSettings
from openrl.scheduler.models import describe
from openrl.tasks import keys
from openrl.tasks.celery import celery
from openrl.tasks.records import BaseModel, Checkpoint, checkpoint_row
from openrl.tasks.registry import Registry
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store
from openrl.tasks.tenants import Tenants
from openrl.workers.model.loading import load
from openrl.workers.sampler.__main__ import build
from openrl.workers.sampler.settings import SamplerSettings
from openrl.workers.weights import layout, manifest
from openrl.workers.weights.adapter import Adapter, save_adapter
from tests.tiny import make_tiny_model

NAME = "tiny/llama"
RUN = "s-1:train:0"

TEMPLATE = """{{ bos_token }}{% for message in messages %}
    {% if message.role not in ('system', 'user', 'assistant') %}
        {{ raise_exception('no such role: ' + message.role) }}
    {% endif %}
{{ message.role }}: {% generation %}{{ message.content | trim }}{% endgeneration %}<eos>
{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"""

MESSAGES: list[Any] = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": [{"type": "text", "text": "  hello"}, {"type": "text", "text": " there<eos>"}]},
]
PLAIN = [MESSAGES[0], {"role": "user", "content": "  hello there<eos>"}]
"""The same conversation, its text in parts and as a whole."""


@dataclass
class Service:
    """One API, and one of its tenants; `client` is OpenAI's."""

    store: Store
    url: str
    model: BaseModel
    services: Services
    tenant: str = "local"
    clients: list[openai.OpenAI] = field(default_factory=list)

    def client(self, key: str = "") -> openai.OpenAI:
        """Return a client of the tenant, or of whoever has the key."""
        if not key:
            key = "tml-none" if self.tenant == "local" else Tenants(self.store).create_key(self.tenant)
        made = openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=30)
        self.clients.append(made)
        return made

    def save(self, name: str, *, seed: int = 1, token: int = 1) -> str:
        """Save weights for sampling as a trainer does; return their address."""
        directory = write_version(self.store.settings.data_dir, self.model, name, seed, token, self.tenant)
        checkpoint = Checkpoint(
            run_id=RUN, checkpoint_id=f"sampler_weights/{name}", kind="sampler", directory=directory, size_bytes=10,
            created=1_700_000_000.0, base_model=NAME, rank=4, train_attn=True, train_mlp=True, train_unembed=True,
            step=1, has_optimizer=False,
        )  # fmt: skip
        row = checkpoint_row(self.tenant, checkpoint)
        self.store.redis.hset(row.key, row.field, row.value)
        self.store.redis.zadd(keys.runs(self.tenant), {RUN: 1.0})
        return checkpoint.uri

    def close(self) -> None:
        for client in self.clients:
            client.close()

    @property
    def unfinished(self) -> list[str]:
        """Return the requests that nobody has finished."""
        return [member.decode() for member in self.store.redis.zrange(keys.unfinished(self.model.slug), 0, -1)]


def write_version(data_dir: Path, base: BaseModel, name: str, seed: int, token: int, tenant: str) -> str:
    loaded = load(base.path)
    adapter = Adapter.init(loaded, rank=4, seed=3)
    with torch.no_grad():
        for _, b_OR in adapter.weights.values():
            b_OR.normal_(0, 0.2, generator=torch.Generator().manual_seed(seed))
    relative = layout.sampler_dir(tenant, RUN, name, token)
    staged = layout.staging(data_dir / relative)
    save_adapter(staged, adapter, base.name)
    facts = manifest.Manifest(
        kind="sampler", base_model=base.name, rank=4, alpha=32.0, targets=adapter.targets,
        train_attn=True, train_mlp=True, train_unembed=True, step=1,
    )  # fmt: skip
    manifest.write(staged, facts)
    layout.publish(staged, data_dir / relative)
    return relative


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a chat template."""
    directory = make_tiny_model(tmp_path_factory.mktemp("models") / "llama")
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return directory


@contextmanager
def served(store: Store, model_dir: Path) -> Iterator[Service]:
    """Serve the API on a free port."""
    celery.conf.broker_url = store.settings.broker_url
    model = describe(NAME, model_dir)
    Registry(store).add_model(model)
    app = create_app(AppSettings(completion_timeout_s=20.0), store=store)
    server = make_server("127.0.0.1", 0, app, threaded=True)
    serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    serving.start()
    try:
        yield Service(store, f"http://127.0.0.1:{server.port}", model, app.extensions[EXTENSION])
    finally:
        server.shutdown()
        serving.join()
        server.server_close()
        app.extensions[EXTENSION].close()


@pytest.fixture
def api(store: Store, model_dir: Path) -> Iterator[Service]:
    """The API alone, on a store of the test's own: nobody draws."""
    with served(store, model_dir) as service:
        yield service
        service.close()


@pytest.fixture(scope="module")
def running(store_url: str, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The API and a sampler that draws, for all tests of a module; none of these may ask for `store`."""
    store = Store.connect(StoreSettings(redis_url=store_url, data_dir=tmp_path_factory.mktemp("data")))
    store.redis.flushall()
    with served(store, model_dir) as service:
        engine = build(NAME, "sampler-1", store, SamplerSettings(slots=16, poll_s=0.05))
        engine.start()
        yield service
        engine.release_waiters()
        engine.stop()
    store.close()


@pytest.fixture
def service(running: Service) -> Iterator[Service]:
    """A tenant of the running service that nobody was before."""
    mine = replace(running, tenant=f"t-{secrets.token_hex(4)}", clients=[])
    yield mine
    mine.close()


@pytest.fixture
def client(service: Service) -> openai.OpenAI:
    return service.client()
