"""Thousands of long polls held open, heartbeats among them, and 5 MB bodies: how long does a heartbeat take?

Knows what is measured; `load` knows how it is sent.
"""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import load
import numpy as np
import psutil
from load import PROTOBUF, addressed, json_request, post_all, request

from openrl.tasks.wire import openrl_pb2 as pb

Note = Callable[[str], None]

SESSIONS, BEAT_S = 250, 0.04
"""Each of the sessions sends a heartbeat every 10 s, as the SDK does, so that one is due every 40 ms."""

BODY_EVERY_S = 0.25
"""A large body is submitted at most so often: more than a trainer on the same machine could take, and the bodies of
three windows, which nothing computes, stay under what a tenant may have queued."""

DATUM_TOKENS = 320
IDLE_S, SETTLE_S = 10.0, 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Crowd:
    """What came of it: 99th percentiles of the heartbeats' times, without and among the polls, one for each window."""

    idle_ms: list[float]
    held_ms: list[float]


class Site:
    """A running service, and requests of ours to it."""

    def __init__(self, base_url: str, model: str) -> None:
        url = urlsplit(base_url)
        assert url.hostname is not None and url.port is not None
        self.address: dict[str, Any] = {"host": url.hostname, "port": url.port}
        self._model = model

    def post(self, *requests: bytes) -> list[Any]:
        """Return the JSON of the answers."""
        return [json.loads(answer.body) for answer in asyncio.run(post_all(**self.address, requests=requests))]

    def sessions(self, num: int) -> list[str]:
        """Open sessions."""
        return [each["session_id"] for each in self.post(*[json_request("/create_session", tags=[])] * num)]

    def new_run(self, session: str, number: int) -> str:
        """Create a run and wait for it."""
        made = self.post(
            json_request(
                "/create_model", session_id=session, model_seq_id=number, base_model=self._model, type="create_model",
                lora_config={"rank": 8, "seed": 1},
            )
        )[0]  # fmt: skip
        asked = json_request("/retrieve_future", request_id=made["request_id"])
        while asyncio.run(post_all(**self.address, requests=[asked], allowed=(200, 408)))[0].status == 408:
            pass
        return str(made["model_id"])


def crowd(
    site: Site, *, num: int, seconds: float, windows: int, body: Path, memory: Callable[[], int], note: Note
) -> Crowd:
    """Hold `num` polls open for some windows of time while bodies are submitted; then let all of them be answered.

    The polls wait for operations behind one that is missing; so do the bodies, so that the trainer leaves the cores to
    the API.
    """
    sessions = site.sessions(SESSIONS)
    polled, fed = (site.new_run(sessions[0], number) for number in range(2))
    beats = partial(play, "beat", **site.address, sessions=sessions, interval_s=BEAT_S)
    idle_ms = [p99(heard(beats(seconds=min(seconds, IDLE_S)))["took_ms"]) for _ in range(windows)]
    steps = (json_request("/optim_step", model_id=polled, seq_id=seq, adam_params={}) for seq in range(2, num + 2))
    site.post(*steps)
    before = memory()
    with playing("hold", **site.address, run_id=polled, first=2, num=num) as polls:
        heard(polls)
        time.sleep(min(SETTLE_S, seconds))
        note(f"{num} polls are open, each takes {(memory() - before) / num / 1024:.1f} KB of the API's memory")
        held_ms = []
        for window in range(windows):
            first = 2 + window * 10_000
            feed = play(
                "submit", **site.address, run_id=fed, body=str(body), first=first, seconds=seconds, every_s=BODY_EVERY_S
            )
            held_ms.append(p99(heard(beats(seconds=seconds))["took_ms"]))
            took_ms = heard(feed)["took_ms"]
            note(f"heartbeat p99 {held_ms[-1]:.1f} ms; {len(took_ms)} bodies, p50 {median(took_ms):.0f} ms")
        site.post(request("/forward_backward", addressed(polled, 1) + forward_backward(num_datums=1), PROTOBUF))
        ended = heard(polls)
    if ended["answered"] != num or ended["wrong"]:
        sys.exit(f"bench: of {num} polls {ended['answered']} were answered; wrong: {ended['wrong']}")
    note(f"all {num} polls were answered, after {ended['expired']} that expired")
    return Crowd(idle_ms=idle_ms, held_ms=held_ms)


def forward_backward(*, num_datums: int) -> bytes:
    """Return such an operation, without its place; 1000 datums are 5 MB."""
    call, draw = pb.ForwardBackwardCall(loss_fn="cross_entropy"), np.random.default_rng(0)
    for _ in range(num_datums):
        tokens, datum = draw.integers(0, 256, DATUM_TOKENS + 1), call.data.add()
        datum.model_input.add().encoded_text.tokens = tokens[:-1].astype("<i4").tobytes()
        for name, array, element in (
            ("target_tokens", tokens[1:].astype("<i8"), pb.ELEMENT_INT64),
            ("weights", np.ones(DATUM_TOKENS, "<f4"), pb.ELEMENT_FLOAT32),
        ):
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = array.tobytes(), element
            tensor.shape.append(DATUM_TOKENS)
    return call.SerializeToString()


def api_memory(pid: int) -> int:
    """Return the bytes of memory of the API processes that `openrl up` runs, shared pages counted in part."""
    children = psutil.Process(pid).children(recursive=True)
    return sum(child.memory_full_info().pss for child in children if "openrl.app" in child.cmdline())


def p99(values: list[float]) -> float:
    """Return the value that one in a hundred exceeds."""
    return sorted(values)[max(0, math.ceil(0.99 * len(values)) - 1)]


def play(role: str, **given: Any) -> subprocess.Popen[str]:
    """Start a role in a process of its own."""
    return subprocess.Popen([sys.executable, load.__file__, role, json.dumps(given)], stdout=subprocess.PIPE, text=True)


@contextmanager
def playing(role: str, **given: Any) -> Iterator[subprocess.Popen[str]]:
    """Let a role play for the body of the `with`."""
    started = play(role, **given)
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def heard(role: subprocess.Popen[str]) -> Any:
    """Return the next thing that a role says."""
    assert role.stdout is not None
    line = role.stdout.readline()
    if not line:
        sys.exit(f"bench: {role.args!r} ended with {role.wait()}")
    return json.loads(line)
