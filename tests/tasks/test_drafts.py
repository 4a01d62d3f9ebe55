"""Tokens on their way to whoever waits for them."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from openrl.tasks.drafts import Draft, Listener, Publisher
from openrl.tasks.messages import Sample
from openrl.tasks.operations import SampleJob
from openrl.tasks.store import Store

DRAFT = Draft(0, 3, 65, -0.5, [[65, -0.5], [66, -1.0]], "stop")  # type: ignore[list-item]


class Ear(queue.Queue[Draft]):
    """Keeps what it hears."""

    def hear(self, drafts: Sequence[Draft]) -> None:
        for draft in drafts:
            self.put(draft)


@pytest.fixture
def listeners(store: Store) -> Iterator[tuple[Listener, Listener]]:
    both = Listener(store), Listener(store)
    yield both
    for one in both:
        one.close()


def job(listener: Listener, request_id: str = "r", tenant: str = "ada") -> SampleJob:
    message = Sample(adapter_dir="", prompt=(1,), num_samples=1, listener=listener.name)
    return SampleJob(tenant=tenant, request_id=request_id, message=message, submitted=0.0)


def test_a_token_is_heard_by_the_process_that_its_sample_names_and_by_nobody_else(
    store: Store, listeners: tuple[Listener, Listener]
) -> None:
    mine, other = listeners
    right, wrong = Ear(), Ear()
    with mine.listen("ada", "r", right), other.listen("ada", "r", wrong), mine.listen("bob", "r", wrong):
        Publisher(store).to_listener(job(mine))(DRAFT)
        assert right.get(timeout=10) == DRAFT
        assert wrong.empty()


def test_tokens_of_one_sample_come_in_their_order(store: Store, listeners: tuple[Listener, Listener]) -> None:
    ear = Ear()
    with listeners[0].listen("ada", "r", ear):
        send = Publisher(store).to_listener(job(listeners[0]))
        for position in range(300):
            send(replace_position(position))
        assert [ear.get(timeout=10).position for _ in range(300)] == list(range(300))


def replace_position(position: int) -> Draft:
    return DRAFT._replace(position=position)


def test_what_nobody_listens_to_any_more_is_dropped(store: Store, listeners: tuple[Listener, Listener]) -> None:
    gone, ear = Ear(), Ear()
    with listeners[0].listen("ada", "gone", gone):
        pass
    with listeners[0].listen("ada", "r", ear):
        publisher = Publisher(store)
        publisher.to_listener(job(listeners[0], "gone"))(DRAFT)
        publisher.to_listener(job(listeners[0]))(DRAFT)
        assert ear.get(timeout=10) == DRAFT and gone.empty()


def test_a_store_that_does_not_answer_costs_the_tokens_and_nothing_else(
    store: Store, listeners: tuple[Listener, Listener], caplog: pytest.LogCaptureFixture
) -> None:
    broken = Store.connect(replace(store.settings, redis_url="unix:///nowhere.sock"))
    send = Publisher(broken).to_listener(job(listeners[0]))
    for _ in range(3):
        send(DRAFT)


def test_a_listeners_name_is_left_out_of_the_bytes_of_who_has_none() -> None:
    silent = Sample(adapter_dir="", prompt=(1,), num_samples=1)
    assert b"listener" not in silent.to_bytes()
    heard = replace(silent, listener="x")
    assert Sample.from_bytes(heard.to_bytes()) == heard != silent
