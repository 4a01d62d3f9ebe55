"""Streams whose tokens get lost, or come twice: a test plays the sampler."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from openrl.tasks.drafts import Draft, Publisher
from openrl.tasks.journal import Journal
from openrl.tasks.operations import PROTOBUF, Outcome
from openrl.tasks.ownership import Lease
from openrl.tasks.wire import codec
from tests.openai.conftest import NAME, Service


def played(service: Service, drafts: list[Draft], tokens: list[int]) -> list[Any]:
    """Stream while a test plays the sampler: it publishes `drafts`, and commits `tokens`."""
    stream = service.client().completions.create(model=NAME, prompt="a", max_tokens=4, stream=True)
    with Lease(service.store, "played", kind="sampler", slug=service.model.slug) as lease:
        journal = Journal(service.store)
        (job,) = journal.take_samples(service.model.slug, lease, limit=1)
        send = Publisher(service.store).to_listener(job)
        for draft in drafts:
            send(draft)
        chunks = [next(iter(stream)).choices[0].text] if drafts else []
        sequence = codec.SampledSequence(tokens=tokens, logprobs=[-1.0] * len(tokens), stop_reason="length")
        journal.commit_sample(
            lease, job, Outcome(result=codec.encode_sample_response([sequence]), content_type=PROTOBUF)
        )
        return [*chunks, *(chunk.choices[0].text for chunk in stream)]


def draft(position: int, token: int, ended: str = "") -> Draft:
    return Draft(0, position, token, -1.0, (), ended)


def test_tokens_that_went_unheard_come_with_the_result(api: Service) -> None:
    assert "".join(played(api, [], [*b"wxyz"])) == "wxyz"
    assert "".join(played(api, [draft(0, ord("w")), draft(2, ord("y"))], [*b"wxyz"])) == "wxyz"


def test_tokens_that_are_drawn_anew_are_not_told_again(api: Service) -> None:
    again = [draft(0, ord("w")), draft(1, ord("x")), draft(0, ord("w")), draft(1, ord("x")), draft(2, ord("y"))]
    assert "".join(played(api, again, [*b"wxyz"])) == "wxyz"


def test_a_stream_that_told_otherwise_than_the_result_ends_with_an_error(api: Service) -> None:
    with pytest.raises(openai.APIError, match="another drew other tokens"):
        played(api, [draft(0, ord("v"))], [*b"wxyz"])
