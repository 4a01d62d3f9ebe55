"""Proof of death, with real processes: a turn's holder is gone when every process of it is, and not before."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from openrl.timeslice.holder import Holder, Place, Process

PARENT = "%s sleep 600 & echo $!; wait"


class Worker:
    """A process in a session of its own, with an engine process under it."""

    def __init__(self, *, engine_leaves: bool = False) -> None:
        command = ["sh", "-c", PARENT % ("setsid" if engine_leaves else "")]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert self.process.stdout
        self.engine = int(self.process.stdout.readline())
        self.pid = self.process.pid
        while engine_leaves and os.getsid(self.engine) != self.engine:
            time.sleep(0.01)

    def kill_parent(self) -> None:
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        self.kill_parent()
        try:
            os.kill(self.engine, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.stdout.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Worker]]:
    workers: list[Worker] = []

    def new(**options: bool) -> Worker:
        workers.append(Worker(**options))
        return workers[-1]

    yield new
    for worker in workers:
        worker.end()


def gone_soon(holder: Holder) -> bool:
    """Give the kernel the moment that it takes to end a process that was killed."""
    until = time.monotonic() + 60
    while not (gone := holder.is_gone()) and time.monotonic() < until:
        time.sleep(0.01)
    return gone


def test_a_parent_that_was_killed_is_not_gone_until_its_engine_is(start):
    worker = start()
    holder = Holder.of(worker.pid)
    assert holder.group == "session" and not holder.is_gone()
    worker.kill_parent()
    assert not holder.is_gone(), "the engine still has the accelerator"
    os.kill(worker.engine, signal.SIGKILL)
    assert gone_soon(holder)


def test_an_engine_that_left_the_session_counts_where_it_was_named(start):
    worker = start(engine_leaves=True)
    bare = Holder.of(worker.pid)
    named = replace(bare, others=(Process.of(worker.engine),))
    worker.kill_parent()
    assert gone_soon(bare) and not named.is_gone()
    os.kill(worker.engine, signal.SIGKILL)
    assert gone_soon(named)


def test_a_stopped_process_is_not_gone(start):
    worker = start()
    holder = Holder.of(worker.pid)
    os.kill(worker.pid, signal.SIGSTOP)
    os.kill(worker.engine, signal.SIGKILL)
    assert not holder.is_gone()


def test_a_killed_process_that_nobody_has_waited_for_is_gone(start):
    worker = start()
    holder = Holder.of(worker.pid)
    os.kill(worker.engine, signal.SIGKILL)
    os.kill(worker.pid, signal.SIGKILL)
    assert gone_soon(holder)
    assert os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT) is not None, "it is a zombie"


def test_another_process_under_the_same_pid_is_not_the_holder(start):
    worker = start()
    present = Holder.of(worker.pid)
    earlier = replace(present, leader=Process(worker.pid, present.leader.start - 1))
    assert earlier.is_gone() and not present.is_gone()


@pytest.mark.parametrize("field", ["machine", "pid_namespace"])
def test_of_another_place_nothing_is_known(start, field: str):
    worker = start()
    here = Holder.of(worker.pid)
    elsewhere = replace(here, place=replace(here.place, **{field: "pid:[7]"}))
    worker.end()
    assert gone_soon(here) and not elsewhere.is_gone()


MACHINE, OUTSIDE = "0123456789abcdef" * 2, "pid:[4026531836]"


@pytest.mark.parametrize(
    ("machine", "namespace", "gone"),
    [(MACHINE, OUTSIDE, True), (MACHINE, "pid:[4026532000]", False), ("", OUTSIDE, False), ("a" * 32, OUTSIDE, False)],
)
def test_another_start_of_the_same_machine_ended_everything_that_was_not_in_a_container(machine, namespace, gone):
    here = Place(machine=MACHINE, boot="second", pid_namespace=OUTSIDE)
    assert Place(machine=machine, boot="first", pid_namespace=namespace).ended_before(here) is gone
    assert not here.ended_before(here)


def test_a_process_that_leads_nothing_can_not_hold(start):
    worker = start()
    with pytest.raises(ValueError, match="setsid"):
        Holder.of(worker.engine)


def test_a_holder_survives_the_store(start):
    worker = start()
    holder = replace(Holder.of(worker.pid), others=(Process.of(worker.engine),))
    assert Holder.from_json(holder.to_json()) == holder
