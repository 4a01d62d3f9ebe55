"""What a request can reach: the services of this process, and the tenant who asks.

Built once in `openrl.app.factory`; views take from here what they need and hold nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from flask import current_app, g

from openrl.app.delivered import Delivered
from openrl.app.expected import Expected
from openrl.app.greenlets import Budget, beside, off_loop
from openrl.app.openai.tokenizer import Tokenizers
from openrl.app.polls import Polls
from openrl.app.recent import Recent
from openrl.app.settings import AppSettings
from openrl.app.tokens import Tokens
from openrl.tasks.cancelling import Cancelling
from openrl.tasks.deliveries import Deliveries
from openrl.tasks.doorbell import Doorbell
from openrl.tasks.drafts import Listener
from openrl.tasks.errors import InvalidRequest, NotFound, NotServed
from openrl.tasks.futures import Completions, Futures
from openrl.tasks.journal import Journal
from openrl.tasks.quotas import Quotas
from openrl.tasks.registry import BaseModel, Checkpoint, Registry, Run, Sampler
from openrl.tasks.signing import Signer
from openrl.tasks.store import Store
from openrl.tasks.tenants import ApiKey, Tenants
from openrl.tasks.timeline import Timeline

EXTENSION = "openrl"

LOOK_S = 1.0
"""How old what a poll says about its worker may be; little beside the time that it is held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Services:
    """Everything behind the API, one of each a process."""

    settings: AppSettings
    store: Store
    registry: Registry
    journal: Journal
    futures: Futures
    delivered: Delivered
    deliveries: Deliveries
    cancelling: Cancelling
    completions: Completions
    listener: Listener
    tokenizers: Tokenizers
    polls: Polls
    expected: Expected
    timeline: Timeline
    queue_states: Recent[tuple[str, str | None]]
    known_keys: Recent[tuple[ApiKey | None, bool]]
    known_runs: Recent[Run]
    known_samplers: Recent[Sampler]
    known_models: Recent[BaseModel]
    tenants: Tenants
    signer: Signer
    tokens: Tokens
    quotas: Quotas
    doorbell: Doorbell
    bodies: Budget

    @classmethod
    def on(cls, store: Store, settings: AppSettings) -> Services:
        """Build the services on a connected store."""
        apart, signer = partial(off_loop, large=True), Signer(store)
        futures, deliveries = Futures(store, apart=apart), Deliveries(store, apart=apart)
        completions = Completions(store)
        expected = Expected(completions)
        return cls(
            settings=settings,
            store=store,
            registry=Registry(store),
            journal=Journal(store, apart=apart),
            futures=futures,
            delivered=Delivered(futures),
            deliveries=deliveries,
            cancelling=Cancelling(store),
            completions=completions,
            listener=Listener(store),
            tokenizers=Tokenizers(),
            polls=Polls(
                futures, deliveries, completions, expected, min_s=settings.poll_min_s, max_s=settings.poll_max_s
            ),
            expected=expected,
            queue_states=Recent(min(LOOK_S, settings.poll_min_s / 10)),
            known_keys=Recent(settings.remember_s),
            known_runs=Recent(settings.remember_s),
            known_samplers=Recent(settings.remember_s),
            known_models=Recent(settings.remember_s),
            timeline=Timeline(store),
            tenants=Tenants(store),
            signer=signer,
            tokens=Tokens(signer, ttl_s=settings.auth_token_ttl_s),
            quotas=Quotas(store),
            doorbell=Doorbell(store),
            bodies=Budget(settings.max_held_bytes),
        )

    def ring(self, kind: str, slug: str, tenant: str, request_id: str, *, posted: bool = False) -> None:
        """Ring for a journaled operation; a broker that is slow or gone doesn't hold up the answer.

        `posted`: its task was laid into its queue along with it.
        """
        if not (posted and self.doorbell.knows(kind, slug, tenant)):
            beside(partial(self.doorbell.ring, posted=posted), kind, slug, tenant, request_id)

    def close(self) -> None:
        """End what runs in the background."""
        self.polls.close()
        self.delivered.write()
        self.listener.close()


def services() -> Services:
    """Return the services of this process."""
    found = current_app.extensions[EXTENSION]
    assert isinstance(found, Services)
    return found


def registry() -> Registry:
    """Return the registry of sessions, runs, samplers and checkpoints."""
    return services().registry


def tenant() -> str:
    """Return the tenant who asks; `openrl.app.auth` has set it before any view runs."""
    return str(g.tenant)


def model_of(thing: Run | Sampler) -> BaseModel:
    """Return the base model of a run or a sampler.

    Raises:
        NotServed: the service was started without it. Nothing that waits for it is lost, nor may be used up.
    """
    try:
        model = services().known_models.get(thing.base_model, lambda: registry().model(thing.base_model))
    except NotFound as missing:
        raise NotServed(
            f"{missing}; this was made on it and waits unchanged until an operator starts the service with "
            f"--model {thing.base_model} again, and the same request is sent again"
        ) from missing
    if model.is_other(thing.base_digest):
        raise NotServed(
            f"other weights are served as {model.name} than those that this was made on; it waits unchanged until an "
            "operator starts the service with the old ones again"
        )
    return model


def base_model(name: str, *, field: str = "base_model") -> BaseModel:
    """Return the served base model that a request names. A suffix after a colon is the client's own.

    Raises:
        InvalidRequest: it isn't served; names those that are.
    """
    try:
        return registry().model(name.partition(":")[0])
    except NotFound as unknown:
        raise InvalidRequest(f"{field}: {unknown}") from unknown


def check_base(checkpoint: Checkpoint, *, field: str) -> None:
    """Refuse a checkpoint that was made on other weights than those that its base model's name means now."""
    model = base_model(checkpoint.base_model, field=field)
    if model.is_other(checkpoint.base_digest):
        raise InvalidRequest(
            f"{field}: {checkpoint.uri} was made on other weights than those that are served as {model.name} now"
        )
