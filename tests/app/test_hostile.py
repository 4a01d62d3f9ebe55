"""Bodies that mean harm: refused in one line, within bounds of memory, on every route that takes a body."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from openrl.app.context import EXTENSION
from tests.app import walk
from tests.app.conftest import Api

JSON = {"Content-Type": "application/json"}
PROTOBUF = {"Content-Type": "application/x-protobuf"}

MOST_MIB = 700
"""What all bombs together may add to the peak. The largest body alone may be 256 MiB once it is decompressed."""

BODIES: dict[str, tuple[bytes, dict[str, str]]] = {
    "a thousand lists": (b"[" * 1000 + b"]" * 1000, JSON),
    "a thousand objects": (b'{"a":' * 1000 + b"1" + b"}" * 1000, JSON),
    "a thousand levels in a field": (b'{"type":' + b"[" * 1000 + b"]" * 1000 + b"}", JSON),
    "a number of 10,000 digits": (b'{"type":' + b"9" * 10_000 + b"}", JSON),
    "a key twice": (b'{"type": "x", "type": "y"}', JSON),
    "a key twice further in": (b'{"type": {"a": 1, "b": {"c": 1, "c": 1}}}', JSON),
    "no UTF-8": (b'{"type": "\xff\xfe"}', JSON),
    "UTF-16": ('{"type": 1}'.encode("utf-16"), JSON | {"Content-Type": "application/json; charset=utf-8"}),
    "half an object": (b'{"type": ', JSON),
    "two objects": (b"{}{}", JSON),
    "a list": (b"[]", JSON),
    "a null": (b"null", JSON),
    "nothing": (b"", JSON),
    "plain text": (b"{}", {"Content-Type": "text/plain"}),
    "a form": (b"type=x", {"Content-Type": "application/x-www-form-urlencoded"}),
    "no type": (b"{}", {}),
    "a type of its own": (b"{}", {"Content-Type": "application/\xe9".encode("latin1").decode("latin1")}),
    "gzip": (b"\x1f\x8b\x08\x00", JSON | {"Content-Encoding": "gzip"}),
    "zstd that is none": (b"{}", JSON | {"Content-Encoding": "zstd"}),
    "broken protobuf": (b"\x0a\xff\xff\xff\xff\x0f", PROTOBUF),
}

UNREAD = {"POST /telemetry"}
BODILESS = {"POST /training_runs/{}/checkpoints/{}/{}/publish"}
ROUTES = [route for route in walk.ROWS if route.startswith(("POST", "PUT")) and route not in UNREAD | BODILESS]


@pytest.fixture(scope="module")
def api(store_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Api, walk.Things]]:
    with walk.serving(store_url, tmp_path_factory.mktemp("data")) as (app, store):
        client = Api(app.test_client(), app.extensions[EXTENSION])
        with walk.working(store) as worker:
            yield client, walk.furnished(client, worker, "local")


@pytest.mark.parametrize("route", ROUTES)
def test_a_body_that_cannot_be_meant_is_refused_in_a_line(api: tuple[Api, walk.Things], route: str) -> None:
    client, its = api
    path = route.partition(" ")[2]
    for part in (its.run if "training_runs" in path else its.session, "weights", its.name):
        path = path.replace("{}", part, 1)
    for name, (body, headers) in BODIES.items():
        answer = walk.send(client, route, walk.Ask(path=path, body=body, headers=headers))
        if name == "nothing":  # the same as an empty object, which some routes take
            assert answer.status_code in (200, 400, 422), (name, answer.status_code)
            continue
        assert answer.status_code in (400, 413, 422), (name, answer.status_code, answer.text)
        said = answer.get_json()["error"]["message"]
        assert said and "\n" not in said and len(said) < 500 and "Traceback" not in said, (name, said)


def test_bodies_far_larger_than_they_look_are_refused_in_bounded_memory(store_url: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.app.bombs", store_url, str(tmp_path)]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) == 15
    for row in rows:
        assert row["status"] in (400, 413, 422), row
        assert "Traceback" not in row["said"]
    assert sum(row["grew_mib"] for row in rows) < MOST_MIB, rows
