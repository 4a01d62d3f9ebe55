"""The operations of the service as frozen values: what crosses the queue.

A message knows its fields and its canonical bytes (the same operation gives the same bytes, whatever
the map order, compression or format it arrived in), so that a retry can be told from a different
operation under a used key. It knows neither HTTP, Redis nor torch; what is allowed in a field is
checked in `openrl.app.checks` before anything is queued.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Self

from openrl.tasks.errors import Undecodable
from openrl.tasks.wire import codec
from openrl.tasks.wire.codec import Datum

__all__ = [
    "MESSAGES",
    "CreateModel",
    "Datum",
    "Forward",
    "ForwardBackward",
    "LoadWeights",
    "Message",
    "OptimStep",
    "Sample",
    "SaveWeights",
    "SaveWeightsExternal",
    "SaveWeightsForSampler",
    "decode",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """An operation's content. `kind` names it in the journal, in Celery and in errors."""

    kind: ClassVar[str] = ""
    newer: ClassVar[frozenset[str]] = frozenset()
    """Fields that came later. While empty they are left out, so that an earlier version's bytes stay the same."""

    @property
    def num_tokens(self) -> int:
        """How many tokens it sends through the model; 0 for what computes nothing."""
        return 0

    def to_bytes(self) -> bytes:
        """Return the canonical encoding: JSON with sorted keys."""
        content = {item.name: getattr(self, item.name) for item in fields(self)}
        content = {name: value for name, value in content.items() if value or name not in self.newer}
        return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()

    @classmethod
    def from_bytes(cls, body: bytes) -> Self:
        """Rebuild the message that `to_bytes` wrote; its lists were tuples.

        Raises:
            Undecodable: another version wrote it, or it is damaged.
        """
        try:
            content = json.loads(body)
            return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in content.items()})
        except (ValueError, TypeError, AttributeError) as error:
            raise Undecodable(f"these bytes are no {cls.kind} message of this version: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBackward(Message):
    """Compute the loss of `data`; accumulate its gradient unless the kind is `forward`."""

    kind: ClassVar[str] = "forward_backward"
    data: tuple[Datum, ...]
    loss_fn: str
    loss_fn_config: Mapping[str, float] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """The tokens of all sequences together."""
        return sum(len(datum.tokens) for datum in self.data)

    def to_bytes(self) -> bytes:
        """Return the canonical protobuf encoding (no model id, no seq id, maps sorted)."""
        return codec.encode_forward_backward(self)

    @classmethod
    def from_bytes(cls, body: bytes) -> Self:
        """Rebuild the message that `to_bytes` wrote."""
        request = codec.decode_forward_backward(body)
        return cls(data=request.data, loss_fn=request.loss_fn, loss_fn_config=request.loss_fn_config)


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward(ForwardBackward):
    """As `ForwardBackward`, leaving no gradient behind."""

    kind: ClassVar[str] = "forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateModel(Message):
    """Start a run, fresh or from a training checkpoint.

    `checkpoint_dir` (relative to the data directory) is empty for a fresh run; `seed` is always set
    by the time the message is journaled. `fine_tuning` is "full", or empty for an adapter; `rank` is 0 in a full run.
    """

    kind: ClassVar[str] = "create_model"
    newer: ClassVar[frozenset[str]] = frozenset({"fine_tuning"})
    base_model: str
    rank: int
    seed: int | None
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    checkpoint_path: str = ""
    checkpoint_dir: str = ""
    with_optimizer: bool = False
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    fine_tuning: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimStep(Message):
    """One AdamW step over the gradient accumulated since the last one. Defaults are Tinker's."""

    kind: ClassVar[str] = "optim_step"
    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWeights(Message):
    """Save adapter, moments and step as the training checkpoint `weights/<name>`."""

    kind: ClassVar[str] = "save_weights"
    name: str
    overwrite: bool = False
    ttl_seconds: int | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWeightsForSampler(Message):
    """Save the adapter for sampling: named `sampler_weights/<name>`, or bound to a new `sampler_id`.

    Exactly one of `name` and `sampler_id` is non-empty.
    """

    kind: ClassVar[str] = "save_weights_for_sampler"
    name: str = ""
    sampler_id: str = ""
    overwrite: bool = False
    ttl_seconds: int | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveWeightsExternal(Message):
    """Save the adapter as PEFT's files `external_weights/<name>`, to be downloaded."""

    kind: ClassVar[str] = "save_weights_external"
    name: str
    ttl_seconds: int | None = None
    user_metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadWeights(Message):
    """Replace an existing run's weights (and moments, if asked) by a training checkpoint's."""

    kind: ClassVar[str] = "load_weights"
    checkpoint_path: str
    checkpoint_dir: str
    with_optimizer: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Message):
    """Draw `num_samples` continuations of `prompt` from one immutable version.

    `stop_tokens` and `stop_strings` come from the request's `stop`; `stop_at_eos` is false only where
    that was an empty list. `max_tokens` None means: to the end of the context. `seed` is always set by the time
    the message is journaled. `adapter_dir` (relative to the data directory) is empty for the base.

    The request's `target_prompt_logprobs` [N, K] is `target_ids`, all cells row by row (-1: nothing is asked) or those
    of compressed sparse rows, then with `target_crow` and `target_columns`; `target_shape` is empty where it is
    absent. `prompt_logprobs_last_n` None means: the whole prompt. `listener` (see `drafts`) is who hears each token as
    it is drawn, empty where nobody does. `weights_digest` is what a full run's version is known by; empty elsewhere.
    """

    kind: ClassVar[str] = "sample"
    newer: ClassVar[frozenset[str]] = frozenset({"listener", "weights_digest"})
    adapter_dir: str
    prompt: tuple[int, ...]
    num_samples: int
    max_tokens: int | None = None
    seed: int | None = None
    stop_tokens: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    stop_at_eos: bool = True
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    target_ids: tuple[int, ...] = ()
    target_shape: tuple[int, ...] = ()
    target_crow: tuple[int, ...] = ()
    target_columns: tuple[int, ...] = ()
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = None
    listener: str = ""
    weights_digest: str = ""


MESSAGES: dict[str, type[Message]] = {
    message.kind: message
    for message in (
        CreateModel, ForwardBackward, Forward, OptimStep, SaveWeights, SaveWeightsForSampler, SaveWeightsExternal,
        LoadWeights, Sample,
    )
}  # fmt: skip


def decode(kind: str, body: bytes) -> Message:
    """Rebuild the message of `kind` from its canonical bytes."""
    return MESSAGES[kind].from_bytes(body)
