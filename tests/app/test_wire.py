import subprocess
import sys

import pytest
import zstandard
from flask import Flask

from openrl.app.factory import create_app
from openrl.app.settings import AppSettings
from openrl.app.wire import MAX_FRAMES, unpack
from openrl.tasks.errors import TooLarge, Undecodable
from openrl.tasks.store import Store
from tests.app.conftest import PROTOBUF, Api, Worker, forward_backward


def test_zstd_frames_come_back_whole_one_or_several() -> None:
    data = bytes(range(256)) * 5000
    frames = zstandard.compress(data) + zstandard.compress(b"tail")
    assert unpack(frames, 1 << 24) == data + b"tail"


def test_many_frames_are_refused_before_each_has_cost_a_decoder() -> None:
    frame = zstandard.compress(b"")
    assert unpack(frame * MAX_FRAMES, 1 << 20) == b""
    started = []
    with pytest.raises(Undecodable, match=f"over {MAX_FRAMES} zstd frames"):
        unpack(frame * 200_000, 1 << 20, started.append)
    assert len(started) == MAX_FRAMES


def test_bodies_beyond_what_a_process_holds_wait_and_use_nothing_up(store: Store, app: Flask, worker: Worker) -> None:
    limits = {"max_body_bytes": 1 << 16, "max_decoded_bytes": 1 << 18, "max_held_bytes": (1 << 16) + (1 << 18)}
    small = create_app(AppSettings(**limits), store=store)
    api = Api(small.test_client(), small.extensions["openrl"])
    run = api.run()
    packed = {**PROTOBUF, "Content-Encoding": "zstd"}
    body = zstandard.compress(forward_backward(run, 1))
    budget = api.services.bodies
    for left in (0, len(body) + 10):
        assert budget.take(limits["max_held_bytes"] - left)
        refused = api.send("/forward_backward", body, headers=packed)
        assert (refused.status_code, refused.get_json()["error"]["code"]) == (429, "overloaded")
        assert refused.headers["Retry-After"]
        budget.give_back(limits["max_held_bytes"] - left)
    api.ok(api.send("/forward_backward", body, headers=packed))
    assert [operation.kind for operation in worker.step()] == ["create_model", "forward_backward"]
    assert budget.take(limits["max_held_bytes"]), "a request that has ended holds nothing"


def test_a_bomb_is_refused_before_it_has_grown() -> None:
    bomb = zstandard.compress(bytes(1 << 28))
    with pytest.raises(TooLarge, match="1048576 bytes after zstd"):
        unpack(bomb, 1 << 20)


@pytest.mark.parametrize("broken", [b"not zstd at all", b"", zstandard.compress(bytes(range(256)) * 99)[:-5]])
def test_broken_zstd_is_undecodable(broken: bytes) -> None:
    with pytest.raises(Undecodable):
        unpack(broken, 1 << 20)


def test_the_api_starts_without_torch() -> None:
    check = "import sys, openrl.app.factory, openrl.app.gunicorn; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_the_master_process_loads_neither_flask_nor_redis() -> None:
    check = "import sys, openrl.app.__main__; sys.exit(bool({'flask', 'redis', 'celery'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", check], check=True)
