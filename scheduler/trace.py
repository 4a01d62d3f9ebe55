"""A trace for the simulator: machines, latencies, and the work that comes, as a file in JSON.

Jobs are listed one by one, or drawn from classes with a seed; the same file gives the same jobs.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.resources import files
from pathlib import Path
from typing import Any

from openrl.scheduler.resources import Limit, Need, Policy
from openrl.tasks.errors import InvalidRequest

GIB = 1 << 30
SHIPPED = ("burst", "mixed", "tenants")
"""Traces that come with the package, by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machines:
    """Nodes of one kind: how many there are at the start, how many there may be, and what each has."""

    name: str
    count: int
    most: int
    devices: int
    device_gib: float
    host_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Latencies:
    """How long things take, in seconds."""

    allocate_s: float = 2.0
    start_s: float = 30.0
    stop_s: float = 5.0
    node_s: float = 180.0
    pass_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Work for one pool: it has the device for `duty` of its `work_s`, and is served by a worker, two if `full`."""

    name: str
    at_s: float
    work_s: float
    duty: float
    need: Need
    full: bool = False
    sampler: Need | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Everything that a simulation depends on."""

    name: str
    machines: tuple[Machines, ...]
    jobs: tuple[Job, ...]
    policy: Policy = field(default_factory=Policy)
    latencies: Latencies = Latencies()


def read(name: str) -> Trace:
    """Read a shipped trace by its name, or a file.

    Raises:
        InvalidRequest: there is no such trace, or a field of it is unknown or makes no sense.
    """
    if name in SHIPPED:
        text = (files("openrl.scheduler") / "traces" / f"{name}.json").read_text(encoding="utf-8")
    else:
        try:
            text = Path(name).read_text(encoding="utf-8")
        except OSError as missing:
            known = ", ".join(SHIPPED)
            raise InvalidRequest(f"TRACE {name}: no such file, nor one of those shipped ({known})") from missing
    try:
        said = json.loads(text)
    except ValueError as malformed:
        raise InvalidRequest(f"TRACE {name} is not JSON: {malformed}") from malformed
    return parse(said, name=Path(name).stem)


def parse(said: Any, *, name: str) -> Trace:
    """Return the trace that a file's content describes. Raises as `read`."""
    known = {"about", "machines", "latencies", "policy", "limits", "seed", "classes", "jobs"}
    _only(said, known, "the trace")
    machines = tuple(_of(Machines, row, f"machines[{i}]") for i, row in enumerate(_list(said, "machines")))
    if not machines:
        raise InvalidRequest("machines is empty; at least one kind of node is needed")
    jobs = [_job(row, f"jobs[{i}]", f"job-{i}") for i, row in enumerate(said.get("jobs", ()))]
    jobs += _drawn(_list(said, "classes") if "classes" in said else [], int(said.get("seed", 0)))
    limits = {tenant: _of(Limit, row, f"limits.{tenant}") for tenant, row in dict(said.get("limits", {})).items()}
    policy = _of(Policy, _in_bytes(said.get("policy", {})) | {"limits": limits}, "policy")
    return Trace(
        name=name,
        machines=machines,
        jobs=tuple(sorted(jobs, key=lambda job: (job.at_s, job.name))),
        policy=policy,
        latencies=_of(Latencies, said.get("latencies", {}), "latencies"),
    )


def _drawn(classes: list[Any], seed: int) -> list[Job]:
    """Draw the jobs of each class: arrivals spread evenly over `over_s`, work exponential about `work_s`."""
    found = []
    for index, row in enumerate(classes):
        where = f"classes[{index}]"
        _only(row, {"name", "count", "over_s", "tenants", "work_s", "duty", "full", "device_gib", "host_gib",
                    "sampler_device_gib", "sampler_host_gib", "exclusive", "priority"}, where)  # fmt: skip
        draw = random.Random(f"{seed} {row.get('name')}")
        for number in range(int(_number(row, "count", where))):
            job = {key: row[key] for key in row.keys() & {"full", "exclusive", "priority", "duty"}}
            job |= {key: row[key] for key in row if key.endswith("_gib")}
            job["at_s"] = draw.uniform(0.0, _number(row, "over_s", where))
            job["work_s"] = min(max(draw.expovariate(1.0), 0.05), 5.0) * _number(row, "work_s", where)
            tenants = int(row.get("tenants", 0))
            if tenants:
                job["tenant"] = f"tenant-{draw.randrange(tenants)}"
            found.append(_job(job, where, f"{row.get('name', index)}-{number}"))
    return found


def _job(row: Any, where: str, name: str) -> Job:
    _only(row, {"name", "at_s", "work_s", "duty", "full", "tenant", "device_gib", "host_gib", "sampler_device_gib",
                "sampler_host_gib", "exclusive", "priority"}, where)  # fmt: skip
    owner, priority = str(row.get("tenant", "")), int(row.get("priority", 0))

    def need(prefix: str) -> Need:
        device, host = _number(row, f"{prefix}device_gib", where), _number(row, f"{prefix}host_gib", where)
        exclusive = bool(row.get("exclusive", False))
        return Need(device_bytes=int(device * GIB), host_bytes=int(host * GIB), exclusive=exclusive,
                    priority=priority, owner=owner)  # fmt: skip

    full = bool(row.get("full", False))
    return Job(
        name=str(row.get("name", name)),
        at_s=_number(row, "at_s", where),
        work_s=_number(row, "work_s", where),
        duty=float(row.get("duty", 1.0)),
        need=need(""),
        full=full,
        sampler=need("sampler_") if full else None,
    )


def _in_bytes(row: Any) -> dict[str, Any]:
    """Return the policy's fields with sizes in bytes: a trace says GiB."""
    content = dict(row)
    for name in ("tier_host", "residue"):
        if f"{name}_gib" in content:
            content[f"{name}_bytes"] = int(content.pop(f"{name}_gib") * GIB)
    if "tiers_gib" in content:
        content["tiers"] = tuple(int(size * GIB) for size in content.pop("tiers_gib"))
    return content


def _of(kind: Any, row: Any, where: str) -> Any:
    _only(row, {each.name for each in fields(kind)}, where)
    missing = [
        each.name for each in fields(kind)
        if each.name not in row and repr(each.default).startswith("<dataclasses._MISSING")
        and repr(each.default_factory).startswith("<dataclasses._MISSING")
    ]  # fmt: skip
    if missing:
        raise InvalidRequest(f"{where} lacks {missing[0]}")
    return kind(**row)


def _only(row: Any, known: set[str], where: str) -> None:
    if not isinstance(row, Mapping):
        raise InvalidRequest(f"{where} is {row!r}; an object with {', '.join(sorted(known))} is needed")
    if unknown := sorted(row.keys() - known):
        raise InvalidRequest(f"{where} has {unknown[0]!r}; it may have {', '.join(sorted(known))}")


def _list(row: Mapping[str, Any], name: str) -> list[Any]:
    found = row.get(name)
    if not isinstance(found, list):
        raise InvalidRequest(f"{name} is {found!r}; a list is needed")
    return found


def _number(row: Mapping[str, Any], name: str, where: str) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise InvalidRequest(f"{where}.{name} is {value!r}; a number of at least 0 is needed")
    return float(value)
