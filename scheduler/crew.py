"""The workers of a service on one machine, as processes: those that the scheduler wants, and no others.

Decides nothing about them. Each is started with its device, its engine and its turns in the environment.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from openrl.scheduler import engines, report
from openrl.scheduler.resources import Process, Workload
from openrl.scheduler.supervisor import Program, Supervisor
from openrl.tasks import assignment
from openrl.workers.model import settings as placing

IDLE_STOP_S = 120.0
"""How long a worker that is no longer wanted may take to hand back its runs."""

HUNG_STOP_S = 5.0
"""How long a worker that hangs may take to prove that it doesn't."""


class Crew:
    """The processes of the workers.

    `devices`: what CUDA_VISIBLE_DEVICES names for each accelerator; `environ`: all that the workers get.
    """

    def __init__(
        self, supervisor: Supervisor, engine: engines.Engine, devices: tuple[str, ...], environ: Mapping[str, str]
    ) -> None:
        self._supervisor = supervisor
        self._engine = engine
        self._devices = devices
        self._environ = environ
        self._workers: dict[str, Workload] = {}
        """What each worker was started for."""

    def follow(self, workloads: tuple[Workload, ...]) -> None:
        """Run the processes that are wanted, and no others."""
        wanted = {workload.name: workload for workload in workloads}
        for name, started in sorted(self._workers.items()):
            if name not in wanted:
                self._let_go(name, "no longer wanted, stopping", grace_s=IDLE_STOP_S)
            elif wanted[name].generation == started.generation:
                continue
            elif wanted[name].version != started.version:
                self._let_go(name, f"makes place for version {wanted[name].version}", grace_s=IDLE_STOP_S)
            else:
                self._let_go(name, "gives no sign of life; ending it, a fresh one follows", grace_s=HUNG_STOP_S)
        for name in sorted(wanted.keys() - self._supervisor.names()):
            self._supervisor.start(self._worker(wanted[name]))
            if name in self._supervisor.names():
                self._workers[name] = wanted[name]
                report.line(f"{name}: starting, log {self._supervisor.log_path(name)}")

    def running(self) -> dict[str, Process]:
        """Return the processes of the workers, but those on their way out."""
        pids = {name: self._supervisor.pid(name) for name in self._workers}
        return {
            name: Process(pid=pid, generation=self._workers[name].generation, version=self._workers[name].version)
            for name, pid in pids.items() if pid is not None
        }  # fmt: skip

    def _let_go(self, name: str, why: str, *, grace_s: float) -> None:
        self._supervisor.stop(name, grace_s=grace_s)
        del self._workers[name]
        report.line(f"{name}: {why}")

    def _worker(self, workload: Workload) -> Program:
        module = f"openrl.workers.{workload.kind}"
        # The same name after a crash: by taking the lease anew, the successor frees what the dead one owned at once.
        samples = workload.kind == "sampler" and (self._engine.full or not workload.pool.is_full)
        engine = self._engine if samples else engines.Engine(name=engines.TORCH, python=sys.executable)
        argv = [engine.python, "-m", module, "--base", workload.base, "--name", workload.name]
        argv += ["--pool", workload.slug] if workload.pool.is_full else []
        device = "" if workload.accelerator is None else self._devices[workload.accelerator]
        # A shell may name a place, of a pod; a worker would wait for it.
        placed = {assignment.VARIABLE: "", "CUDA_VISIBLE_DEVICES": device, **self._turns(workload, engine)}
        return Program(name=workload.name, argv=argv, env={**self._environ, **engine.environ, **placed})

    def _turns(self, workload: Workload, engine: engines.Engine) -> dict[str, str]:
        """Let a worker take turns at its claim; where no device is behind that, on one of a bounded size.

        vLLM that doesn't sleep takes none: it lies beside whoever has the turn, and both must fit.
        """
        sleeps = self._environ.get("OPENRL_SAMPLER_BETWEEN_TURNS") == "sleeps"
        if workload.accelerator is None or (engine.name == engines.VLLM and not sleeps):
            return {placing.VARIABLE: ""}
        turns = {placing.VARIABLE: workload.claim or ""}
        if not self._devices[workload.accelerator] and not self._environ.get(placing.BYTES):
            turns[placing.BYTES] = str(placing.half_of_memory() // len(self._devices))
        return turns
