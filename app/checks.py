"""What a well-formed request must also satisfy before it is queued: pure checks against a model's limits.

Each names the field, the value and what would be right, and raises InvalidRequest; nothing is changed.
Tensors are looked at as whole arrays, never number by number. Knows no HTTP, no store and no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from openrl.tasks.errors import InvalidRequest, shown
from openrl.tasks.keys import NAME_RULE, is_name
from openrl.tasks.losses import INSTEAD, LOSSES, SEQUENCE_MASK, InputSpec, LossSpec
from openrl.tasks.messages import CreateModel, OptimStep, Sample
from openrl.tasks.records import FULL, BaseModel
from openrl.tasks.wire.codec import Datum, LossCall

MAX_RANK = 512
"""Adapters above this are hardly low-rank any more, and one run's moments would crowd out the others."""

MAX_SAMPLES = 1024
"""Continuations of one request; each is a row of the sampler's batch."""

MAX_STOPS = 64
"""Every stop is looked for after every token."""

MAX_TOPK = 1024
"""Candidates returned for each position; a result grows by 8 bytes for each."""

MAX_PROMPT_CELLS = 1 << 20
"""Numbers of one kind that are returned for all positions of a prompt."""


MAX_SAMPLE_CELLS = 1 << 22
"""Tokens and candidates that one request may draw; a result has 8 bytes for each."""


class Limits(Protocol):
    """The two limits of a base model that a request can overstep."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int: ...


# forward_backward --------------------------------------------------------------------------------


def check_forward_backward(call: LossCall, model: Limits) -> None:
    """Check loss, settings and every datum of a forward_backward or forward."""
    spec = LOSSES.get(call.loss_fn)
    if spec is None:
        advice = INSTEAD.get(call.loss_fn, f"served are {', '.join(LOSSES)}")
        raise InvalidRequest(f"loss_fn {shown(call.loss_fn)} is not served; {advice}")
    _check_settings(call.loss_fn, spec, call.loss_fn_config)
    if not call.data:
        raise InvalidRequest("data is empty; send at least one datum")
    for index, datum in enumerate(call.data):
        _check_datum(f"data[{index}]", datum, call.loss_fn, spec, model)
    _check_values(call.data, spec, model)


def _check_settings(loss_fn: str, spec: LossSpec, config: Mapping[str, float]) -> None:
    for name, value in config.items():
        setting = spec.config.get(name)
        if setting is None:
            allowed = ", ".join(spec.config) or "none"
            raise InvalidRequest(f"loss_fn_config[{shown(name)}] is no setting of {loss_fn}; allowed: {allowed}")
        if not setting.allows(value):
            raise InvalidRequest(f"loss_fn_config[{name!r}] is {value}; it must be {setting.range_text()}")


def _check_datum(where: str, datum: Datum, loss_fn: str, spec: LossSpec, model: Limits) -> None:
    """Check names, types and lengths, which cost nothing; the values follow for all datums at once."""
    num_tokens = len(datum.tokens)
    if not num_tokens:
        raise InvalidRequest(f"{where}.model_input is empty; it needs at least one token")
    if num_tokens > model.max_context:
        raise InvalidRequest(
            f"{where}.model_input has {num_tokens} tokens; the model's context holds {model.max_context}"
        )
    for name in datum.inputs:
        if name in spec.config:
            raise InvalidRequest(
                f"{where}.loss_fn_inputs[{name!r}] is a setting of {loss_fn}, not an input: "
                f"send loss_fn_config[{name!r}], one number for the whole call"
            )
        if name not in spec.inputs:
            raise InvalidRequest(
                f"{where}.loss_fn_inputs[{shown(name)}] is no input of {loss_fn}; it takes {', '.join(spec.inputs)}"
            )
    for name, wanted in spec.inputs.items():
        if name in datum.inputs:
            _check_layout(f"{where}.loss_fn_inputs[{name!r}]", datum.inputs[name], wanted, num_tokens)
        elif wanted.required:
            raise InvalidRequest(f"{where}.loss_fn_inputs[{name!r}] is missing; {loss_fn} needs it")
    _check_same_width(where, datum)


def _check_layout(field: str, array: np.ndarray, wanted: InputSpec, num_tokens: int) -> None:
    if array.dtype != wanted.dtype:
        raise InvalidRequest(f"{field} is {array.dtype}; it must be {wanted.dtype}")
    if array.ndim != 1 and not wanted.two_d:
        raise InvalidRequest(f"{field} has shape {list(array.shape)}; it must be [N], one number for each token")
    if len(array) != num_tokens:
        raise InvalidRequest(f"{field} has length {len(array)}; it must be {num_tokens}, as many as model_input tokens")
    if not array.size:
        raise InvalidRequest(f"{field} has shape {list(array.shape)}; K must be at least 1")


def _check_same_width(where: str, datum: Datum) -> None:
    """Hold cross_entropy's weights to the shape of its targets; [N, K] targets can't do without any."""
    targets, weights = datum.inputs["target_tokens"], datum.inputs.get("weights")
    if weights is None and targets.ndim == 2:
        raise InvalidRequest(f"{where}.loss_fn_inputs['weights'] is missing; targets of shape [N, K] need it")
    if weights is not None and weights.shape != targets.shape:
        raise InvalidRequest(
            f"{where}.loss_fn_inputs['weights'] has shape {list(weights.shape)}; "
            f"it must be {list(targets.shape)}, as target_tokens"
        )


def _check_values(data: Sequence[Datum], spec: LossSpec, model: Limits) -> None:
    vocabulary = f"it must be from 0 to {model.vocab_size - 1}, an id of the vocabulary"

    def outside(tokens: np.ndarray) -> np.ndarray:
        wrong: np.ndarray = (tokens < 0) | (tokens >= model.vocab_size)
        return wrong

    _refuse_where(outside, "model_input", [datum.tokens for datum in data], vocabulary)
    for name, wanted in spec.inputs.items():
        arrays = [datum.inputs.get(name) for datum in data]
        if wanted.dtype == "int64":
            _refuse_where(outside, f"loss_fn_inputs[{name!r}]", arrays, vocabulary)
        else:
            _refuse_where(_not_finite, f"loss_fn_inputs[{name!r}]", arrays, "it must be finite")
    if SEQUENCE_MASK in spec.inputs:
        _check_masks(data)


def _check_masks(data: Sequence[Datum]) -> None:
    """Refuse a sequence that has something to learn and no token to make its ratio of."""
    for index, datum in enumerate(data):
        if datum.inputs["advantages"].any() and not datum.inputs[SEQUENCE_MASK].any():
            raise InvalidRequest(
                f"data[{index}].loss_fn_inputs[{SEQUENCE_MASK!r}] is 0 everywhere; "
                "mark the sampled tokens with 1, or set all advantages to 0"
            )


def _not_finite(numbers: np.ndarray) -> np.ndarray:
    wrong: np.ndarray = ~np.isfinite(numbers)
    return wrong


def _refuse_where(
    bad: Callable[[np.ndarray], np.ndarray], field: str, arrays: Sequence[np.ndarray | None], right: str
) -> None:
    """Refuse the first bad number of one field over all datums; one pass where all are good."""
    present = [(index, array) for index, array in enumerate(arrays) if array is not None]
    if not present or not bad(np.concatenate([array.ravel() for _, array in present])).any():
        return
    index, array = next((index, array) for index, array in present if bad(array).any())
    position = np.argwhere(bad(array))[0]
    raise InvalidRequest(
        f"data[{index}].{field} holds {array[tuple(position)]} at position {', '.join(map(str, position))}; {right}"
    )


# Runs, steps and names ---------------------------------------------------------------------------


def check_create(message: CreateModel, model: Limits, max_rank: int = MAX_RANK) -> None:  # noqa: ARG001
    """Check a new run's rank, seed, targets and metadata; no limit of today's models bears on them."""
    if message.fine_tuning != FULL:
        _check_whole("lora_config.rank", message.rank, 1, max_rank)
    _check_seed("lora_config.seed", message.seed)
    if not (message.train_attn or message.train_mlp or message.train_unembed):
        raise InvalidRequest("lora_config trains nothing: set train_attn, train_mlp or train_unembed to true")
    check_metadata(message.user_metadata)


def check_sampler(message: CreateModel, model: BaseModel) -> None:
    """Refuse a run whose adapters the samplers of its base can't draw from; full runs have samplers of their own."""
    if message.fine_tuning == FULL:
        return
    if 0 < model.sampler_rank < message.rank:
        raise InvalidRequest(
            f"lora_config.rank is {message.rank}; the samplers of {model.name} serve ranks up to {model.sampler_rank} "
            "(OPENRL_SAMPLER_MAX_LORA_RANK)"
        )
    if message.train_unembed and not model.sampler_head:
        raise InvalidRequest(
            f"lora_config.train_unembed is true; the samplers of {model.name} serve no adapters on the unembedding of "
            f"a model of type {model.arch} with {model.vocab_size} tokens: set it to false, or start the service with "
            "--sampler torch"
        )


def check_optim_step(message: OptimStep) -> None:
    """Check the parameters of one AdamW step."""
    for name in ("learning_rate", "weight_decay", "grad_clip_norm"):
        value = _number(f"adam_params.{name}", getattr(message, name))
        if value < 0:
            raise InvalidRequest(f"adam_params.{name} is {value}; it must be 0 or more")
    for name in ("beta1", "beta2"):
        value = _number(f"adam_params.{name}", getattr(message, name))
        if not 0 <= value < 1:
            raise InvalidRequest(f"adam_params.{name} is {value}; it must be at least 0 and less than 1")
    if (eps := _number("adam_params.eps", message.eps)) <= 0:
        raise InvalidRequest(f"adam_params.eps is {eps}; it must be more than 0")


def check_name(name: str, field: str = "path") -> None:
    """Check a checkpoint's bare name."""
    if not is_name(name):
        raise InvalidRequest(f"{field} {shown(name)} is no valid name; it must be {NAME_RULE}")


def check_metadata(metadata: Mapping[str, object], field: str = "user_metadata") -> None:
    """Check that metadata can be written as JSON, which knows no NaN and no infinity."""
    try:
        json.dumps(metadata, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidRequest(f"{field} can't be kept as JSON: {error}") from error


# Sampling ----------------------------------------------------------------------------------------


def check_sample(message: Sample, model: Limits, max_samples: int = MAX_SAMPLES) -> None:
    """Check prompt, sampling parameters and the room that is left in the context."""
    if not message.prompt:
        raise InvalidRequest("prompt is empty; it needs at least one token")
    _check_ids("prompt", message.prompt, model)
    _check_whole("num_samples", message.num_samples, 1, max_samples)
    _check_room(len(message.prompt), message.max_tokens, model)
    _check_seed("sampling_params.seed", message.seed)
    _check_distribution(message)
    _check_stops(message, model)
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        _check_whole(name, getattr(message, name), 0, min(MAX_TOPK, model.vocab_size))
    _check_size(message, model)
    for name in ("topk_prompt_logprobs", "prompt_alt_tokens_k"):
        _check_cells(name, getattr(message, name), len(message.prompt))
    _check_targets(message, model)
    if message.prompt_logprobs_last_n is not None:
        _check_whole("prompt_logprobs_last_n", message.prompt_logprobs_last_n, 1, len(message.prompt) - 1)
        if not message.prompt_logprobs:
            raise InvalidRequest("prompt_logprobs_last_n is a part of the prompt's logprobs; set prompt_logprobs too")


def parse_stop(value: object) -> tuple[tuple[int, ...], tuple[str, ...], bool]:
    """Split `stop` into token ids, strings, and whether sampling also stops at the end-of-sequence token.

    What is given stops in addition to that token; an empty list means: not even there.
    """
    if value is None:
        return (), (), True
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list):
        raise InvalidRequest(f"sampling_params.stop must be a text or a list of texts or token ids, not {shown(value)}")
    if len(stops) > MAX_STOPS:
        raise InvalidRequest(f"sampling_params.stop has {len(stops)} entries; at most {MAX_STOPS} are allowed")
    for index, stop in enumerate(stops):
        if type(stop) not in (int, str) or stop == "":
            raise InvalidRequest(
                f"sampling_params.stop[{index}] is {shown(stop)}; it must be a token id or a text that isn't empty"
            )
    tokens = tuple(stop for stop in stops if isinstance(stop, int))
    return tokens, tuple(stop for stop in stops if isinstance(stop, str)), bool(stops)


def _check_room(prompt_length: int, max_tokens: int | None, model: Limits) -> None:
    if max_tokens is not None:
        _check_whole("sampling_params.max_tokens", max_tokens, 1, None)
    wanted = 1 if max_tokens is None else max_tokens
    if prompt_length + wanted > model.max_context:
        raise InvalidRequest(
            f"sampling_params.max_tokens is {'absent' if max_tokens is None else max_tokens}; a prompt of "
            f"{prompt_length} tokens leaves room for {max(0, model.max_context - prompt_length)}, as the model's "
            f"context holds {model.max_context}"
        )


def _check_size(message: Sample, model: Limits) -> None:
    """Bound what a request may draw; without max_tokens that is all the context leaves."""
    tokens = model.max_context - len(message.prompt) if message.max_tokens is None else message.max_tokens
    cells = message.num_samples * tokens * (1 + message.topk_sample_logprobs)
    if cells > MAX_SAMPLE_CELLS:
        absent = " (absent: all that the context leaves)" if message.max_tokens is None else ""
        raise InvalidRequest(
            f"num_samples is {message.num_samples}, sampling_params.max_tokens {tokens}{absent} and "
            f"topk_sample_logprobs {message.topk_sample_logprobs}; num_samples x max_tokens x "
            f"(1 + topk_sample_logprobs) is {cells} and must be at most {MAX_SAMPLE_CELLS}"
        )


def _check_distribution(message: Sample) -> None:
    temperature = _number("sampling_params.temperature", message.temperature)
    if temperature < 0:
        raise InvalidRequest(f"sampling_params.temperature is {temperature}; it must be 0 (greedy) or more")
    top_p = _number("sampling_params.top_p", message.top_p)
    if not 0 < top_p <= 1:
        raise InvalidRequest(f"sampling_params.top_p is {top_p}; it must be more than 0 and at most 1")
    if type(message.top_k) is not int or (message.top_k != -1 and message.top_k < 1):
        raise InvalidRequest(
            f"sampling_params.top_k is {shown(message.top_k)}; it must be -1 (no limit) or a whole number from 1"
        )


def _check_targets(message: Sample, model: Limits) -> None:
    field, num_rows = "target_prompt_logprobs", len(message.prompt) - 1
    if not message.target_shape:
        return
    if message.target_shape[0] != num_rows:
        raise InvalidRequest(
            f"{field} has shape {list(message.target_shape)}; it must be [{num_rows}, K], "
            "a row for each prompt token but the first"
        )
    _check_cells(field, len(message.target_ids), 1)
    if max(message.target_ids, default=-1) == -1:
        raise InvalidRequest(f"{field} names no id; leave it out, or give at least one that isn't -1")
    lowest, highest = min(message.target_ids), max(message.target_ids)
    if lowest < -1 or highest >= model.vocab_size:
        worst = lowest if lowest < -1 else highest
        raise InvalidRequest(
            f"{field} holds {shown(worst)}; it must be from 0 to {model.vocab_size - 1}, an id of the vocabulary, "
            "or -1 where nothing is asked"
        )


def _check_cells(field: str, width: int, length: int) -> None:
    if width * length > MAX_PROMPT_CELLS:
        raise InvalidRequest(
            f"{field} asks for {width * length} numbers over the prompt; at most {MAX_PROMPT_CELLS} are returned"
        )


def _check_stops(message: Sample, model: Limits) -> None:
    if (given := len(message.stop_tokens) + len(message.stop_strings)) > MAX_STOPS:
        raise InvalidRequest(f"sampling_params.stop has {given} entries; at most {MAX_STOPS} are allowed")
    if message.stop_tokens:
        _check_ids("sampling_params.stop", message.stop_tokens, model)
    if "" in message.stop_strings:
        raise InvalidRequest("sampling_params.stop holds an empty text; remove it")


# Numbers -----------------------------------------------------------------------------------------


def _check_ids(field: str, tokens: Sequence[int], model: Limits) -> None:
    limit = f"it must be from 0 to {model.vocab_size - 1}, an id of the vocabulary"
    if not set(map(type, tokens)) <= {int}:
        raise InvalidRequest(f"{field} must hold whole numbers only, the ids of tokens")
    lowest, highest = min(tokens), max(tokens)
    if lowest < 0 or highest >= model.vocab_size:
        worst = lowest if lowest < 0 else highest
        raise InvalidRequest(f"{field} holds {shown(worst)} at position {tokens.index(worst)}; {limit}")


def _check_whole(field: str, value: object, low: int, high: int | None) -> None:
    if type(value) is not int or value < low or (high is not None and value > high):
        limits = f"from {low}" if high is None else f"from {low} to {high}"
        raise InvalidRequest(f"{field} is {shown(value)}; it must be a whole number {limits}")


def _check_seed(field: str, seed: int | None) -> None:
    if seed is not None and (type(seed) is not int or not -(1 << 63) <= seed < 1 << 63):
        raise InvalidRequest(f"{field} is {shown(seed)}; it must be a whole number of 64 bits, with sign")


def _number(field: str, value: object) -> float:
    try:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InvalidRequest(f"{field} is {shown(value)}; it must be a finite number")
    return number
