"""Resident versions: by directory, recent ones kept, used ones pinned."""

from threading import Event

import pytest

from openrl.tasks.errors import NotFound, OperationFailed
from openrl.workers.sampler.versions import Versions


def test_the_same_directory_is_loaded_once_while_resident():
    loads = []
    versions = Versions(lambda name: loads.append(name) or object(), max_idle=2)
    assert versions.acquire("a").result() is versions.acquire("a").result()
    assert loads == ["a"]


def test_the_least_recently_used_idle_version_is_evicted_and_loaded_again_on_demand():
    loads = []
    versions = Versions(lambda name: loads.append(name) or name, max_idle=2)
    for name in ("a", "b", "a", "c"):
        versions.acquire(name).result()
        versions.release(name)
    assert versions.resident == ("a", "c")
    assert versions.acquire("b").result() == "b"
    assert loads == ["a", "b", "c", "b"]


def test_a_version_that_loads_keeps_nobody_waiting_who_asks_for_another():
    go = Event()
    versions = Versions(lambda name: go.wait(10) and name, max_idle=2)
    slow = versions.acquire("a")
    assert not slow.done() and versions.acquire("a") is slow
    go.set()
    assert slow.result() == "a"


def test_a_version_in_use_is_never_evicted():
    versions = Versions(lambda name: [name], max_idle=1)
    held = versions.acquire("a").result()
    for name in "bcdef":
        versions.acquire(name).result()
        versions.release(name)
    assert versions.acquire("a").result() is held


def test_a_version_that_nobody_has_used_for_a_while_leaves_and_is_loaded_again_on_demand():
    now, loads = [0.0], []
    versions = Versions(lambda name: loads.append(name) or name, max_idle=9, idle_s=60, clock=lambda: now[0])
    for name in ("used", "idle", "asked for again"):
        versions.acquire(name).result()
    for name in ("idle", "asked for again"):
        versions.release(name)
    now[0] = 59
    versions.tidy()
    assert len(versions.resident) == 3
    versions.acquire("asked for again").result()
    now[0] = 60
    versions.tidy()
    assert versions.resident == ("used", "asked for again")
    assert versions.acquire("idle").result() == "idle"
    assert loads == ["used", "idle", "asked for again", "idle"]


DIRECTORY = "tenants/local/runs/s-1_train_0/sampler_weights/step-7.77"


def test_a_version_that_is_gone_or_broken_fails_by_name_and_is_tried_again(caplog):
    answers = [FileNotFoundError("/data/tenants/x"), ValueError("/data/tenants: bad header"), None]

    def load(name):
        answer = answers.pop(0)
        if answer:
            raise answer
        return name

    versions = Versions(load, max_idle=1)
    for kind, words in ((NotFound, "is gone"), (OperationFailed, "can't be loaded")):
        with pytest.raises(kind, match=f"'tinker://s-1:train:0/sampler_weights/step-7' {words}") as caught:
            versions.acquire(DIRECTORY).result()
        versions.release(DIRECTORY)
        text = str(caught.value)
        assert "/data" not in text and "tenants" not in text and ".77" not in text
        error_id = text.partition("(error ")[2].partition(")")[0]
        assert error_id and error_id in caplog.text
    assert "bad header" in caplog.text and DIRECTORY in caplog.text
    assert versions.acquire(DIRECTORY).result() == DIRECTORY


def test_the_next_version_of_a_run_that_is_here_is_loaded_before_it_is_asked_for_and_no_other():
    loads = []
    versions = Versions(lambda name: loads.append(name) or name, max_idle=2)
    versions.foresee("run/1")
    assert versions.resident == ()
    versions.acquire("run/1").result()
    versions.foresee("other/1")
    versions.foresee("run/2")
    versions.foresee("run/2")
    assert versions.acquire("run/2").result() == "run/2"
    assert loads == ["run/1", "run/2"]


def test_a_version_that_was_loaded_in_vain_is_tried_again_when_it_is_asked_for():
    loads = []

    def load(name):
        loads.append(name)
        if loads.count(name) == 1 and name == "run/2":
            raise FileNotFoundError(name)
        return name

    versions = Versions(load, max_idle=2)
    versions.acquire("run/1").result()
    versions.foresee("run/2")
    assert isinstance(versions.acquire("run/2").exception(10), NotFound)  # the same try, which may still be under way
    versions.release("run/2")
    assert versions.acquire("run/2").result(10) == "run/2"
    assert loads == ["run/1", "run/2", "run/2"]
