"""Creating, loading and saving runs: the operations that touch files and the registry.

Each function carries out one operation of one run and returns its outcome, or raises and has changed
nothing. Registry rows are only returned: the journal's commit writes them, so a worker that lost the run
can't register anything. Which run is whose, and in what order, was decided elsewhere.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from openrl.tasks.errors import InvalidRequest, NotFound
from openrl.tasks.journal import Outcome
from openrl.tasks.messages import CreateModel, LoadWeights, SaveWeights, SaveWeightsExternal, SaveWeightsForSampler
from openrl.tasks.records import FULL
from openrl.tasks.registry import Checkpoint, Registry, Sampler, checkpoint_row, sampler_row
from openrl.workers.model.loading import LoadedModel
from openrl.workers.model.lora import Adapter
from openrl.workers.trainer import states
from openrl.workers.trainer.full import FullTuning, Masters
from openrl.workers.trainer.passes import Room
from openrl.workers.trainer.residency import state_bytes
from openrl.workers.trainer.runs import Run
from openrl.workers.trainer.versions import Version, Versions
from openrl.workers.weights import layout
from openrl.workers.weights.manifest import Manifest

_SEQ_BITS = 31

FIRST = 1
"""The `seq_id` of a run's first operation after its creation."""


def version(token: int, seq_id: int) -> int:
    """Return what tells this version of a name from every other: the claim's token, then the operation."""
    return (token << _SEQ_BITS) | seq_id


class Checkpoints:
    """Carries out the operations for one base model."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        base_model: str,
        slug: str,
        registry: Registry,
        data_dir: Path,
        full: FullTuning | None = None,
    ) -> None:
        """Serve LoRA runs; with `full` the one run that trains all weights, whose pool `slug` is then."""
        self._loaded, self._full = loaded, full
        self._versions = Versions(data_dir, loaded, base_model=base_model)
        self._base_model = base_model
        self._slug = slug
        self._registry = registry
        self._data_dir = data_dir

    def create(self, run: Run, message: CreateModel, room: Room) -> Outcome:
        """Give a new run its adapter, drawn from the seed, or all weights of the base; or what a checkpoint holds.

        An adapter that has no `room` on the device by itself is refused.
        """
        if message.checkpoint_dir:
            state = self._read(message.checkpoint_dir, with_optimizer=message.with_optimizer)
            self._adopt(run, state, room)
            result = {"type": "load_weights", "path": message.checkpoint_path, "model_id": run.run_id}
        else:
            self._start(run, message, room)
            result = {"type": "create_model", "model_id": run.run_id}
        return Outcome(result=_json(result), run_fields={"state": "ready", **_shape(run)})

    def load(self, run: Run, message: LoadWeights, seq_id: int, room: Room) -> Outcome:
        """Replace a run's weights by a checkpoint's, its moments too if asked (else they start anew).

        Pending gradients are dropped: they belong to the weights that are gone. A run whose first operation this is
        takes on the checkpoint's modules: the oldest SDKs create a run from a checkpoint so, and don't know them.
        An adapter that has no `room` on the device by itself is refused.
        """
        mine = run.weights()
        state = self._read(message.checkpoint_dir, with_optimizer=message.with_optimizer)
        its = state.trained
        if its.rank != mine.rank or (seq_id > FIRST and its.targets != mine.targets):
            raise InvalidRequest(
                f"the checkpoint has rank {its.rank} on {len(its.targets)} modules, this run has "
                f"rank {mine.rank} on {len(mine.targets)}; create a run from the checkpoint"
            )
        self._versions.let_go(run)
        self._adopt(run, state, room)
        result = {"type": "load_weights", "path": message.checkpoint_path, "model_id": run.run_id}
        return Outcome(result=_json(result), run_fields=_shape(run))

    def save(self, run: Run, message: SaveWeights, seq_id: int) -> Outcome:
        """Write parameters, moments and step as the training checkpoint of a name."""
        checkpoint_id = f"weights/{message.name}"
        self._check_free(run, checkpoint_id, overwrite=message.overwrite)
        directory = layout.weights_dir(run.tenant, run.run_id, message.name, version(run.token, seq_id))
        written = self._write(directory, run, states.TRAINING)
        checkpoint = self._checkpoint(run, checkpoint_id, directory, written, message)
        return Outcome(
            result=_json({"type": "save_weights", "path": checkpoint.uri}),
            rows=(checkpoint_row(run.tenant, checkpoint),),
        )

    def save_for_sampler(self, run: Run, message: SaveWeightsForSampler, seq_id: int) -> Outcome:
        """Write the weights as a version for samplers: under a name, or for one new sampler alone."""
        if message.sampler_id:
            return self._save_ephemeral(run, message, seq_id)
        return self._save_named(run, message, seq_id)

    def save_external(self, run: Run, message: SaveWeightsExternal, seq_id: int) -> Outcome:
        """Write the weights alone, as what stock PEFT or transformers reads, under a name that isn't taken."""
        checkpoint_id = f"external_weights/{message.name}"
        self._check_free(run, checkpoint_id, overwrite=False)
        directory = layout.external_dir(run.tenant, run.run_id, message.name, version(run.token, seq_id))
        written = self._write(directory, run, states.EXTERNAL)
        checkpoint = self._checkpoint(run, checkpoint_id, directory, written, message)
        result = {"type": "save_weights_external", "path": checkpoint.uri, "size_bytes": checkpoint.size_bytes}
        return Outcome(result=_json(result), rows=(checkpoint_row(run.tenant, checkpoint),))

    def foresee(self, run: Run) -> None:
        """Hear that a full run has taken a step, before anybody asks for a version of it."""
        if run.is_full:
            self._versions.foresee(run)

    def discard(self, outcome: Outcome) -> None:
        """Delete the directories that an outcome's rows name: they won't be registered."""
        self._versions.forget()
        for row in outcome.rows:
            named = json.loads(row.value)
            directory = isinstance(named, dict) and (named.get("directory") or named.get("adapter_dir"))
            if directory:
                layout.remove(layout.resolve(self._data_dir, directory))

    def _save_named(self, run: Run, message: SaveWeightsForSampler, seq_id: int) -> Outcome:
        checkpoint_id = f"sampler_weights/{message.name}"
        self._check_free(run, checkpoint_id, overwrite=message.overwrite)
        directory = layout.sampler_dir(run.tenant, run.run_id, message.name, version(run.token, seq_id))
        made = self._version(directory, run)
        checkpoint = self._checkpoint(run, checkpoint_id, directory, made.manifest, message)
        checkpoint = replace(checkpoint, size_bytes=made.size_bytes, weights_digest=made.digest)
        result = {"type": "save_weights_for_sampler", "path": checkpoint.uri}
        rows = (checkpoint_row(run.tenant, checkpoint),)
        return Outcome(result=_json(result), rows=rows, run_fields=_last(run, directory))

    def _save_ephemeral(self, run: Run, message: SaveWeightsForSampler, seq_id: int) -> Outcome:
        session_id, _, number = message.sampler_id.rpartition(":sample:")
        directory = layout.ephemeral_dir(run.tenant, run.run_id, int(number), version(run.token, seq_id))
        made = self._version(directory, run)
        sampler = Sampler(
            sampler_id=message.sampler_id,
            session_id=session_id,
            base_model=self._base_model,
            slug=self._slug,
            adapter_dir=directory,
            run_id=run.run_id,
            created=time.time(),
            base_digest=self._loaded.digest,
            size_bytes=made.size_bytes,
            weights_digest=made.digest,
        )
        result = {"type": "save_weights_for_sampler", "sampling_session_id": message.sampler_id}
        return Outcome(result=_json(result), rows=sampler_row(run.tenant, sampler), run_fields=_last(run, directory))

    def _start(self, run: Run, message: CreateModel, room: Room) -> None:
        assert message.seed is not None, "the journal draws a seed where none was given"
        assert (message.fine_tuning == FULL) == (self._full is not None), "a run is in the pool of its kind"
        if self._full is not None:
            run.adopt(Masters.of_base(self._loaded, self._full))
        else:
            drawn = self._drawn(message)
            _check_room(drawn, room)
            run.adopt(drawn)
        run.train_attn, run.train_mlp, run.train_unembed = message.train_attn, message.train_mlp, message.train_unembed
        run.seed = message.seed

    def _drawn(self, message: CreateModel) -> Adapter:
        assert message.seed is not None
        return Adapter.init(
            self._loaded,
            rank=message.rank,
            seed=message.seed,
            train_attn=message.train_attn,
            train_mlp=message.train_mlp,
            train_unembed=message.train_unembed,
        )

    def _read(self, directory: str, *, with_optimizer: bool) -> states.State:
        path = layout.existing(self._data_dir, directory)
        return states.read(
            path, self._loaded, base_model=self._base_model, with_optimizer=with_optimizer, full=self._full
        )

    def _write(self, directory: str, run: Run, kind: str) -> Manifest:
        path = layout.resolve(self._data_dir, directory)
        return states.write(path, run, kind=kind, base_model=self._base_model, base_digest=self._loaded.digest)

    def _version(self, directory: str, run: Run) -> Version:
        """Write a version for samplers: an adapter, or what changed in all weights since the last one."""
        if run.is_full:
            return self._versions.publish(directory, run)
        written = self._write(directory, run, states.SAMPLER)
        return Version(manifest=written, size_bytes=written.size_bytes)

    def _adopt(self, run: Run, state: states.State, room: Room) -> None:
        if not isinstance(state.trained, Masters):
            _check_room(state.trained, room)
        run.drop_gradient()
        run.adopt(state.trained, state.moments)
        run.train_attn, run.train_mlp = state.manifest.train_attn, state.manifest.train_mlp
        run.train_unembed, run.seed = state.manifest.train_unembed, state.manifest.seed

    def _check_free(self, run: Run, checkpoint_id: str, *, overwrite: bool) -> None:
        try:
            taken = self._registry.checkpoint(run.tenant, run.run_id, checkpoint_id)
        except NotFound:
            return
        if not overwrite:
            raise InvalidRequest(
                f"{taken.uri!r} exists already; choose another name, or overwrite=True where the save takes it"
            )

    def _checkpoint(
        self,
        run: Run,
        checkpoint_id: str,
        directory: str,
        written: Manifest,
        message: SaveWeights | SaveWeightsForSampler | SaveWeightsExternal,
    ) -> Checkpoint:
        now = time.time()
        return Checkpoint(
            run_id=run.run_id,
            checkpoint_id=checkpoint_id,
            kind=written.kind,
            directory=directory,
            size_bytes=written.size_bytes,
            created=now,
            base_model=self._base_model,
            rank=written.rank,
            train_attn=written.train_attn,
            train_mlp=written.train_mlp,
            train_unembed=written.train_unembed,
            step=written.step,
            has_optimizer=written.has_optimizer,
            expires_at=None if message.ttl_seconds is None else now + message.ttl_seconds,
            user_metadata=dict(message.user_metadata),
            base_digest=self._loaded.digest,
            fine_tuning=written.fine_tuning,
        )


def _check_room(adapter: Adapter, room: Room) -> None:
    needed, most = state_bytes(adapter), room.state_bytes
    if most and needed > most:
        raise InvalidRequest(
            f"rank {adapter.rank} on {len(adapter.targets)} modules takes {needed} bytes on the device (adapter, "
            f"two moments, gradient), and this trainer has {most} for its runs; take a lower rank, train fewer "
            "kinds of layers, or ask the operator for more OPENRL_TRAINER_DEVICE_BYTES"
        )


def _last(run: Run, directory: str) -> dict[str, str]:
    """Return what the run's row has to say of a new version: that of a full run is what the next one leads on from."""
    return {"last_version": directory} if run.is_full else {}


def _shape(run: Run) -> dict[str, str]:
    """Return what the registry says of what a run trains."""
    return {
        "rank": str(run.weights().rank),
        "train_attn": str(int(run.train_attn)),
        "train_mlp": str(int(run.train_mlp)),
        "train_unembed": str(int(run.train_unembed)),
    }


def _json(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode()
