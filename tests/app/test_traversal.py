"""Names and ids that would lead out of the data directory, in every place of every route: no file there is touched."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Response

from openrl import tasks
from openrl.app.context import EXTENSION
from tests.app import walk
from tests.app.conftest import MODEL, Api

SECRET = "hidden-from-everybody"

OUT = [
    "../../../../secret.txt",
    "..%2f..%2f..%2fsecret.txt",
    "%2e%2e/%2e%2e/secret.txt",
    "..%252f..%252fsecret.txt",
    "....//....//secret.txt",
    "..\\..\\secret.txt",
    "%c0%ae%c0%ae%c0%af",
    "\u2025/\u2025/secret.txt",
    "\uff0e\uff0e\uff0fsecret.txt",
    "/etc/passwd",
    "file:///etc/passwd",
    "//etc/passwd",
    ".",
    "..",
    "@0",
    "ck%00.txt",
    "ck\x00",
    "ck%0d%0aX-Injected: yes",
    "%ff%fe",
    "~root",
    "$HOME",
    "*",
    "x" * 5000,
    "../" * 500,
]

EVENTS = {"open", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.listdir", "os.scandir", "os.link", "os.symlink"}


PROGRAMS = [
    Path(each).resolve()
    for each in (sys.prefix, sys.base_prefix, str(Path(tasks.__file__).resolve().parent.parent), MODEL.path)
]
"""Code is loaded when it is first needed, scripts for the store too; and the base model is the operator's."""


class Watch:
    """Writes down which paths this process touches, while it is on. Such a hook can't be taken out again."""

    def __init__(self) -> None:
        self.on = False
        self.touched: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and event in EVENTS:
            self.touched += [str(each) for each in arguments if isinstance(each, str | Path)]


@pytest.fixture(scope="module")
def watch() -> Watch:
    return Watch()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a file beside the data directory that is nobody's business."""
    directory = tmp_path_factory.mktemp("home")
    (directory / "secret.txt").write_text(SECRET)
    (directory / "data").mkdir()
    return directory


@pytest.fixture(scope="module")
def api(store_url: str, home: Path) -> Iterator[tuple[Api, walk.Things]]:
    with walk.serving(store_url, home / "data") as (app, store):
        api = Api(app.test_client(), app.extensions[EXTENSION])
        with walk.working(store) as worker:
            its = walk.furnished(api, worker, "local")
        api.ok(api.get(f"/training_runs/{its.run}/checkpoints/external_weights/ck/external_weights_urls"))
        yield api, its


def check(watch: Watch, home: Path, send: Callable[[], Any]) -> None:
    """Check that a request is refused or empty, and touches no file but under the data directory."""
    watch.touched, watch.on = [], True
    try:
        answer = send()
        said = answer.get_data()
    finally:
        watch.on = False
    assert answer.status_code in (200, 400, 401, 403, 404, 405, 410, 413, 422), (answer.status_code, said)
    assert SECRET.encode() not in said and b"root:x:" not in said and b"Traceback" not in said
    assert "X-Injected" not in answer.headers and len(said) < 20_000
    for path in map(Path, watch.touched):
        allowed = (home / "data", *PROGRAMS)
        assert not path.is_absolute() or any(path.resolve().is_relative_to(each) for each in allowed), path


@pytest.mark.parametrize("route", [route for route, row in walk.ROWS.items() if row is not walk.nothing])
def test_no_id_or_name_leads_out_of_the_data_directory(
    api: tuple[Api, walk.Things], watch: Watch, home: Path, route: str
) -> None:
    client, its = api
    mine, row = walk.Mine(session=its.session, run=its.run), walk.ROWS[route]
    for text in OUT:
        for things in walk.poisoned(its, text):
            for fair, ask in list(zip(row(its, mine), row(things, mine), strict=True))[:3]:
                if fair.path != ask.path or fair.json != ask.json or fair.body != ask.body:
                    check(watch, home, lambda ask=ask: walk.send(client, route, ask))
    assert sorted(path.name for path in home.iterdir()) == ["data", "secret.txt"]
    assert (home / "secret.txt").read_text() == SECRET


def test_the_watch_sees_what_is_opened(watch: Watch, home: Path) -> None:
    with pytest.raises(AssertionError, match=r"secret\.txt"):
        check(watch, home, lambda: (home / "secret.txt").read_text() and Response(status=404))
