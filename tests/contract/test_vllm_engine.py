"""The engine on vLLM without vLLM: what it hands on and when, and what it makes of each answer."""

import itertools
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from openrl.tasks.journal import SampleJob
from openrl.tasks.messages import Sample
from openrl.workers.sampler.requests import Limits, read
from openrl.workers.sampler.versions import Versions

pytestmark = pytest.mark.vllm

LIMITS = Limits(vocab_size=100, max_context=1 << 20, cache_tokens=1 << 20, eos_token_ids=())
MAX_LORAS = 8


class Client:
    """Hands out a token a sequence whenever it is asked to; may end sequences too early."""

    def __init__(self) -> None:
        self.running: dict[str, SimpleNamespace] = {}
        self.most_adapters = 0

    def generate(self, name, prompt, params, *, adapter, salt, key, hear):
        future: Future[None] = Future()
        self.running[name] = SimpleNamespace(adapter=adapter, hear=hear, future=future, left=params.max_tokens)
        return future

    def live(self) -> list[str]:
        """Return what runs, in the order in which it came."""
        self.running = {name: one for name, one in self.running.items() if not one.future.cancelled()}
        adapters = {one.adapter for one in self.running.values() if one.adapter}
        self.most_adapters = max(self.most_adapters, len(adapters))
        return list(self.running)

    def draw(self) -> None:
        from vllm.logprobs import FlatLogprobs

        for name in self.live():
            one = self.running[name]
            found = FlatLogprobs()
            found.append_fast([7], [-0.5], iter([0]), [None])
            one.hear(SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7], logprobs=found)]))

    def end(self, name: str) -> None:
        from openrl.workers.sampler.vllm_client import ENDED

        self.running.pop(name).hear(ENDED)


def engine(*, slots: int = 64, max_idle: int = 2):
    from openrl.workers.sampler import vllm_engine

    client = Client()
    loads: list[str] = []

    def load(directory: str) -> str:
        loads.append(directory)
        return directory

    versions: Versions[str] = Versions(load, max_idle=max_idle, beside=False)
    clock = SimpleNamespace(now=0.0)
    places = vllm_engine.AdapterPlaces(MAX_LORAS, clock=lambda: clock.now)
    made = vllm_engine.VllmEngine(client, versions, lambda tokens: "", num_slots=slots, places=places)
    return made, client, versions, clock


_NUMBERS = itertools.count()


def ask(tenant: str, adapter: str = "", **fields):
    message = Sample(**({"adapter_dir": adapter, "prompt": (1, 2), "num_samples": 1, "seed": 1} | fields))
    return read(SampleJob(tenant=tenant, request_id=f"r{next(_NUMBERS)}", message=message, submitted=0.0), LIMITS)


def test_a_short_request_is_served_beside_more_endless_adapters_of_another_tenant_than_a_batch_holds():
    running, client, versions, _clock = engine()
    for number in range(MAX_LORAS):
        running.add(ask("a", f"a/{number}", max_tokens=100_000))
    for _ in range(3):
        client.draw()
        running.step()
    assert len(client.live()) == MAX_LORAS
    short = ask("b", "b/0", max_tokens=3)
    running.add(short)
    ended = []
    for _ in range(20):
        client.draw()
        ended += running.step()
        assert len(versions.resident) <= MAX_LORAS + 2
    assert [one.request for one in ended] == [short] and ended[0].result.sequences[0].tokens == [7, 7, 7]
    assert client.most_adapters == MAX_LORAS


def test_more_adapters_than_a_batch_holds_take_turns_and_each_gets_on():
    running, client, versions, clock = engine()
    asked = [ask("a", f"a/{number}", max_tokens=100_000) for number in range(MAX_LORAS + 3)]
    for one in asked:
        running.add(one)
    for _ in range(60):
        client.draw()
        running.step()
        clock.now += 1.0
    assert all(running.num_drawn(one) >= 10 for one in asked)
    assert client.most_adapters == MAX_LORAS
    assert len(versions.resident) <= MAX_LORAS + 2
    running.drop(asked)
    assert len(versions.resident) == 2 and not client.live()


def test_a_sequence_that_vllm_ends_too_early_goes_on_and_one_without_any_token_fails():
    running, client, _, _ = engine()
    whole = ask("a", max_tokens=4)
    running.add(whole)
    running.step()
    client.draw()
    client.draw()
    running.step()
    client.end(*client.live())
    running.step()
    running.step()
    client.draw()
    client.draw()
    [ended] = running.step()
    assert ended.result.sequences[0].tokens == [7] * 4

    running.add(ask("a", max_tokens=4))
    running.step()
    client.end(*client.live())
    [failed] = running.step()
    assert failed.result is None and "ended a sequence without a token" in failed.error
    assert not running.requests
