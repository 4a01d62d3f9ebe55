"""vLLM asleep between turns: its real calls and scheduler, on a CPU, where only the memory itself is missing."""

import asyncio
import inspect
import json
import time
from concurrent.futures import Future
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from openrl.tasks.errors import InvalidRequest, OperationFailed
from openrl.tasks.journal import SampleJob
from openrl.tasks.messages import Sample
from openrl.workers.sampler.requests import read
from openrl.workers.sampler.settings import SamplerSettings
from tests.contract.bases import Base

pytestmark = pytest.mark.vllm

SETTINGS = SamplerSettings(engine="vllm", slots=4, kv_tokens=2048, max_loras=2, max_lora_rank=8)
RESIDUE = "OPENRL_TEST_RESIDUE"


class Shared:
    """An accelerator that others share, as far as an engine sees it."""

    shared = True

    def __init__(self) -> None:
        self.pids, self.parts = (), []

    def name_processes(self, *pids: int) -> None:
        self.pids = pids

    def add(self, parkable) -> None:
        self.parts.append(parkable)


@pytest.fixture(scope="module")
def residue(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("residue") / "bytes"


@pytest.fixture(scope="module")
def sharing(tmp_path_factory, residue: Path):
    """An engine on vLLM whose workers remember whether they sleep, its limits, base, and accelerator."""
    from openrl.workers.sampler import vllm_runner
    from openrl.workers.sampler.tokenizer import tokenizer_of
    from openrl.workers.sampler.versions import Versions
    from openrl.workers.sampler.vllm_client import Client
    from openrl.workers.sampler.vllm_engine import VllmEngine

    base, accelerator = Base(tmp_path_factory.mktemp("base"), tied=True), Shared()
    config = json.loads((base.path / "config.json").read_text())
    arguments = replace(
        vllm_runner.arguments(str(base.path), config, SETTINGS), worker_extension_cls="tests.contract.asleep.Asleep"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RESIDUE, str(residue))
        client = Client(arguments)
    load = vllm_runner.version_loader(base.data_dir, client, digest="", max_rank=8)
    versions = Versions(load, max_idle=2, unload=client.remove_adapter, beside=False)
    places = vllm_runner.AdapterPlaces(SETTINGS.max_loras)
    engine = VllmEngine(client, versions, tokenizer_of(str(base.path)), num_slots=SETTINGS.slots, places=places)
    vllm_runner.share(accelerator, client, engine)
    yield engine, vllm_runner._limits(str(base.path), config, client), base, accelerator
    client.close()


def asked(limits, number: int, adapter_dir: str, *, max_tokens: int = 200):
    fields_given = {"prompt": tuple(b"the quick brown"), "num_samples": 2, "max_tokens": max_tokens, "seed": number}
    message = Sample(adapter_dir=adapter_dir, stop_at_eos=False, prompt_logprobs=True, **fields_given)
    return read(SampleJob(tenant="local", request_id=f"r{number}", message=message, submitted=0.0), limits)


def drawn(engine, requests, *, between=lambda step: None):
    for one in requests:
        engine.add(one)
    ended, step = {}, 0
    while engine.requests:
        between(step)
        for one in engine.step():
            assert one.result is not None, one.error
            ended[one.request.job.request_id] = (
                [list(each.tokens) for each in one.result.sequences],
                [round(value, 3) for value in one.result.prompt_logprobs[1:]],
            )
        step += 1
    return ended


def test_what_is_called_of_vllm_is_what_this_vllm_has():
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    calls = {"sleep": {"level": 1, "mode": "abort"}, "wake_up": {}, "collective_rpc": {"method": "openrl_memory"}}
    for name, arguments in calls.items():
        found = getattr(AsyncLLM, name)
        inspect.signature(found).bind(None, **arguments)
        assert asyncio.iscoroutinefunction(found)
    assert inspect.signature(AsyncLLM.wake_up).return_annotation in (bool, "bool"), "it tells whether all is there"
    assert {"enable_sleep_mode", "sleep_mode_offload_cudagraph"} <= {one.name for one in fields(AsyncEngineArgs)}


def test_what_counts_a_gpus_memory_reads_what_this_vllm_keeps():
    from vllm.device_allocator import AllocationData

    assert {"handle", "is_asleep"} <= {one.name for one in fields(AllocationData)}
    assert "self.pointer_to_data: dict[int, AllocationData]" in _source("device_allocator/cumem.py")


def _source(name: str) -> str:
    import vllm

    return (Path(vllm.__file__).parent / name).read_text()


def test_a_cpu_can_not_sleep_and_vllm_is_not_started_there(tmp_path: Path):
    from openrl.workers.sampler import vllm_runner
    from openrl.workers.sampler.vllm_client import CannotStart

    base = Base(tmp_path, tied=True)
    with pytest.raises(CannotStart, match="Sleep mode"):
        vllm_runner.runner(str(base.path), base.data_dir, SETTINGS, accelerator=Shared())


def test_what_sleeps_at_every_few_steps_draws_what_it_draws_undisturbed(sharing, residue: Path):
    engine, limits, base, accelerator = sharing
    residue.write_text("0")
    assert set(accelerator.pids) == set(engine.pids)
    [parkable] = accelerator.parts
    adapter = base.save("a1", seed=3)
    requests = [("", 1), (adapter, 2), ("", 3)]
    alone = drawn(engine, [asked(limits, number, name) for name, number in requests])
    slept = []

    def sleep(step: int) -> None:
        if step % 4 == 3 and len(slept) < 6:
            parkable.park()
            parkable.park()
            assert parkable.resident_bytes == 0
            slept.append(sum(len(group.running) for group in engine._groups))
            parkable.restore()
            parkable.restore()
            assert parkable.resident_bytes == 1000

    assert drawn(engine, [asked(limits, number, name) for name, number in requests], between=sleep) == alone
    assert len(slept) == 6 and max(slept) >= 2, "something ran when it was sent to sleep"


def test_what_was_delivered_before_a_sleep_is_kept_and_sequences_keep_their_order(sharing, residue: Path):
    from openrl.workers.sampler.vllm_engine import BUNDLE

    engine, limits, _, accelerator = sharing
    residue.write_text("0")
    [parkable] = accelerator.parts
    request = asked(limits, 4, "", max_tokens=900)
    engine.add(request)
    [group] = engine._groups
    while group.num_drawn < 2:
        engine.step()
    deadline, had = time.monotonic() + 30, [len(one.tokens) for one in group._all]
    while engine._heard.qsize() < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    parkable.park()
    parkable.restore()
    engine.wake()
    engine.step()
    more = [len(one.tokens) - before for one, before in zip(group._all, had, strict=True)]
    assert min(more) >= BUNDLE, "both had delivered bundles"
    assert [one.index for one in group.running] == [0, 1]
    engine.drop([request])


def test_turns_that_are_too_short_to_draw_a_token_still_bring_every_sequence_to_its_end(sharing, residue: Path):
    engine, limits, base, accelerator = sharing
    residue.write_text("0")
    [parkable] = accelerator.parts
    adapter = base.save("a2", seed=4)
    requests = [("", 5), (adapter, 6)]
    alone = drawn(engine, [asked(limits, number, name, max_tokens=6) for name, number in requests])

    def sleep(step: int) -> None:
        assert step < 200, "a sequence stands still"
        parkable.park()
        parkable.restore()
        engine.wake()

    asked_again = [asked(limits, number, name, max_tokens=6) for name, number in requests]
    assert drawn(engine, asked_again, between=sleep) == alone


def test_more_than_a_residue_beside_its_own_memory_is_a_park_that_failed(sharing, residue: Path):
    from openrl.workers.sampler.vllm_parking import RESIDUE_BYTES, ParkingError

    [parkable] = sharing[3].parts
    residue.write_text(str(RESIDUE_BYTES + 1))
    with pytest.raises(ParkingError, match=f"{RESIDUE_BYTES + 1} others"):
        parkable.park()
    assert parkable.resident_bytes == 1000, "nothing counts as parked"


class Failing:
    """A client whose calls end as they are told."""

    def __init__(self, **answers) -> None:
        self.answers = {"collective_rpc": [(8, 0)], "sleep": None, "wake_up": True} | answers
        self.vllm = SimpleNamespace(**{name: self._call(name) for name in self.answers})
        self.pids, self.levels = (7,), []

    def _call(self, name: str):
        def call(*args, **options) -> str:
            if name == "sleep":
                self.levels.append(options["level"])
            return name

        return call

    def do(self, name: str) -> Future:
        answer = self.answers[name]
        future: Future = Future()
        if isinstance(answer, Exception):
            future.set_exception(answer)
        elif answer is not ...:
            future.set_result(answer)
        return future


@pytest.mark.parametrize(
    ("answers", "what"),
    [
        ({"sleep": RuntimeError("no host memory")}, "could not fall asleep: no host memory"),
        ({"sleep": ...}, "did not fall asleep within"),
        ({}, "8 bytes of its own"),
    ],
)
def test_a_sleep_that_fails_hangs_or_frees_nothing_is_told(answers, what: str):
    from openrl.workers.sampler.vllm_parking import ParkingError, VllmParking

    stops = []
    parkable = VllmParking(Failing(**answers), stopped=lambda: stops.append(1), timeout_s=0.05)
    with pytest.raises(ParkingError, match=what):
        parkable.park()
    assert parkable.resident_bytes == 8 and stops


def test_a_wake_up_that_leaves_a_part_asleep_is_told():
    from openrl.workers.sampler.vllm_parking import ParkingError, VllmParking

    client = Failing()
    parkable = VllmParking(client, stopped=lambda: None)
    client.answers["collective_rpc"] = [(0, 0)]
    parkable.park()
    client.answers["wake_up"] = False
    with pytest.raises(ParkingError, match="still asleep"):
        parkable.restore()
    assert parkable.resident_bytes == 0


def test_what_can_put_nothing_aside_is_refused_at_the_start():
    from openrl.workers.sampler.vllm_parking import ParkingError, VllmParking

    with pytest.raises(ParkingError, match="needs a GPU"):
        VllmParking(Failing(collective_rpc=[(0, 0)]), stopped=lambda: None)


def test_who_leaves_keeps_no_copy_of_the_weights():
    from openrl.workers.sampler.vllm_parking import VllmParking

    client = Failing()
    parkable = VllmParking(client, stopped=lambda: None)
    client.answers["collective_rpc"] = [(0, 0)]
    parkable.discard()
    parkable.discard()
    assert parkable.resident_bytes == 0 and client.levels == [2]


def test_what_only_took_too_long_at_the_start_is_tried_again_and_what_can_not_sleep_is_not():
    from openrl.workers.sampler import vllm_runner

    def share(answer) -> None:
        vllm_runner.share(Shared(), Failing(collective_rpc=answer), SimpleNamespace(stopped=lambda: None))

    with pytest.raises(OperationFailed, match="did not count its memory within"):
        share(TimeoutError())
    with pytest.raises(InvalidRequest, match="take stays"):
        share([(0, 0)])
