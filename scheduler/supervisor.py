"""The only parent of processes: starts them, notices their end, starts them again, ends them.

Knows nothing of what a process does. One thread drives it, and must: the kernel tells a child of its
parent's death when the *thread* that started it ends. What it started is written down, so that the next
supervisor can end what a killed one left behind.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from openrl.tasks import datadir
from openrl.tasks.process import PARENT_PID

PROCESSES = "processes.json"

BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Waits before a crashed process is started again, the last one for ever after."""

STABLE_S = 60.0
"""A process that ran this long is healthy: its next crash counts as the first."""

ROTATE_BYTES = 16 << 20
"""A log over this size is put aside when its process starts; three old ones are kept."""

KEPT_LOGS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What to run. `name` is unique, and its log's name. `env` comes on top of the supervisor's own."""

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Child:
    program: Program
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    crashes: int = 0
    due: float = 0.0
    leaving: bool = False
    kill_at: float | None = None


class Supervisor:
    """Runs programs under a data directory. `say` gets one line for each thing an operator should know."""

    def __init__(
        self,
        data_dir: Path,
        *,
        say: Callable[[str], None],
        detail: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logs = data_dir / "logs"
        self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._ledger = data_dir / PROCESSES
        self._say = say
        self._detail = detail
        self._clock = clock
        self._children: dict[str, _Child] = {}

    def log_path(self, name: str) -> Path:
        """Return the file that holds what the program prints."""
        return self._logs / f"{name}.log"

    def names(self) -> set[str]:
        """Return the programs that are kept running; not those on their way out."""
        return {name for name, child in self._children.items() if not child.leaving}

    def pid(self, name: str) -> int | None:
        """Return the process id of a program, None while it isn't running."""
        child = self._children.get(name)
        return child.process.pid if child and child.process else None

    def crashes(self, name: str) -> int:
        """Return how often a program has crashed since it last ran well."""
        child = self._children.get(name)
        return child.crashes if child else 0

    def start(self, program: Program) -> None:
        """Keep `program` running from now on. One whose last process is still leaving starts when that is gone."""
        child = self._children.get(program.name)
        if child is None:
            child = self._children[program.name] = _Child(program)
            self._launch(child)

    def stop(self, name: str, *, grace_s: float) -> None:
        """Ask a program to end and let it; after `grace_s` it is killed."""
        child = self._children[name]
        kill_at = self._clock() + grace_s
        if child.leaving:
            child.kill_at = min(kill_at, child.kill_at) if child.kill_at is not None else None
            return
        child.leaving = True
        child.kill_at = kill_at
        if child.process is None:
            del self._children[name]
            return
        self._detail(f"{name}: asked to stop")
        child.process.terminate()

    def poll(self) -> None:
        """Look after everything once: reap, kill what is overdue, start what is due. Never blocks."""
        now = self._clock()
        for child in list(self._children.values()):
            if child.process is not None:
                self._look_after(child, child.process, now)
            elif now >= child.due:
                self._launch(child)

    def shutdown(self, stages: Sequence[tuple[set[str], float]], *, hurry: Callable[[], bool] = lambda: False) -> None:
        """End everything, stage after stage; a stage's number is when, in seconds from now, its rest is killed.

        What no stage names ends with the last one. Once `hurry()` is true every stage has a second at most.
        """
        begun = self._clock()
        for index, (names, bound_s) in enumerate(stages):
            last = index == len(stages) - 1
            chosen = {name for name in self._children if last or name in names}
            for name in chosen:
                self.stop(name, grace_s=max(0.0, begun + bound_s - self._clock()))
            hurried = False
            while chosen & self._children.keys():
                if hurry() and not hurried:
                    hurried = True
                    self._hurry(chosen)
                self.poll()
                time.sleep(0.02)
        self._ledger.unlink(missing_ok=True)

    def end_leftovers(self, *, grace_s: float = 5.0) -> None:
        """End what a supervisor that was killed left behind. Call it before the first start."""
        found = list(_leftovers(self._ledger))
        for name, process in found:
            self._say(f"ending {name} (pid {process.pid}), left over from an earlier run")
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs([process for _, process in found], timeout=grace_s)
        for process in alive:
            _kill_group(process.pid)
        psutil.wait_procs(alive, timeout=grace_s)
        self._ledger.unlink(missing_ok=True)

    def _hurry(self, names: Iterable[str]) -> None:
        soon = self._clock() + 1.0
        for name in names:
            if child := self._children.get(name):
                child.kill_at = min(soon, child.kill_at or soon)

    def _launch(self, child: _Child) -> None:
        program = child.program
        path = self.log_path(program.name)
        _rotate(path)
        with path.open("ab") as log:
            child.process = subprocess.Popen(
                program.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **program.env, PARENT_PID: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
                # A session of its own: a Ctrl-C in the terminal reaches the supervisor alone.
                start_new_session=True,
            )
        child.started = self._clock()
        self._write_ledger()
        self._detail(f"{program.name}: started (pid {child.process.pid}), log {path}")

    def _look_after(self, child: _Child, process: subprocess.Popen[bytes], now: float) -> None:
        if not _has_ended(process):
            if child.kill_at is not None and now >= child.kill_at:
                self._say(f"{child.program.name} (pid {process.pid}) did not stop in time; killed")
                _kill_group(process.pid)
                child.kill_at = None
            return
        # What it started must not outlive it; until it is reaped, its number is nobody else's.
        _kill_group(process.pid)
        status = process.wait()
        child.process = None
        if child.leaving:
            self._detail(f"{child.program.name}: stopped")
            del self._children[child.program.name]
        else:
            self._plan_restart(child, status, now)
        self._write_ledger()

    def _plan_restart(self, child: _Child, status: int, now: float) -> None:
        name = child.program.name
        if status == 0:
            child.crashes, child.due = 0, now + BACKOFF_S[0]
            self._detail(f"{name}: ended by itself; starting it again")
            return
        child.crashes = 1 if now - child.started >= STABLE_S else child.crashes + 1
        wait_s = BACKOFF_S[min(child.crashes, len(BACKOFF_S)) - 1]
        child.due = now + wait_s
        self._say(f"{name} {_how(status)}; starting it again in {wait_s:.0f} s; see {self.log_path(name)}")

    def _write_ledger(self) -> None:
        rows = [_row(child.program.name, child.process.pid) for child in self._children.values() if child.process]
        datadir.write_private(self._ledger, json.dumps([row for row in rows if row]))


def _row(name: str, pid: int) -> dict[str, object] | None:
    try:
        return {"pid": pid, "start_time": psutil.Process(pid).create_time(), "name": name}
    except psutil.NoSuchProcess:
        return None


def _leftovers(ledger: Path) -> Iterable[tuple[str, psutil.Process]]:
    """Yield what the ledger names and is still the same process: a number alone may be anybody's by now."""
    try:
        rows = json.loads(ledger.read_text())
    except (FileNotFoundError, ValueError):
        return
    for row in rows:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(row["pid"])
            if abs(process.create_time() - row["start_time"]) < 1.0:
                yield row["name"], process


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Tell whether it ended, leaving it unreaped."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _how(status: int) -> str:
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"exited with status {status}"


def _rotate(path: Path) -> None:
    if not path.exists() or path.stat().st_size < ROTATE_BYTES:
        return
    for number in range(KEPT_LOGS, 0, -1):
        older = path.with_name(f"{path.name}.{number}")
        newer = path.with_name(f"{path.name}.{number - 1}") if number > 1 else path
        if newer.exists():
            newer.replace(older)
