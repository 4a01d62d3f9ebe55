"""Resident versions: by directory, recent ones kept, used ones pinned."""

import pytest

from openrl.tasks.errors import NotFound, OperationFailed
from openrl.workers.sampler.versions import Versions


def test_the_same_directory_is_loaded_once_while_resident():
    loads = []
    versions = Versions(lambda name: loads.append(name) or object(), max_idle=2)
    assert versions.acquire("a") is versions.acquire("a")
    assert loads == ["a"]


def test_the_base_needs_no_adapter():
    versions = Versions(lambda name: pytest.fail("loaded"), max_idle=2)
    assert versions.acquire("") is None
    versions.release("")


def test_the_least_recently_used_idle_version_is_evicted_and_loaded_again_on_demand():
    loads = []
    versions = Versions(lambda name: loads.append(name) or name, max_idle=2)
    for name in ("a", "b", "a", "c"):
        versions.acquire(name)
        versions.release(name)
    assert versions.resident == ("a", "c")
    assert versions.acquire("b") == "b"
    assert loads == ["a", "b", "c", "b"]


def test_a_version_in_use_is_never_evicted():
    versions = Versions(lambda name: [name], max_idle=1)
    held = versions.acquire("a")
    for name in "bcdef":
        versions.acquire(name)
        versions.release(name)
    assert versions.acquire("a") is held


def test_a_version_that_is_gone_or_broken_fails_by_name_and_is_tried_again():
    answers = [FileNotFoundError("adapter_model.safetensors"), ValueError("bad header"), None]

    def load(name):
        answer = answers.pop(0)
        if answer:
            raise answer
        return name

    versions = Versions(load, max_idle=1)
    with pytest.raises(NotFound, match="runs/x' are gone"):
        versions.acquire("runs/x")
    with pytest.raises(OperationFailed, match="runs/x' can't be loaded: bad header"):
        versions.acquire("runs/x")
    assert versions.acquire("runs/x") == "runs/x"
