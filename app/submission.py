"""Operations on a run, from a view to the journal: accepted, or refused under their own key.

The SDK goes on with the next `seq_id` after a refusal, so a refused operation uses up its own; otherwise
the run would wait for it. Knows no operation in particular.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, wraps
from typing import ParamSpec, TypeVar

from openrl.app import wire
from openrl.app.context import model_of, registry, services, tenant
from openrl.tasks import keys
from openrl.tasks.checkpoints import COPIED
from openrl.tasks.errors import Gone, InvalidRequest, KeyReused, NotFound
from openrl.tasks.journal import Promise
from openrl.tasks.messages import Message
from openrl.tasks.registry import BaseModel, Run

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """An operation, and the place in its run that the client gave it."""

    run_id: str
    seq_id: int
    message: Message


def own_run(run_id: str) -> Run:
    """Return a run of the tenant who asks, on a base model that is served."""
    return own_run_and_model(run_id)[0]


def own_run_and_model(run_id: str) -> tuple[Run, BaseModel]:
    """Return a run of the tenant who asks, and its base model. Where the run stands may be a moment old.

    Raises:
        NotFound: no such run.
        NotServed: nobody would carry out its operations. None may be accepted, and no `seq_id` used up: after a
            start with the wrong models and another with the right ones, the client's loop goes on.
    """
    run = services().known_runs.get((tenant(), run_id), lambda: registry().run(tenant(), run_id))
    return run, model_of(run)


def submit(asked: Submission) -> Promise:
    """Put an operation into its run's journal and ring for it."""
    return enqueue(own_run(asked.run_id), asked.seq_id, asked.message)


def enqueue(run: Run, seq_id: int, message: Message) -> Promise:
    """Put a checked operation into the journal and ring for it."""
    if run.state == COPIED:
        raise InvalidRequest(
            f"run {run.run_id!r} only holds the copy of a checkpoint and can't be trained on: "
            "create a run from the copy's tinker:// address"
        )
    place = (message.kind, run.slug, tenant())
    request_id = keys.request_id(run.run_id, seq_id)
    letter = services().doorbell.letter(*place, request_id)
    submit = partial(services().journal.submit, tenant(), run.run_id, seq_id, message, letter=letter)
    promise = services().expected.submit(tenant(), request_id, submit)
    services().ring(*place, promise.request_id, posted=letter is not None)
    return promise


def consumes_its_key(kind: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a view that refuses an operation of `kind` use up the `seq_id`, as far as it can be read."""

    def decorate(view: Callable[P, R]) -> Callable[P, R]:
        @wraps(view)
        def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return view(*args, **kwargs)
            except KeyReused:
                raise
            except (InvalidRequest, NotFound, Gone) as refusal:
                _consume(kind, str(refusal))
                raise

        return wrapped

    return decorate


def _consume(kind: str, error: str) -> None:
    if address := wire.address():
        # A run of nobody's, or a key that an accepted operation holds already: nothing is left to use up.
        with suppress(NotFound, Gone, KeyReused):
            services().journal.refuse(tenant(), *address, kind, wire.digest(kind.encode()), error)
