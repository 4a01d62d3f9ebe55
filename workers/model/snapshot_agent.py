"""A process's CUDA state, put aside by llm-d's snapshot agent on the same node, in place of the driver's own tool.

The agent is a privileged service (gRPC, port 9001). `Snapshot` and `Restore` of a job begin an operation that is then
asked after; which state the job is in, `Status` says. An operation counts only if it is complete and the state is the
one that it leads to: a refusal, a failure, a restarted agent that knows the operation no more, silence and a job that
somebody else has moved are all taken for a state that may be half on the accelerator. Needs grpcio (extra
`snapshot-agent`). Has been run against an emulated agent, not against the real one.
github.com/llm-d-incubation/llm-d-rl-time-slicing, pkg/snapshot-agent, has its service and states.
"""

from __future__ import annotations

import time
from typing import Any

import grpc

from openrl.workers.model import snapshot_agent_pb2 as wire

SERVICE = "/snapshot_agent.v1alpha1.SnapshotAgentService/"
TIMEOUT_S, CALL_S, POLL_S = 300.0, 10.0, 0.02
SAVED, RUNNING = wire.Job.SAVED, wire.Job.RUNNING


class AgentFailed(Exception):
    """The agent didn't do it, or nobody knows: whoever has something on the accelerator must leave it by ending."""


class SnapshotAgent:
    """The CUDA state of one job's processes; satisfies `openrl.timeslice.park.Parkable`."""

    def __init__(
        self, address: str, job: str, *, pid: int | None, timeout_s: float = TIMEOUT_S, poll_s: float = POLL_S
    ) -> None:
        """Ask the agent at `address` (host:port) to park the process `pid`, as it counts processes.

        None: the agent looks for the processes of `job` itself, pods by their label `timeslice.io/job-id`.
        """
        self._address, self._job, self._timeout_s, self._poll_s = address, job, timeout_s, poll_s
        cuda = wire.Cuda(explicit_target=None if pid is None else wire.Processes(pids=[pid]))
        self._request = wire.JobRequest(job_id=job, backend_config=wire.BackendConfig(cuda=cuda))
        self._channel = grpc.insecure_channel(address)
        self._parked = False

    @property
    def resident_bytes(self) -> int:
        """0 once the agent has confirmed that all is off the device; else 1: it doesn't say how much it is."""
        return 0 if self._parked else 1

    def check(self) -> None:
        """Raise AgentFailed where the agent doesn't answer."""
        self._call("Status", wire.StatusRequest(), wire.StatusResponse, wait=False)

    def park(self) -> None:
        """Take the state off the device.

        Raises:
            AgentFailed: it may still have something there.
        """
        if not self._parked:
            self._carry_out("Snapshot", SAVED)
            self._parked = True

    def restore(self) -> None:
        """Bring the state back.

        Raises:
            AgentFailed: it may be there in part.
        """
        if self._parked:
            # Somebody else has brought it back, at a time that wasn't ours?
            self._require(SAVED)
            self._carry_out("Restore", RUNNING)
            self._parked = False

    def close(self) -> None:
        """Let go of the connection."""
        self._channel.close()

    def _carry_out(self, what: str, state: int) -> None:
        until = time.monotonic() + self._timeout_s
        operation_id = self._call(what, self._request, wire.Started).operation_id
        asked = wire.OperationRequest(operation_id=operation_id)
        while (operation := self._call("GetOperation", asked, wire.Operation)).status == wire.Operation.PENDING:
            if time.monotonic() >= until:
                raise AgentFailed(f"{what} of job {self._job!r} isn't through after {self._timeout_s:g} s")
            time.sleep(self._poll_s)
        if operation.status != wire.Operation.COMPLETE:
            raise AgentFailed(f"{what} of job {self._job!r} has failed: {operation.error or 'the agent says not why'}")
        self._require(state)

    def _require(self, state: int) -> None:
        jobs = self._call("Status", wire.StatusRequest(), wire.StatusResponse).job_statuses
        found = [job.state for job in jobs if job.job_id == self._job]
        if found != [state]:
            names = ", ".join(map(wire.Job.State.Name, found)) or "not known to the agent"
            raise AgentFailed(f"job {self._job!r} is {names} and should be {wire.Job.State.Name(state)}")

    def _call(self, method: str, request: Any, answer: Any, *, wait: bool = True) -> Any:
        call = self._channel.unary_unary(
            SERVICE + method,
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        try:
            return call(request, timeout=min(CALL_S, self._timeout_s), wait_for_ready=wait)
        except grpc.RpcError as failure:
            said = f"{failure.code().name}, {failure.details()}"
            raise AgentFailed(f"{method} of job {self._job!r} at {self._address}: {said}") from failure
