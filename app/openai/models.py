"""Which weights a model's name means: a base model, weights saved for sampling, or a sampler that exists.

Weights get a sampler of their own in a session that these routes keep for each tenant; the next request for the same
weights finds it again. A sampler never changes: weights that are saved anew under a name get another one.
"""

from __future__ import annotations

import hashlib
from typing import Any

from openrl.app import sampling
from openrl.app.context import registry, tenant
from openrl.app.openai.errors import refused
from openrl.app.schemas import MAX_LISTED
from openrl.tasks import keys
from openrl.tasks.errors import Gone, InvalidRequest, KeyReused, NotFound, shown
from openrl.tasks.registry import Sampler

SESSION = "openai-compatible"
"""Tag, display name and idempotency key of the session."""

MAX_TRIES = 8


class UnknownModel(NotFound):
    """No such model for this tenant: see GET /v1/models."""

    param = "model"
    code = "model_not_found"


def sampler_of(name: str) -> Sampler:
    """Return the sampler of the weights that a request names.

    Raises:
        UnknownModel: there are none, or they are somebody else's.
        Refused: they are, and can't be sampled.
    """
    try:
        if name.startswith("tinker://"):
            checkpoint = registry().checkpoint_by_uri(tenant(), name)
            return _bound({"model_path": name}, directory=checkpoint.directory, digest=checkpoint.base_digest)
        if _is_sampler(name):
            return registry().sampler(tenant(), name)
        model = registry().model(name)
        return _bound({"base_model": model.name}, directory="", digest=model.digest)
    except NotFound as missing:
        raise UnknownModel(f"model: {missing}") from missing
    except InvalidRequest as unfit:
        raise refused(f"model: {unfit}", "model") from unfit


def listed() -> list[dict[str, Any]]:
    """Return what may be named: base models, and the newest of the tenant's weights for sampling."""
    checkpoints, _ = registry().checkpoints(tenant(), None, 10 * MAX_LISTED, 0)
    mine = [one for one in checkpoints if one.checkpoint_id.startswith(sampling.SAMPLER_SEGMENT)][:MAX_LISTED]
    return [
        *(_entry(model.name, 0, "openrl") for model in registry().models()),
        *(_entry(one.uri, int(one.created), tenant()) for one in mine),
    ]


def described(name: str) -> dict[str, Any]:
    """Return one entry of the list. Raises UnknownModel where a request that names it would."""
    try:
        if name.startswith("tinker://"):
            owner, checkpoint = registry().readable_by_uri(tenant(), name)
            if not checkpoint.checkpoint_id.startswith(sampling.SAMPLER_SEGMENT):
                raise NotFound(f"{shown(name)} isn't there to be sampled")
            # Whose a published checkpoint is, is nobody's to know.
            return _entry(checkpoint.uri, int(checkpoint.created), owner if owner == tenant() else "")
        if _is_sampler(name):
            return _entry(name, int(registry().sampler(tenant(), name).created), tenant())
        return _entry(registry().model(name).name, 0, "openrl")
    except NotFound as missing:
        raise UnknownModel(f"model: {missing}") from missing


def _entry(name: str, created: int, owner: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": owner}


def _is_sampler(name: str) -> bool:
    try:
        return bool(keys.session_of(name))
    except NotFound:
        return False


def _bound(weights: dict[str, str], *, directory: str, digest: str) -> Sampler:
    """Return the sampler of these weights, made where there is none: always under the same number, so it is found."""
    told = repr((weights, directory, digest)).encode()
    first = int.from_bytes(hashlib.sha256(told).digest()[:8], "big")
    session_id, finished = _session(0), 0
    for attempt in range(MAX_TRIES):
        number = (first + attempt) % keys.MAX_RUN_SEQ
        try:
            sampler = sampling.create_sampler({**weights, "session_id": session_id, "sampling_session_seq_id": number})
        except KeyReused:
            continue
        except Gone:
            finished += 1
            session_id = _session(finished)
            continue
        if sampler.adapter_dir == directory:
            return sampler
    raise refused(f"model: {shown(weights)} changes all the time; name a sampler instead", "model")


def _session(finished: int) -> str:
    """Return the tenant's session of the day; another one for each that somebody finished."""
    session = registry().create_session(
        tenant(), idempotency_key=f"{SESSION} {finished}", tags=[SESSION], display_name=SESSION
    )
    return session.session_id
