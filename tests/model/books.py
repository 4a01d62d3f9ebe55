"""What must be true of the store at every moment: each count equals a recount, each index what it indexes.

Reads a dump, knows nothing of what was done to get there.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from openrl.tasks import keys
from openrl.tasks.records import Sampler
from tests.model.workers import SLUG
from tests.model.world import World

NAMES = re.compile(
    r"openrl:(?:tenants|sessions|workers|signs|gaps|files|epoch|tokens|dropped|quotas|made-on|completions"
    r"|(?:ready|turns|served|unfinished|claimants):[^:]+|inflight:[^:]+(?::call)?|worker:[^:]+|depth:(?:train|sample):[^:]+"
    r"|t:[^:]+:(?:sessions|queued|account|runs|completions|usage:\d+|audit|quota|waiting:[^:]+"
    r"|session:[^:]+(?::runs|:samplers)?"
    r"|run:[^:]+:train:\d+(?::journal|:bodies|:checkpoints|:cancels)?"
    r"|sampler:[^:]+:sample:\d+(?::ops|:done:\d+)?"
    r"|(?:future|job):[^:]+:(?:train|sample):\d+:\d+))"
)
PASSING = re.compile(
    r"openrl:(?:worker:|inflight|claimants|unfinished|turns|ready|gaps|depth|t:[^:]+:(?:future|job|waiting))"
)
"""Keys of which none is left once everything has ended, its results have expired and its workers are gone."""


class Books:
    """One dump, by noun."""

    def __init__(self, world: World) -> None:
        self.all = world.dump()
        self.expiring = world.expiring
        self._data_dir = world.settings.data_dir
        self._journals: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
        self.runs = {
            (match[1], match[2]): row
            for name, row in self.all.items()
            if (match := re.fullmatch(r"openrl:t:([^:]+):run:([^:]+:train:\d+)", name))
        }
        self.tenants = sorted({name.split(":")[2] for name in self.all if name.startswith("openrl:t:")})
        self.jobs = self._of(r"openrl:t:([^:]+):job:(.+)")
        self.futures = self._of(r"openrl:t:([^:]+):future:(.+)")
        self.files: dict[bytes, float] = {file: float(at) for file, at in self.all.get(keys.FILES, {}).items()}

    def journal(self, key: tuple[str, str]) -> dict[int, dict[str, Any]]:
        """Return a run's headers."""
        if key not in self._journals:
            rows = self.all.get(keys.journal(*key), {})
            self._journals[key] = {int(seq): json.loads(header) for seq, header in rows.items()}
        return self._journals[key]

    def bodies(self, key: tuple[str, str]) -> dict[int, bytes]:
        """Return a run's bodies as they are stowed."""
        return {int(seq): body for seq, body in self.all.get(keys.bodies(*key), {}).items()}

    def check(self) -> None:
        """Hold every count and index to a recount."""
        for name in self.all:
            assert NAMES.fullmatch(name), f"a key that nobody knows: {name}"
        self._check_runs()
        self._check_counts()
        self._check_samples()
        self._check_futures()
        self._check_files()

    def _of(self, pattern: str) -> dict[tuple[str, str], dict[bytes, bytes]]:
        return {(match[1], match[2]): row for name, row in self.all.items() if (match := re.fullmatch(pattern, name))}

    def _check_runs(self) -> None:
        for key, run in self.runs.items():
            applied, journal, member = int(run[b"applied"]), self.journal(key), f"{key[0]} {key[1]}".encode()
            waiting = [seq for seq in journal if seq > applied]
            assert sorted(seq for seq in journal if seq <= applied) == list(range(applied + 1)), f"{key} has a hole"
            assert int(run[b"pending"]) == len(waiting), f"{key}: pending {run[b'pending']!r}, not {len(waiting)}"
            head = journal.get(applied + 1)
            ready = self.all.get(keys.ready(SLUG), {})
            assert (member in ready) == (head is not None), f"{key} ready: {member in ready}, head {head}"
            gap = bool(waiting) and head is None
            assert (member in self.all.get(keys.GAPS, {})) == gap, f"{key} stands before a gap: {gap}"
            trimmed = int(run.get(b"trimmed", -1))
            assert trimmed <= applied and int(run.get(b"snapshot", -1)) <= applied
            wanted = {
                seq for seq, each in journal.items() if seq > trimmed and each["kind"] not in ("refused", "missing")
            }
            assert set(self.bodies(key)) == wanted, f"{key} has bodies {sorted(self.bodies(key))}, not {sorted(wanted)}"

    def _waiting(self, tenant: str) -> list[dict[str, Any]]:
        return [
            header
            for key, run in self.runs.items()
            if key[0] == tenant
            for seq, header in self.journal(key).items()
            if seq > int(run[b"applied"])
        ]

    def _check_counts(self) -> None:
        for tenant in self.tenants:
            waiting, jobs = self._waiting(tenant), [job for (whose, _), job in self.jobs.items() if whose == tenant]
            depth = {
                kind: int(self.all.get(keys.depth(kind, SLUG), {}).get(tenant.encode(), 0))
                for kind in ("train", "sample")
            }
            assert depth == {"train": len(waiting), "sample": len(jobs)}, f"{tenant}: depth {depth}"
            queued = sum(int(each["size"]) for each in waiting) + sum(int(job[b"size"]) for job in jobs)
            assert int(self.all.get(keys.queued(tenant), 0)) == queued, f"{tenant}: queued is not {queued}"
            account = {name: int(float(value)) for name, value in self.all.get(keys.account(tenant), {}).items()}
            recount = Counter(
                unfinished=len(waiting) + len(jobs), stored=self._stored(tenant), spooled=self._spooled(tenant)
            )
            for name, amount in recount.items():
                assert account.get(name.encode(), 0) == amount, f"{tenant}: {name} is {account}, not {amount}"

    def _stored(self, tenant: str) -> int:
        stored = 0
        for name, row in self.all.items():
            if re.fullmatch(rf"openrl:t:{tenant}:run:.+:checkpoints", name):
                stored += sum(json.loads(each)["size_bytes"] for each in row.values())
            elif re.fullmatch(rf"openrl:t:{tenant}:sampler:[^:]+:sample:\d+", name) and b"record" in row:
                stored += Sampler.from_json(row[b"record"]).size_bytes
        return stored

    def _spooled(self, tenant: str) -> int:
        return sum(
            int(file.rpartition(b"-")[2]) for file in self.files if file.startswith(f"@spool/{tenant}/".encode())
        )

    def _check_samples(self) -> None:
        held = Counter(
            member.decode()
            for name, row in self.all.items()
            if name.startswith("openrl:inflight:") and not name.endswith(":call")
            for member in row
        )
        for name in self.all:
            if name.startswith("openrl:inflight:"):
                identity = name.removeprefix("openrl:inflight:").removesuffix(":call")
                claims = identity.encode() in self.all.get(keys.claimants(SLUG), {})
                assert claims or name.endswith(":call"), f"nobody will ever look into {name}"
        waiting = Counter(
            f"{tenant} {request.decode()}"
            for tenant in self.tenants
            for request in self.all.get(keys.waiting(tenant, SLUG), {})
        )
        jobs = Counter(f"{tenant} {request}" for tenant, request in self.jobs)
        assert held + waiting == jobs, f"in hands {held}, waiting {waiting}, jobs {jobs}"
        assert Counter(each.decode() for each in self.all.get(keys.unfinished(SLUG), {})) == jobs
        queueing = {tenant.encode() for tenant in self.tenants if keys.waiting(tenant, SLUG) in self.all}
        assert set(self.all.get(keys.turns(SLUG), {})) == queueing, "the turns are not those of who waits"

    def _check_futures(self) -> None:
        for (tenant, request_id), future in self.futures.items():
            parts = keys.parse_request(request_id)
            pending = future[b"state"] == b"pending"
            expires = keys.future(tenant, request_id) in self.expiring
            assert pending != expires, f"{request_id} is {future[b'state']!r} and expires: {expires}"
            if parts.is_run:
                header = self.journal((tenant, parts.parent)).get(int(parts.seq))
                assert header, f"{request_id} is promised and not in the journal"
                applied = int(self.runs[tenant, parts.parent][b"applied"])
                ended = int(parts.seq) <= applied or header["kind"] in ("refused", "missing")
            else:
                assert parts.seq.encode() in self.all[keys.sampler_ops(tenant, parts.parent)]
                ended = (tenant, request_id) not in self.jobs
            assert ended != pending, f"{request_id} is {future[b'state']!r} and ended: {ended}"

    def _check_files(self) -> None:
        for stowed in self.named():
            assert self.path(stowed).exists(), f"{stowed!r} counts and isn't there"
        for future in self.futures.values():
            result = future.get(b"result", b"")
            assert not result.startswith(b"@") or result in self.files, f"nobody will ever delete {result!r}"

    def named(self) -> set[bytes]:
        """Return the files that must be there."""
        found = {body for key in self.runs for body in self.bodies(key).values()}
        found |= {job[b"body"] for job in self.jobs.values()}
        found |= {future.get(b"result", b"") for future in self.futures.values()}
        return {stowed for stowed in found if stowed.startswith(b"@")}

    def path(self, stowed: bytes) -> Path:
        """Return where a stowed file is."""
        return self._data_dir / stowed[1:].decode()
