"""What is large is handled beside the event loop: other requests of the process get their turn meanwhile."""

from __future__ import annotations

import subprocess
import sys

from openrl.tasks.store import Store

SCRIPT = """
from gevent import monkey; monkey.patch_all()
import contextlib, hashlib, json, os, pathlib, sys
import gevent
from openrl.app.factory import create_app
from openrl.app.settings import AppSettings
from openrl.tasks import journal
from openrl.tasks.operations import PROTOBUF, Outcome
from openrl.tasks.ownership import Lease
from openrl.tasks.registry import Registry
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store
from openrl.tasks.wire import codec, openrl_pb2 as pb
from tests.app import conftest
import numpy as np

LARGE = 1 << 17
turns = []

@contextlib.contextmanager
def held_up(home, name, large):
    # The call stands still until another greenlet has had its turn; on the loop itself, that is for ever.
    gate, plain, met = monkey.get_original("_thread", "allocate_lock")(), getattr(home, name), []
    gate.acquire()
    def call(*args, **options):
        if large(*args, **options) and not met:
            met.append(1)
            gate.acquire()
        return plain(*args, **options)
    setattr(home, name, call)
    def another():
        while not met:
            gevent.sleep(0.001)
        turns.append(name)
        gate.release()
    other = gevent.spawn(another)
    try:
        yield
    finally:
        setattr(home, name, plain)
        other.kill()
        assert met, f"{name} was not called with anything large"

store = Store.connect(StoreSettings(redis_url=sys.argv[1], data_dir=pathlib.Path(sys.argv[2])))
Registry(store).add_model(conftest.MODEL)
app = create_app(AppSettings(), store=store)
api = conftest.Api(app.test_client(), app.extensions["openrl"])
api.services.doorbell.ring = lambda *ids, **how: None
run = api.run()
call = pb.ForwardBackwardCall.FromString(conftest.forward_backward(run, 1))
call.data.extend([call.data[0]] * 3000)

with held_up(journal, "encoded", lambda message: True), held_up(os, "fsync", lambda file: True):
    api.ok(api.send("/forward_backward", call.SerializeToString(), headers=conftest.PROTOBUF))

body = {"model_id": run, "seq_id": 2, "forward_input": {"data": [{"x": "y" * LARGE}]}}
for home, name, large in (
    (json, "loads", lambda text, **_: len(text) > LARGE),
    (hashlib, "sha256", lambda data=b"", **_: len(data) > LARGE),
):
    with held_up(home, name, large):
        assert api.post("/forward", body).status_code == 422
    body["seq_id"] += 1

with Lease(store, "w1", kind="trainer", slug=conftest.MODEL.slug) as lease:
    result = codec.encode_forward_backward_output([np.full(4, -1.0, np.float32)] * 8000, {"loss:sum": 1.0})
    assert len(result) > LARGE
    conftest.Worker(store, lease).step({"forward_backward": Outcome(result=result, content_type=PROTOBUF)})
with held_up(pathlib.Path, "read_bytes", lambda path: True):
    api.ok(api.poll(f"{run}:1"))
with held_up(json, "dumps", lambda value, **_: len(value.get("loss_fn_outputs", ())) == 8000):
    assert len(api.ok(api.poll(f"{run}:1"))["loss_fn_outputs"]) == 8000
assert turns == ["encoded", "fsync", "loads", "sha256", "read_bytes", "dumps"], turns
print("done")
os._exit(0)
"""


def test_another_greenlet_gets_its_turn_while_something_large_is_stowed_loaded_converted_or_refused(
    store: Store,
) -> None:
    command = [sys.executable, "-c", SCRIPT, store.settings.redis_url, str(store.settings.data_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.endswith("done\n"), done.stderr[-3000:]
    assert "Traceback" not in done.stderr, "a refused body is nothing for the log"
