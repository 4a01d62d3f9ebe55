"""How things stand at an accelerator: who holds it, who waits, what it was used for. Reads, and changes nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from openrl.timeslice import keys
from openrl.timeslice.holder import Holder
from openrl.timeslice.turn import Turns


@dataclass(frozen=True, slots=True, kw_only=True)
class Present:
    """The turn that runs. `state`: granted | resident | parking | failed. `heard_s`: since its last sign, if any."""

    owner: str
    token: int
    state: str
    held_s: float
    heard_s: float | None
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerUse:
    """What one owner had within a day of its last turn. `switch_s`: its park and restore as last measured."""

    owner: str
    turns: int
    waits: int
    waited_s: float
    longest_wait_s: float
    held_s: float
    busy_s: float
    switch_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """One accelerator. `duty_cycle`: share of the time since its first turn that was used, between 0 and 1.

    `waiting`: owner -> seconds, first come first. `switches`: the last turns that ended, newest first, as the scripts
    wrote them.
    """

    accelerator: str
    present: Present | None
    waiting: dict[str, float]
    turns: int
    duty_cycle: float
    held_share: float
    owners: tuple[OwnerUse, ...]
    switches: tuple[dict[str, Any], ...]


def standing(turns: Turns, accelerator: str) -> Standing:
    """Return how things stand at one accelerator."""
    with turns.redis.pipeline(transaction=True) as pipe:
        pipe.time()
        pipe.hgetall(keys.accelerator(accelerator))
        pipe.zrange(keys.line(accelerator), 0, -1, withscores=True)
        pipe.lrange(keys.switches(accelerator), 0, -1)
        (seconds, microseconds), raw, line, switches = pipe.execute()
    now = seconds * 1_000_000 + microseconds
    row = {name.decode(): value.decode() for name, value in raw.items()}
    present, total = _present(row, now), max(1.0, now - float(row.get("first", now)))
    held = float(row.get("held_total", 0)) + (present.held_s * 1e6 if present else 0.0)
    return Standing(
        accelerator=accelerator,
        present=present,
        waiting={owner.decode(): max(0.0, (now - since) / 1e6) for owner, since in line},
        turns=int(row.get("turns", 0)),
        duty_cycle=min(1.0, (float(row.get("busy_total", 0)) + float(row.get("busy", 0))) / total),
        held_share=min(1.0, held / total),
        owners=_owners(turns, accelerator),
        switches=tuple(json.loads(one) for one in switches),
    )


def _present(row: dict[str, str], now: float) -> Present | None:
    if "owner" not in row:
        return None
    return Present(
        owner=row["owner"],
        token=int(row["token"]),
        state=row["state"],
        held_s=max(0.0, (now - float(row["granted"])) / 1e6),
        heard_s=max(0.0, (now - float(row["heard"])) / 1e6) if "heard" in row else None,
        pid=Holder.from_json(row["holder"]).leader.pid,
    )


def _owners(turns: Turns, accelerator: str) -> tuple[OwnerUse, ...]:
    prefix, found = keys.owner(accelerator, ""), []
    for key in sorted(turns.redis.scan_iter(match=keys.owners(accelerator), count=1000)):
        # `withdrawn` is the name of a seat, not a number.
        cells = turns.redis.hgetall(key).items()
        row = {name.decode(): float(value) for name, value in cells if name != b"withdrawn"}
        found.append(
            OwnerUse(
                owner=key.decode().removeprefix(prefix),
                turns=int(row.get("turns", 0)),
                waits=int(row.get("waits", 0)),
                waited_s=row.get("waited", 0.0) / 1e6,
                longest_wait_s=row.get("longest", 0.0) / 1e6,
                held_s=row.get("held", 0.0) / 1e6,
                busy_s=row.get("busy", 0.0) / 1e6,
                switch_s=(row.get("park", 0.0) + row.get("restore", 0.0)) / 1e6,
            )
        )
    return tuple(found)
