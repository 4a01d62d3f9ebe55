"""Who holds a turn, as processes, and the proof that all of them are gone.

A holder is the session or the process group that it leads, which its children share (an engine's process too), and
further processes that it names. A process is known by pid and start time, on one boot and in one pid namespace.
Where any of this can't be seen from here, nothing is proved, and the turn stays. Reads Linux's /proc (proc(5));
knows neither Redis nor what a turn is.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

PROC = Path("/proc")
_BOOT = PROC / "sys/kernel/random/boot_id"
_MACHINE = Path("/etc/machine-id")
POD_UID = "OPENRL_POD_UID"
"""The variable by which a pod tells its processes its uid."""
_FIRST_PID_NAMESPACE = "pid:[4026531836]"
"""The kernel's own, outside all containers: the number is fixed (PROC_PID_INIT_INO)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a pid means something: one boot of one machine, one pid namespace."""

    machine: str
    boot: str
    pid_namespace: str

    @classmethod
    def here(cls) -> Place:
        """Return where this process runs."""
        machine = _MACHINE.read_text().strip() if _MACHINE.exists() else ""
        return cls(
            machine=machine, boot=_BOOT.read_text().strip(), pid_namespace=str((PROC / "self/ns/pid").readlink())
        )

    def ended_before(self, here: Place) -> bool:
        """Tell whether `here` is the same machine after another start; never of containers, which may be copies."""
        outside = self.pid_namespace == here.pid_namespace == _FIRST_PID_NAMESPACE
        known = bool(re.fullmatch(r"[0-9a-f]{32}", self.machine))
        return outside and known and self.machine == here.machine and self.boot != here.boot


@dataclass(frozen=True, slots=True)
class Process:
    """One process. `start`: clock ticks since the boot."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> Process:
        """Return a living process.

        Raises:
            ProcessLookupError: there is none of this pid.
        """
        if (stat := _stat(pid)) is None:
            raise ProcessLookupError(f"no process has the pid {pid}")
        return cls(pid, stat.start)

    def is_gone(self) -> bool:
        """Tell whether it surely runs no more. What can't be read is not gone; a zombie has let go of everything."""
        if not _exists(self.pid):
            return True
        stat = _stat(self.pid)
        return stat is not None and (stat.start != self.start or stat.is_over)


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """The processes that may have something on an accelerator.

    `group`: session or process group that `leader` leads, whose members all count. `others` count wherever they are.
    `pod`: uid of the Kubernetes pod that they are in, "" outside one; whoever asks its API server can prove it gone.
    """

    place: Place
    leader: Process
    group: str
    uid: int
    others: tuple[Process, ...] = ()
    pod: str = ""

    @classmethod
    def this_process(cls) -> Holder:
        """Return this process with all that it will have started.

        Raises:
            ValueError: it leads neither a session nor a group, so that its children can't be told from others'.
        """
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> Holder:
        """Return a process of this machine as a holder; raises as `this_process` does."""
        group = "session" if os.getsid(pid) == pid else "group" if os.getpgid(pid) == pid else ""
        if not group:
            raise ValueError(f"process {pid} leads no session or process group; start it with setsid to take turns")
        pod = os.environ.get(POD_UID, "")
        return cls(place=Place.here(), leader=Process.of(pid), group=group, uid=_uid(pid), pod=pod)

    def is_gone(self) -> bool:
        """Tell whether it is proved that no process of it is left."""
        here = Place.here()
        if self.place != here:
            return self.place.ended_before(here)
        if os.getuid() != self.uid and not _sees_all():
            return False
        named = all(process.is_gone() for process in (self.leader, *self.others))
        # Twice: a process may have started another behind the first look, and ended before it.
        return named and not any(self._members()) and not any(self._members())

    def to_json(self) -> str:
        """Return it as text, always the same."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Holder:
        """Read what `to_json` wrote."""
        row = json.loads(text)
        return cls(
            place=Place(**row["place"]),
            leader=Process(**row["leader"]),
            group=row["group"],
            uid=row["uid"],
            others=tuple(Process(**other) for other in row["others"]),
            pod=row.get("pod", ""),
        )

    def _members(self) -> Iterator[bool]:
        """Yield True for each process of the group that still runs.

        The kernel gives a group's number to no other process while the group has members: one of that pid that
        started later leads another group of the same number, and nothing is left of this one.
        """
        successor = _stat(self.leader.pid)
        if successor is not None and successor.start != self.leader.start:
            return
        for pid in _pids():
            stat = _stat(pid)
            if stat is None:
                continue
            number = stat.session if self.group == "session" else stat.group
            if number == self.leader.pid and not stat.is_over:
                yield True


@dataclass(frozen=True, slots=True)
class _Stat:
    start: int
    group: int
    session: int
    is_over: bool


def _stat(pid: int) -> _Stat | None:
    """Return what /proc says of a process; None if it can't be read."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, _, group, session, *rest = text.rpartition(")")[2].split()
    # The first thread of a process may be over while others run on.
    is_over = state in "ZX" and _num_threads(pid) <= 1
    return _Stat(start=int(rest[15]), group=int(group), session=int(session), is_over=is_over)


def _num_threads(pid: int) -> int:
    try:
        return sum(1 for _ in (PROC / str(pid) / "task").iterdir())
    except FileNotFoundError:
        return 0


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _uid(pid: int) -> int:
    return (PROC / str(pid)).stat().st_uid


def _sees_all() -> bool:
    """Tell whether /proc shows processes of other users (hidepid of proc(5)): the first one is always there."""
    return _stat(1) is not None


def _pids() -> Iterable[int]:
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]
