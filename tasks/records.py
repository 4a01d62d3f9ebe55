"""What exists, as values: base models, sessions, runs, samplers, checkpoints, and their rows in the store.

Each is one JSON row that names its schema. Rows that must appear together with an operation's outcome
(a checkpoint, an ephemeral sampler) are built here and written by the journal's commit, so that a stale
worker can't register anything. Knows nothing of how rows are found; that is `registry`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Self

from openrl.tasks import keys, schema
from openrl.tasks.schema import Schema

LORA, FULL = "lora", "full"
"""What `fine_tuning` says: an adapter is trained, or all weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A value that is one JSON row."""

    schema: ClassVar[Schema]

    def to_json(self) -> str:
        """Return the row; it names its schema."""
        return json.dumps(self.schema.numbered(asdict(self)), sort_keys=True)

    @classmethod
    def from_json(cls, row: bytes | str, **overrides: Any) -> Self:
        """Rebuild the value that `to_json` wrote, with newer values of some fields.

        Raises:
            OtherVersion: another version wrote it, whose row can't be read here.
        """
        known = {f.name for f in fields(cls)}
        stored = cls.schema.current(json.loads(row)) | overrides
        return cls(**{name: value for name, value in stored.items() if name in known})


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel(Record):
    """A base model that this service was started with."""

    schema: ClassVar[Schema] = schema.BASE_MODEL
    name: str
    slug: str
    path: str
    vocab_size: int
    max_context: int
    arch: str
    tokenizer_id: str
    hidden_size: int
    num_layers: int
    tied_embeddings: bool
    digest: str = ""
    """Which weights are served under the name; "" in rows of earlier versions, here and in `base_digest`."""
    sampler_rank: int = 0
    """The largest rank of an adapter that its samplers serve; 0: any."""
    sampler_head: bool = True
    """Whether its samplers serve adapters on the unembedding."""

    def is_other(self, base_digest: str) -> bool:
        """Tell whether something was made on other weights than these; what doesn't say is believed."""
        return bool(self.digest and base_digest and self.digest != base_digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session(Record):
    """One client's connection. Times are unix seconds.

    `end` says how it was finished: {type: success | errored | interrupted, detail}; empty while it isn't.
    """

    schema: ClassVar[Schema] = schema.SESSION
    session_id: str
    tags: list[str] = field(default_factory=list)
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    created: float = 0.0
    last_seen: float = 0.0
    finished: bool = False
    project_id: str | None = None
    display_name: str | None = None
    end: Mapping[str, Any] = field(default_factory=dict)

    @property
    def created_us(self) -> int:
        """Return when it was opened, in whole microseconds: what a cursor can say exactly."""
        return round(self.created * 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(Record):
    """A training run, called a model on the wire. `applied` is its position, -1 before it is created.

    `slug` is its pool's: that of its base model, or for a full run its own; `rank` is 0 then. `last_version` is the
    directory of the version that a full run published last, from which its next delta leads.
    """

    schema: ClassVar[Schema] = schema.RUN
    tenant: str
    run_id: str
    session_id: str
    base_model: str
    slug: str
    rank: int
    seed: int
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True
    user_metadata: Mapping[str, Any] = field(default_factory=dict)
    created: float = 0.0
    last_request: float = 0.0
    applied: int = -1
    state: str = "creating"
    base_digest: str = ""
    fine_tuning: str = LORA
    last_version: str = ""

    @property
    def pool(self) -> str:
        """Return what the run's workers, queues and leases are known by."""
        return self.slug

    @property
    def is_lora(self) -> bool:
        """Tell whether it trains an adapter, not all weights."""
        return self.fine_tuning == LORA


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler(Record):
    """One immutable version to sample from. `model_path`, `adapter_dir`, `run_id` are empty for the base model.

    `slug` is that of the pool whose samplers serve it: of the base model, or of the full run that made it.
    `weights_digest` is what a full run's version is known by, "" for an adapter.
    """

    schema: ClassVar[Schema] = schema.SAMPLER
    sampler_id: str
    session_id: str
    base_model: str
    slug: str
    model_path: str = ""
    adapter_dir: str = ""
    run_id: str = ""
    created: float = 0.0
    base_digest: str = ""
    size_bytes: int = 0
    """Of a version that was made for this sampler alone; 0 where it is a checkpoint's, or the base model."""
    weights_digest: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(Record):
    """A directory of weights under a name. `directory` is relative to the data directory."""

    schema: ClassVar[Schema] = schema.CHECKPOINT
    run_id: str
    checkpoint_id: str
    kind: str
    directory: str
    size_bytes: int
    created: float
    base_model: str
    rank: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    step: int
    has_optimizer: bool
    public: bool = False
    expires_at: float | None = None
    """None: kept until it is deleted."""
    user_metadata: Mapping[str, str] = field(default_factory=dict)
    base_digest: str = ""
    fine_tuning: str = LORA
    weights_digest: str = ""
    """Of a full run's version for samplers: the digest that it is known by, and with it its chain."""

    @property
    def is_lora(self) -> bool:
        """Tell whether it holds an adapter, not all weights."""
        return self.fine_tuning == LORA

    @property
    def uri(self) -> str:
        """Return the address that the SDK knows it by."""
        return f"tinker://{self.run_id}/{self.checkpoint_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One field of one hash in the store, to be written together with a commit."""

    key: str
    field: str
    value: str


def checkpoint_row(tenant: str, checkpoint: Checkpoint) -> Row:
    """Return the row that registers a checkpoint; it replaces an older one of that name."""
    return Row(
        key=keys.checkpoints(tenant, checkpoint.run_id), field=checkpoint.checkpoint_id, value=checkpoint.to_json()
    )


def sampler_row(tenant: str, sampler: Sampler) -> tuple[Row, ...]:
    """Return the rows that register a sampler and list it in its session."""
    return (
        Row(key=keys.sampler(tenant, sampler.sampler_id), field="record", value=sampler.to_json()),
        Row(
            key=keys.session_samplers(tenant, sampler.session_id), field=sampler.sampler_id, value=str(sampler.created)
        ),
    )
