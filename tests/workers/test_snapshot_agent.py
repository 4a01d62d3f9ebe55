"""The snapshot agent's client, against an agent on a socket that has the real one's service, states and refusals."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from openrl.tasks.store import Store
from openrl.workers.model import snapshot_agent_pb2 as wire
from openrl.workers.model.accelerator import Accelerator, SharedAccelerator
from openrl.workers.model.settings import AcceleratorSettings
from openrl.workers.model.snapshot_agent import SERVICE, AgentFailed, SnapshotAgent
from openrl.workers.model.whole_process import WholeProcess

IDLE, RUNNING, TRANSITIONING, SAVED, FAULTED = (
    wire.Job.IDLE, wire.Job.RUNNING, wire.Job.TRANSITIONING, wire.Job.SAVED, wire.Job.FAULTED
)  # fmt: skip


class Agent(grpc.GenericRpcHandler):
    """Jobs move as in the real agent: a failed one is refused for ever, one that moves until it is through."""

    def __init__(self) -> None:
        self.states: dict[str, int] = {}
        self.pids: dict[str, list[int]] = {}
        self.operations: dict[str, wire.Operation] = {}
        self.asked: list[str] = []
        self.fails, self.hangs, self.lies, self.silent = "", False, False, False
        self._let_go = threading.Event()
        self._moves = ThreadPoolExecutor(1)
        self._server = grpc.server(ThreadPoolExecutor(4))
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def close(self) -> None:
        self._let_go.set()
        self._server.stop(None).wait()
        self._moves.shutdown()

    def service(self, details):
        assert details.method.startswith(SERVICE)
        method = details.method.removeprefix(SERVICE)
        taken = {
            "Snapshot": (self._snapshot, wire.JobRequest), "Restore": (self._restore, wire.JobRequest),
            "GetOperation": (self._operation, wire.OperationRequest), "Status": (self._status, wire.StatusRequest),
        }  # fmt: skip
        handle, request = taken[method]
        return grpc.unary_unary_rpc_method_handler(
            handle,
            request_deserializer=request.FromString,
            response_serializer=lambda answer: answer.SerializeToString(),
        )

    def _snapshot(self, request: wire.JobRequest, context: grpc.ServicerContext) -> wire.Started:
        return self._begin("snapshot", request, context, SAVED)

    def _restore(self, request: wire.JobRequest, context: grpc.ServicerContext) -> wire.Started:
        if self.states.get(request.job_id) == RUNNING:
            return wire.Started(operation_id="already-running")
        return self._begin("restore", request, context, RUNNING)

    def _begin(self, what: str, request: wire.JobRequest, context: grpc.ServicerContext, then: int) -> wire.Started:
        job = request.job_id
        self.asked.append(what)
        if self.silent:
            self._let_go.wait()
        state = self.states.setdefault(job, IDLE)
        if state == TRANSITIONING:
            context.abort(grpc.StatusCode.ABORTED, f"job {job} is already transitioning")
        if state == FAULTED:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"job {job} is in FAULTED state")
        name = str(uuid.uuid4())
        self.operations[name] = wire.Operation(status=wire.Operation.PENDING)
        self.states[job] = TRANSITIONING
        if request.backend_config.cuda.HasField("explicit_target"):
            self.pids[job] = list(request.backend_config.cuda.explicit_target.pids)
        self._moves.submit(self._move, job, name, what, then)
        return wire.Started(operation_id=name)

    def _move(self, job: str, name: str, what: str, then: int) -> None:
        if self.hangs:
            self._let_go.wait()
        if self.fails == what:
            self.states[job] = FAULTED
            self.operations[name] = wire.Operation(status=wire.Operation.FAILED, error="no host memory")
        else:
            self.states[job] = RUNNING if self.lies else then
            self.operations[name] = wire.Operation(status=wire.Operation.COMPLETE)

    def _operation(self, request: wire.OperationRequest, context: grpc.ServicerContext) -> wire.Operation:
        if request.operation_id not in self.operations:
            context.abort(grpc.StatusCode.NOT_FOUND, f"operation {request.operation_id} not found")
        return self.operations[request.operation_id]

    def _status(self, request: wire.StatusRequest, context: grpc.ServicerContext) -> wire.StatusResponse:
        return wire.StatusResponse(
            job_statuses=[wire.Job(job_id=job, state=state) for job, state in self.states.items()]
        )


@pytest.fixture
def agent() -> Iterator[Agent]:
    running = Agent()
    yield running
    running.close()


@pytest.fixture
def ask(agent: Agent) -> Iterator[Callable[..., SnapshotAgent]]:
    made: list[SnapshotAgent] = []

    def new(*, pid: int | None = 7, timeout_s: float = 30.0) -> SnapshotAgent:
        made.append(SnapshotAgent(agent.address, "job", pid=pid, timeout_s=timeout_s, poll_s=0.001))
        return made[-1]

    yield new
    for one in made:
        one.close()


def test_a_job_is_saved_and_restored_once_and_only_then_counts_as_parked(agent: Agent, ask):
    parkable = ask()
    parkable.restore()
    assert parkable.resident_bytes > 0 and agent.asked == []
    for _ in range(3):
        parkable.park()
        parkable.park()
        assert parkable.resident_bytes == 0 and agent.states == {"job": SAVED}
        parkable.restore()
        parkable.restore()
        assert parkable.resident_bytes > 0 and agent.states == {"job": RUNNING}
    assert agent.asked == ["snapshot", "restore"] * 3
    assert agent.pids == {"job": [7]}


def test_the_agent_looks_for_the_processes_itself_where_it_is_told_none(agent: Agent, ask):
    ask(pid=None).park()
    assert agent.states == {"job": SAVED} and agent.pids == {}


def test_a_snapshot_that_failed_is_told_and_so_is_every_one_after_it(agent: Agent, ask):
    agent.fails, parkable = "snapshot", ask()
    with pytest.raises(AgentFailed, match="no host memory"):
        parkable.park()
    with pytest.raises(AgentFailed, match="FAILED_PRECONDITION"):
        parkable.park()
    assert parkable.resident_bytes > 0


def test_a_restore_that_failed_leaves_the_job_parked(agent: Agent, ask):
    agent.fails, parkable = "restore", ask()
    parkable.park()
    with pytest.raises(AgentFailed, match="no host memory"):
        parkable.restore()
    assert parkable.resident_bytes == 0


def test_what_is_not_through_in_time_counts_as_failed(agent: Agent, ask):
    agent.hangs, parkable = True, ask(timeout_s=0.2)
    with pytest.raises(AgentFailed, match=r"isn't through after 0\.2 s"):
        parkable.park()
    with pytest.raises(AgentFailed, match="ABORTED"):
        parkable.park()
    assert parkable.resident_bytes > 0


def test_an_agent_that_says_nothing_or_is_gone_counts_as_failed(agent: Agent, ask):
    agent.silent = True
    with pytest.raises(AgentFailed, match="DEADLINE_EXCEEDED"):
        ask(timeout_s=0.2).park()
    agent.close()
    with pytest.raises(AgentFailed, match="UNAVAILABLE"):
        ask().check()


def test_an_agent_that_was_started_anew_amid_an_operation_counts_as_failed(agent: Agent, ask):
    parkable = ask()
    agent._operation = lambda request, context: Agent._operation(
        agent, wire.OperationRequest(operation_id="x"), context
    )
    with pytest.raises(AgentFailed, match="NOT_FOUND"):
        parkable.park()
    assert parkable.resident_bytes > 0


def test_an_operation_that_is_complete_and_led_elsewhere_counts_as_failed(agent: Agent, ask):
    agent.lies, parkable = True, ask()
    with pytest.raises(AgentFailed, match="is RUNNING and should be SAVED"):
        parkable.park()
    assert parkable.resident_bytes > 0


def test_a_job_that_somebody_else_has_brought_back_is_not_taken_for_ours(agent: Agent, ask):
    parkable = ask()
    parkable.park()
    ask()._carry_out("Restore", RUNNING)
    with pytest.raises(AgentFailed, match="is RUNNING and should be SAVED"):
        parkable.restore()


# Chosen by a setting


class Weightless:
    """Tensors, as far as the order of things goes."""

    resident_bytes = 0

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def park(self) -> None:
        self._agent.asked.append("tensors out")

    def restore(self) -> None:
        self._agent.asked.append("tensors back")


class NoSeat:
    """Nobody takes turns: what would be parked is parked by the test."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def name_processes(self, *pids: int) -> None: ...


IN_A_POD = {
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "OPENRL_ACCELERATOR_CONTEXT": "snapshot-agent",
    "OPENRL_SNAPSHOT_AGENT": "node:9001",
}


def by_agent(agent: Agent, **settings: str) -> AcceleratorSettings:
    return AcceleratorSettings(name="gpu-0", context="snapshot-agent", agent=agent.address, **settings)


def test_a_process_is_parked_after_its_tensors_and_restored_before_them(agent: Agent, store: Store):
    accelerator = SharedAccelerator(store, by_agent(agent), owner="trainer-a", seat=NoSeat)
    accelerator.add(Weightless(agent))
    agent.asked.clear()
    accelerator.restore()
    for _ in range(2):
        accelerator.park()
        accelerator.restore()
    assert agent.asked == ["tensors back", *["tensors out", "snapshot", "restore", "tensors back"] * 2]
    assert agent.pids == {f"trainer-a.{os.getpid()}": [os.getpid()]}


def test_where_another_process_holds_the_device_that_one_is_parked(agent: Agent, store: Store):
    accelerator = SharedAccelerator(store, by_agent(agent), owner="sampler-a", seat=NoSeat)
    accelerator.name_processes(41)
    accelerator.park()
    assert agent.pids == {"sampler-a.41": [41]}
    with pytest.raises(ValueError, match="it must be one"):
        accelerator.name_processes(41, 42)


def test_a_pods_processes_are_parked_under_its_label(agent: Agent, store: Store):
    SharedAccelerator(store, by_agent(agent, agent_job="pod-7"), owner="trainer-a", seat=NoSeat).park()
    assert agent.states == {"pod-7": SAVED} and agent.pids == {}


def test_where_the_agent_looks_itself_processes_are_not_counted(agent: Agent, store: Store):
    accelerator = SharedAccelerator(store, by_agent(agent, agent_job="pod-7"), owner="sampler-a", seat=NoSeat)
    accelerator.name_processes(41, 42)
    accelerator.park()
    assert agent.states == {"pod-7": SAVED} and agent.pids == {}


def test_an_agent_that_does_not_answer_or_a_missing_tool_is_refused_at_the_start(agent: Agent):
    agent.close()
    with pytest.raises(ValueError, match=r"OPENRL_SNAPSHOT_AGENT: .*UNAVAILABLE"):
        WholeProcess.of(by_agent(agent), owner="trainer-a")
    with pytest.raises(ValueError, match="there is no no-such-tool here"):
        settings = AcceleratorSettings(name="gpu-0", context="cuda-checkpoint")
        WholeProcess.of(settings, owner="trainer-a", tool="no-such-tool")


WITHOUT_GRPC = """
import sys

class Without:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            raise {failure}

sys.meta_path.insert(0, Without())
from openrl.workers.model.accelerator import Accelerator
from openrl.workers.model.settings import AcceleratorSettings

try:
    Accelerator.of(None, AcceleratorSettings(name="gpu-0", context="snapshot-agent", agent="h:1"), owner="trainer-a")
except ValueError as refusal:
    print(refusal)
"""


@pytest.mark.parametrize("failure", ["ModuleNotFoundError('no grpc')", "ImportError('grpc is broken')"])
def test_a_worker_without_grpcio_or_with_a_broken_one_says_what_to_install(failure: str):
    command = [sys.executable, "-c", WITHOUT_GRPC.format(failure=failure)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    said = failure.split("'")[1]
    assert f"OPENRL_ACCELERATOR_CONTEXT=snapshot-agent: {said}; install the extra snapshot-agent" in done.stdout


def test_a_sampler_on_several_devices_is_told_before_it_starts_that_not_all_of_it_can_leave_them(tmp_path: Path):
    command = [sys.executable, "-m", "openrl.workers.sampler", "--base", "none", "--name", "sampler-a"]
    environ = {
        "OPENRL_DATA_DIR": str(tmp_path), "OPENRL_REDIS_URL": "redis://127.0.0.1:1/0", "OPENRL_ACCELERATOR": "gpu-0",
        "OPENRL_ACCELERATOR_CONTEXT": "cuda-checkpoint", "OPENRL_SAMPLER_ENGINE": "vllm",
        "OPENRL_SAMPLER_BETWEEN_TURNS": "sleeps", "OPENRL_SAMPLER_TENSOR_PARALLEL_SIZE": "2",
    }  # fmt: skip
    done = subprocess.run(command, env=os.environ | environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "OPENRL_SAMPLER_TENSOR_PARALLEL_SIZE is 2: set it to 1" in done.stderr, done.stderr


def test_a_worker_that_takes_no_turns_needs_no_agent(store: Store):
    settings = AcceleratorSettings.from_env(
        {"OPENRL_ACCELERATOR_CONTEXT": "snapshot-agent", "OPENRL_SNAPSHOT_AGENT": "127.0.0.1:1"}
    )
    with Accelerator.of(store, settings, owner="trainer-a").turn():
        pass


@pytest.mark.parametrize(
    ("environ", "what"),
    [
        ({"OPENRL_ACCELERATOR_CONTEXT": "agent"}, "must be stays, cuda-checkpoint or snapshot-agent"),
        ({"OPENRL_ACCELERATOR_CONTEXT": "snapshot-agent"}, "OPENRL_SNAPSHOT_AGENT"),
        ({"OPENRL_SNAPSHOT_AGENT": "node:9001"}, "belong to OPENRL_ACCELERATOR_CONTEXT=snapshot-agent"),
        ({"OPENRL_ACCELERATOR_CONTEXT": "snapshot-agent", "OPENRL_SNAPSHOT_AGENT": "node"}, "must be host:port"),
        (IN_A_POD, "needs OPENRL_SNAPSHOT_JOB in a pod"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(environ: dict[str, str], what: str):
    with pytest.raises(ValueError, match=what):
        AcceleratorSettings.from_env({"OPENRL_ACCELERATOR": "gpu-0"} | environ)


def test_in_a_pod_the_job_is_named_and_no_pid_is_told():
    assert AcceleratorSettings.from_env(IN_A_POD | {"OPENRL_SNAPSHOT_JOB": "pod-7"}).agent_job == "pod-7"
