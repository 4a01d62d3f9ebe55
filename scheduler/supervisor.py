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
from openrl.tasks.schema import PROCESS

PROCESSES = "processes.json"

BACKOFF_S = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Waits before a crashed process is started again, the last one for ever after; `longest_wait_s` may bound them."""

STABLE_S = 60.0
"""A process that ran this long is healthy: its next crash counts as the first."""

ROTATE_BYTES = 64 << 20
"""A log over this size is put aside, whether its process runs or not; three old ones are kept."""

REFUSED = 2
"""The exit status of a program that refuses its settings: it would for ever, and isn't started again."""

KEPT_LOGS = 3
LOGS_EVERY_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """What to run. `name` is unique, and its log's name. `env` comes on top of the supervisor's own.

    `files`: open file descriptors that it is handed, under the same numbers.
    """

    name: str
    argv: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Sequence[int] = ()


@dataclass(slots=True)
class _Child:
    program: Program
    process: subprocess.Popen[bytes] | None = None
    started: float = 0.0
    crashes: int = 0
    due: float = 0.0
    leaving: bool = False
    refused: bool = False
    kill_at: float | None = None


class Supervisor:
    """Runs programs under a data directory. `say` gets one line for each thing an operator should know."""

    def __init__(
        self,
        data_dir: Path,
        *,
        say: Callable[[str], None],
        detail: Callable[[str], None] = lambda line: None,
        longest_wait_s: float = BACKOFF_S[-1],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logs = data_dir / "logs"
        self._logs.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._ledger = data_dir / PROCESSES
        self._say = say
        self._detail = detail
        self._longest_wait_s = longest_wait_s
        self._clock = clock
        self._children: dict[str, _Child] = {}
        self._ledger_is_true = True
        self._logs_due = clock() + LOGS_EVERY_S
        self._troubles: set[str] = set()

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

    def refused(self) -> list[str]:
        """Return the programs that refused their settings; their logs say why."""
        return sorted(name for name, child in self._children.items() if child.refused)

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
        if not self._ledger_is_true:
            self._write_ledger()
        if now >= self._logs_due:
            self._logs_due = now + LOGS_EVERY_S
            self._rotate_logs()

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
        """Start the program; what the machine refuses (no space, no memory) is said, and tried again as a crash is."""
        program = child.program
        path = self.log_path(program.name)
        try:
            child.process = self._process(program, path)
        except OSError as error:
            child.crashes += 1
            wait_s = self._backoff_s(child.crashes)
            child.due = self._clock() + wait_s
            self._say(f"{program.name} can't be started ({_why(error)}); trying again in {wait_s:g} s")
            return
        child.started = self._clock()
        self._write_ledger()
        self._detail(f"{program.name}: started (pid {child.process.pid}), log {path}")

    def _process(self, program: Program, path: Path) -> subprocess.Popen[bytes]:
        _put_aside(path)
        with path.open("ab") as log:
            return subprocess.Popen(
                program.argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **program.env, PARENT_PID: str(os.getpid()), "PYTHONUNBUFFERED": "1"},
                # A session of its own: a Ctrl-C in the terminal reaches the supervisor alone.
                start_new_session=True,
                pass_fds=program.files,
            )

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
        if status == REFUSED:
            child.refused, child.due = True, float("inf")
            return
        if status == 0:
            child.crashes, child.due = 0, now + BACKOFF_S[0]
            self._detail(f"{name}: ended by itself; starting it again")
            return
        child.crashes = 1 if now - child.started >= STABLE_S else child.crashes + 1
        wait_s = self._backoff_s(child.crashes)
        child.due = now + wait_s
        self._say(f"{name} {_how(status)}; starting it again in {wait_s:g} s; see {self.log_path(name)}")

    def _backoff_s(self, crashes: int) -> float:
        return min(BACKOFF_S[min(crashes, len(BACKOFF_S)) - 1], self._longest_wait_s)

    def _write_ledger(self) -> None:
        rows = [_row(child.program.name, child.process.pid) for child in self._children.values() if child.process]
        text = json.dumps([row for row in rows if row])
        self._ledger_is_true = self._could(f"cannot write {self._ledger}", datadir.write_private, self._ledger, text)

    def _rotate_logs(self) -> None:
        for child in self._children.values():
            path = self.log_path(child.program.name)
            if child.process is not None and _is_large(path):
                self._could(f"cannot put aside {path}", _copy_aside, path)

    def _could(self, trouble: str, work: Callable[..., None], *args: object) -> bool:
        """Do `work`; where the machine refuses, say so, but not again until it has worked once."""
        try:
            work(*args)
        except OSError as error:
            if trouble not in self._troubles:
                self._say(f"{trouble} ({_why(error)}); trying again")
            self._troubles.add(trouble)
            return False
        self._troubles.discard(trouble)
        return True


def _row(name: str, pid: int) -> dict[str, object] | None:
    try:
        return PROCESS.numbered({"pid": pid, "start_time": psutil.Process(pid).create_time(), "name": name})
    except psutil.NoSuchProcess:
        return None


def _leftovers(ledger: Path) -> Iterable[tuple[str, psutil.Process]]:
    """Yield what the ledger names and is still the same process: a number alone may be anybody's by now."""
    try:
        rows = [PROCESS.current(row) for row in json.loads(ledger.read_text())]
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


def _why(error: OSError) -> str:
    return error.strerror or type(error).__name__


def _is_large(path: Path) -> bool:
    return path.exists() and path.stat().st_size >= ROTATE_BYTES


def _put_aside(path: Path) -> None:
    """Make room for a new log before its process starts."""
    if _is_large(path):
        _shift(path)
        path.replace(path.with_name(f"{path.name}.1"))


def _copy_aside(path: Path) -> None:
    """Make room in the log of a running process, which goes on at the beginning: it appends.

    What it writes between the last look and the cut, microseconds later, is lost.
    """
    copy = path.with_name(f"{path.name}.new")
    try:
        with path.open("r+b") as log, copy.open("wb") as aside:
            while part := log.read(1 << 20):
                aside.write(part)
                aside.flush()
            log.truncate(0)
    except OSError:
        copy.unlink(missing_ok=True)
        raise
    _shift(path)
    copy.replace(path.with_name(f"{path.name}.1"))


def _shift(path: Path) -> None:
    """Number each old log one up; the oldest goes."""
    for number in range(KEPT_LOGS, 1, -1):
        newer = path.with_name(f"{path.name}.{number - 1}")
        if newer.exists():
            newer.replace(path.with_name(f"{path.name}.{number}"))
