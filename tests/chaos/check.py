"""Was anything lost, or done twice? What clients were told against what the service has written down, and against the
same work undisturbed. Strikes nothing and asks the service nothing over HTTP.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

from openrl.tasks import keys
from openrl.tasks.records import Checkpoint
from openrl.tasks.registry import Registry
from openrl.tasks.store import Store
from openrl.tasks.usage import Usage
from tests.chaos.history import Action, History
from tests.chaos.runs import LAST

TENANT = "local"
CLOSE = 1e-3
"""How far the final loss may be from an undisturbed run's where runs share passes; and log-probabilities of samples,
whose last bits depend on who else was sampled."""


@dataclass(slots=True, kw_only=True)
class Verdict:
    """What was found. `lost` and `doubled` count operations and samples; each difference is a line for people."""

    operations: int = 0
    samples: int = 0
    refused: int = 0
    lost: int = 0
    doubled: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Tell whether nothing is wrong."""
        return not (self.lost or self.doubled or self.differences)


def written_down(histories: Sequence[History], store: Store) -> Verdict:
    """Compare what the clients were told with journal, promises and usage: each operation once, in order."""
    verdict = Verdict()
    for history in histories:
        name = f"run {history.number}"
        if history.error is not None:
            verdict.lost += 1
            verdict.differences.append(f"{name}: a call ended in {type(history.error).__name__}: {history.error}")
        if not history.run_id:
            continue
        verdict.operations += history.operations
        verdict.refused += sum(action.refused for action in history.actions)
        verdict.samples += len(history.samples)
        if history.error is None:
            _journal(name, history, store, verdict)
            _usage(name, history, store, verdict)
    return verdict


def _journal(name: str, history: History, store: Store, verdict: Verdict) -> None:
    rows = store.redis.hgetall(keys.journal(TENANT, history.run_id))
    headers = {int(seq): json.loads(header) for seq, header in rows.items()}
    applied = int(store.redis.hget(keys.run(TENANT, history.run_id), "applied"))
    wanted = set(range(history.operations))
    if missing := sorted(wanted - headers.keys()):
        verdict.lost += len(missing)
        verdict.differences.append(f"{name}: the journal lacks {missing}")
    if surplus := sorted(headers.keys() - wanted):
        verdict.doubled += len(surplus)
        verdict.differences.append(f"{name}: nobody sent {surplus}")
    if unfinished := sorted(seq for seq, header in headers.items() if not header.get("finished")):
        verdict.lost += len(unfinished)
        verdict.differences.append(f"{name}: {unfinished} never ended")
    if applied != history.operations - 1:
        verdict.differences.append(f"{name}: the run is at {applied}, its client at {history.operations - 1}")
    times = [headers[seq]["finished"] for seq in sorted(headers) if headers[seq].get("finished")]
    if times != sorted(times):
        verdict.differences.append(f"{name}: operations ended out of order")
    refused = sum(bool(header.get("outcome")) for header in headers.values())
    if refused != history.operations - history.done:
        verdict.differences.append(
            f"{name}: {refused} operations failed, its client heard of {history.operations - history.done}"
        )
    states = {store.redis.hget(keys.future(TENANT, f"{history.run_id}:{seq}"), "state") for seq in headers}
    if not states <= {b"done", b"failed", None}:
        verdict.lost += 1
        verdict.differences.append(f"{name}: promises are {states}")


def _usage(name: str, history: History, store: Store, verdict: Verdict) -> None:
    """Usage is added up by the commit: a second commit of one operation would show in it."""
    now = time.time()
    rows = [row for row in Usage(store).between(TENANT, now - 7200, now + 3600) if row.run_id == history.run_id]
    counted = {
        what: sum(row.amount for row in rows if row.name == what)
        for what in ("operations", "samples", "sampled_tokens")
    }
    tokens = sum(len(drawn) for action in history.samples for drawn in action.told["tokens"])
    for what, told in (("operations", history.done), ("samples", len(history.samples)), ("sampled_tokens", tokens)):
        if counted[what] > told:
            verdict.doubled += counted[what] - told
        if counted[what] < told:
            verdict.lost += told - counted[what]
        if counted[what] != told:
            verdict.differences.append(f"{name}: {counted[what]} {what} were counted, {told} were asked for and given")


def undisturbed(
    disturbed: Sequence[History], calm: Sequence[History], stores: tuple[Store, Store], *, exact: bool
) -> list[str]:
    """Compare with the same work done undisturbed: to the bit where `exact`, else the final losses."""
    differences = []
    for mine, theirs in zip(disturbed, calm, strict=True):
        name = f"run {mine.number}"
        if theirs.error is not None:
            differences.append(f"{name}, undisturbed: {type(theirs.error).__name__}: {theirs.error}")
            continue
        differences += [f"{name}: {line}" for line in _actions(mine.actions, theirs.actions, exact=exact)]
        files = [_files(store, history) for store, history in zip(stores, (mine, theirs), strict=True)]
        if exact and files[0] != files[1]:
            differences.append(f"{name}: the final weights or moments are not those of an undisturbed run")
        for store, history in zip(stores, (mine, theirs), strict=True):
            if (step := _step(store, history)) != history.steps:
                differences.append(f"{name}: its last checkpoint is at step {step}, its client at {history.steps}")
    return differences


def _actions(mine: Sequence[Action], theirs: Sequence[Action], *, exact: bool) -> list[str]:
    lines = []
    for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
        if one.kind == "step" and exact and one.told != other.told:
            lines.append(f"action {index}: losses and norm {one.told}, undisturbed {other.told}")
        if one.kind == "loss":
            gap = abs(one.told["loss"] - other.told["loss"])
            if gap > (0 if exact else CLOSE):
                lines.append(f"the final loss is off by {gap:g}")
        if one.kind == "sample" and exact and not _same_draw(one, other):
            lines.append(f"action {index}: drew {one.told['tokens']}, undisturbed {other.told['tokens']}")
    return lines[:5]


def _same_draw(one: Action, other: Action) -> bool:
    """Compare tokens, and log-probabilities up to the bits that depend on who else was sampled."""
    if one.told["tokens"] != other.told["tokens"]:
        return False
    mine, theirs = (list(chain.from_iterable(action.told["logprobs"])) for action in (one, other))
    return all(abs(left - right) < CLOSE for left, right in zip(mine, theirs, strict=True))


def _last(store: Store, history: History, kind: str) -> Checkpoint:
    """Return the row of the last version or checkpoint; after refusals its name carries a number."""
    rows = Registry(store).checkpoints_of(TENANT, [history.run_id])
    named = [row for row in rows if row.checkpoint_id.startswith(f"{kind}/{LAST}")]
    return max(named, key=lambda row: row.created)


def _files(store: Store, history: History) -> dict[str, str]:
    """Digest what the last version and checkpoint consist of, but for the manifests, which name the moment."""
    found = {}
    for kind in ("sampler_weights", "weights"):
        directory = Path(store.settings.data_dir) / _last(store, history, kind).directory
        for path in sorted(directory.glob("*.safetensors")):
            found[f"{kind}/{path.name}"] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def _step(store: Store, history: History) -> int:
    return _last(store, history, "weights").step
