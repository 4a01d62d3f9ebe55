"""A request that can be carried out: its weights found, prompts tokenised, everything checked, nothing submitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from openrl.app import checks
from openrl.app.context import model_of, services
from openrl.app.greenlets import off_loop
from openrl.app.openai.asked import Asked, in_our_words
from openrl.app.openai.errors import Refused, refused
from openrl.app.openai.models import sampler_of
from openrl.app.openai.tokenizer import Tokenizer
from openrl.tasks.errors import InvalidRequest
from openrl.tasks.messages import Sample
from openrl.tasks.records import BaseModel, Sampler

LARGE_CHARS = 64 << 10
"""A text over this size is tokenised off the event loop."""

MAX_TOKENS = 1 << 22
"""Of all prompts of a request together; each takes about 100 bytes until it is submitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt: its tokens, its text, and where in it each token begins; of a list of tokens only these are known."""

    ids: tuple[int, ...]
    text: str | None = None
    starts: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A request that can be carried out, and one sample for each of its prompts."""

    asked: Asked
    sampler: Sampler
    tokenizer: Tokenizer
    prompts: tuple[Prompt, ...]
    samples: tuple[Sample, ...]


def plan(asked: Asked) -> Plan:
    """Find the weights, tokenise, and check everything; nothing is submitted yet.

    Raises:
        NotFound, InvalidRequest, NotServed: it can't be carried out.
    """
    sampler = sampler_of(asked.model)
    model = model_of(sampler)
    tokenizer = services().tokenizers.of(model)
    prompts = _prompts(asked, tokenizer, model)
    samples = tuple(_sample(asked, sampler, prompt, model) for prompt in prompts)
    return Plan(asked=asked, sampler=sampler, tokenizer=tokenizer, prompts=prompts, samples=samples)


def _prompts(asked: Asked, tokenizer: Tokenizer, model: BaseModel) -> tuple[Prompt, ...]:
    if asked.messages:
        large = sum(len(message["content"]) for message in asked.messages) > LARGE_CHARS
        return (_named("messages", off_loop, _of_messages, asked, tokenizer, model, large=large),)
    large = sum(len(prompt) for prompt in asked.prompts if isinstance(prompt, str)) > LARGE_CHARS
    found: tuple[Prompt, ...] = _named("prompt", off_loop, _of_texts, asked, tokenizer, model, large=large)
    return found


def _of_messages(asked: Asked, tokenizer: Tokenizer, model: BaseModel) -> Prompt:
    text = tokenizer.render(asked.messages)
    _check_length("messages", text, tokenizer, model)
    return Prompt(ids=tokenizer.encode(text, special=False).ids, text=text)


def _of_texts(asked: Asked, tokenizer: Tokenizer, model: BaseModel) -> tuple[Prompt, ...]:
    found: list[Prompt] = []
    num_tokens = 0
    for prompt in asked.prompts:
        found.append(_of_text(prompt, tokenizer, model) if isinstance(prompt, str) else Prompt(ids=prompt))
        num_tokens += len(found[-1].ids)
        if num_tokens > MAX_TOKENS:
            raise InvalidRequest(f"all entries together have over {MAX_TOKENS} tokens: send fewer at once")
    return tuple(found)


def _of_text(text: str, tokenizer: Tokenizer, model: BaseModel) -> Prompt:
    _check_length("prompt", text, tokenizer, model)
    encoded = tokenizer.encode(text, special=True)
    return Prompt(ids=encoded.ids, text=text, starts=encoded.starts)


def _check_length(field: str, text: str, tokenizer: Tokenizer, model: BaseModel) -> None:
    """Refuse what is far too long before all of it is tokenised: that takes 250 bytes of memory a token."""
    if tokenizer.exceeds(text, model.max_context):
        raise refused(
            f"{field} has over {2 * model.max_context} tokens: the model's context holds {model.max_context}",
            field,
            "context_length_exceeded",
        )


def _named(field: str, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return `work(...)`; a refusal names the field."""
    try:
        return work(*args, **options)
    except Refused:
        raise
    except InvalidRequest as unfit:
        raise refused(f"{field}: {unfit}", field) from unfit


def _sample(asked: Asked, sampler: Sampler, prompt: Prompt, model: BaseModel) -> Sample:
    scored = asked.echo and asked.logprobs is not None
    sample = Sample(
        adapter_dir=sampler.adapter_dir,
        weights_digest=sampler.weights_digest,
        prompt=prompt.ids,
        num_samples=asked.n,
        # The service draws at least one token; whoever wants none is shown none.
        max_tokens=None if asked.max_tokens is None else max(1, asked.max_tokens),
        seed=asked.seed,
        stop_strings=asked.stops,
        temperature=asked.temperature,
        top_p=asked.top_p,
        prompt_logprobs=scored,
        topk_prompt_logprobs=asked.logprobs or 0 if scored else 0,
        topk_sample_logprobs=asked.logprobs or 0,
        listener=services().listener.name if asked.stream else "",
    )
    _check_room(sample, model)
    try:
        checks.check_sample(sample, model)
    except InvalidRequest as unfit:
        text = in_our_words(str(unfit))
        raise refused(text, text.partition(" ")[0]) from unfit
    return sample


def _check_room(sample: Sample, model: BaseModel) -> None:
    room = model.max_context - len(sample.prompt)
    if (sample.max_tokens or 1) > room:
        raise refused(
            f"max_tokens is {'absent' if sample.max_tokens is None else sample.max_tokens}, and the prompt's "
            f"{len(sample.prompt)} tokens leave room for {max(0, room)}: the model's context holds {model.max_context}",
            "max_tokens" if room > 0 else "prompt",
            "context_length_exceeded",
        )
