"""What a completion or a chat may ask for, and what both come down to.

A field of OpenAI's that isn't served is refused by name, unless it says what is done anyway (a penalty of 0, no tools).
Unknown fields are refused as everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from marshmallow import ValidationError, fields, post_load, validates_schema

from openrl.app import checks
from openrl.app.openai.errors import refused
from openrl.app.schemas import INT64_MAX, Flag, Number, Sent, Text, Whole, unicode_only
from openrl.tasks.errors import shown

DEFAULT_TOKENS = 16
"""Of a completion that doesn't say; a chat may go on as far as the context goes. Both as OpenAI's."""

MAX_TOP = 20
"""Likeliest tokens returned beside each one, as OpenAI's chat allows."""

ROLES = ("system", "developer", "user", "assistant", "tool")

Ids = tuple[int, ...]

_WORDS = {
    "sampling_params.": "",
    "num_samples": "n",
    "topk_sample_logprobs": "logprobs",
    "topk_prompt_logprobs": "logprobs",
}
"""What `openrl.app.checks` calls a field, and what it is called here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request: `prompts` (text or token ids), or the `messages` of a chat.

    `max_tokens` None: as far as the context goes. `logprobs` None: none; else how many of the likeliest tokens come
    beside them.
    """

    model: str
    prompts: tuple[str | Ids, ...] = ()
    messages: tuple[Mapping[str, Any], ...] = ()
    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    stops: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    echo: bool = False
    stream: bool = False
    include_usage: bool = False


class Neutral(fields.Field[None]):
    """A field that may only ask for what is done anyway."""

    def __init__(self, *neutral: Any) -> None:
        self._neutral = neutral
        super().__init__()

    def _deserialize(self, value: Any, attr: str | None, data: Any, **options: Any) -> None:
        if not any(type(value) is type(one) and value == one for one in self._neutral):
            raise ValidationError("isn't served here: leave it out")


class StreamOptionsSchema(Sent):
    """How to stream."""

    include_usage = Flag(load_default=False)
    include_obfuscation = Neutral(False)


class AskedSchema(Sent):
    """What both requests share. `openrl.app.checks` has the ranges of temperature and top_p."""

    model = Text(required=True)
    max_tokens = Whole()
    temperature = Number(load_default=1.0)
    top_p = Number(load_default=1.0)
    n = Whole(load_default=1, least=1, most=checks.MAX_SAMPLES)
    stop = fields.Raw(validate=unicode_only)
    seed = Whole(least=-(2**63), most=INT64_MAX)
    stream = Flag(load_default=False)
    stream_options = fields.Nested(StreamOptionsSchema)
    user = Text()
    presence_penalty = Neutral(0, 0.0)
    frequency_penalty = Neutral(0, 0.0)
    logit_bias = Neutral({})

    @validates_schema
    def options_of_a_stream(self, data: Mapping[str, Any], **_options: Any) -> None:
        """Refuse options that would have no effect."""
        if "stream_options" in data and not data["stream"]:
            raise ValidationError("is for streams: set stream to true, or leave it out", "stream_options")

    def common(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of `Asked` that are the same for both."""
        named = {name: data[name] for name in ("model", "n", "temperature", "top_p", "stream")}
        return named | {
            "stops": _stops(data.get("stop")),
            "seed": data.get("seed"),
            "include_usage": data.get("stream_options", {}).get("include_usage", False),
        }


class CompletionSchema(AskedSchema):
    """Prompts to be continued."""

    prompt = fields.Raw(required=True)
    logprobs = Whole(most=MAX_TOP)
    echo = Flag(load_default=False)
    best_of = Whole(least=1)
    suffix = Neutral("")

    @validates_schema
    def served(self, data: Mapping[str, Any], **_options: Any) -> None:
        """Refuse what isn't served."""
        if data.get("best_of", data["n"]) != data["n"]:
            raise ValidationError("isn't served here, unless it is n: leave it out", "best_of")
        if data["stream"] and data["echo"] and "logprobs" in data:
            raise ValidationError(
                "of an echoed prompt can't be streamed: leave out stream, echo or logprobs", "logprobs"
            )

    @post_load
    def build(self, data: dict[str, Any], **_options: Any) -> Asked:
        """Build the request."""
        prompts = _prompts(data["prompt"])
        if len(prompts) * data["n"] > checks.MAX_SAMPLES:
            raise refused(
                f"prompt has {len(prompts)} entries, and n is {data['n']}: together at most {checks.MAX_SAMPLES}",
                "prompt",
            )
        return Asked(
            prompts=prompts,
            max_tokens=data.get("max_tokens", DEFAULT_TOKENS),
            logprobs=data.get("logprobs"),
            echo=data["echo"],
            **self.common(data),
        )


class ChatSchema(AskedSchema):
    """A conversation to be continued by the assistant."""

    messages = fields.Raw(required=True)
    max_completion_tokens = Whole()
    logprobs = Flag(load_default=False)
    top_logprobs = Whole(most=MAX_TOP)
    audio = Neutral()
    function_call = Neutral("none", "auto")
    functions = Neutral([])
    metadata = Neutral({})
    modalities = Neutral(["text"])
    parallel_tool_calls = Neutral(True, False)
    prediction = Neutral()
    reasoning_effort = Neutral()
    response_format = Neutral({"type": "text"})
    service_tier = Neutral("auto", "default")
    store = Neutral(False)
    tool_choice = Neutral("none", "auto")
    tools = Neutral([])
    verbosity = Neutral()
    web_search_options = Neutral()

    @validates_schema
    def consistent(self, data: Mapping[str, Any], **_options: Any) -> None:
        """Refuse what contradicts itself."""
        if "top_logprobs" in data and not data["logprobs"]:
            raise ValidationError("is beside logprobs: set logprobs to true, or leave it out", "top_logprobs")
        if data.get("max_completion_tokens", data.get("max_tokens")) != data.get("max_tokens") and "max_tokens" in data:
            raise ValidationError("is the old name of max_completion_tokens: give one of them", "max_tokens")

    @post_load
    def build(self, data: dict[str, Any], **_options: Any) -> Asked:
        """Build the request."""
        return Asked(
            messages=_messages(data["messages"]),
            max_tokens=data.get("max_completion_tokens", data.get("max_tokens")),
            logprobs=data.get("top_logprobs", 0) if data["logprobs"] else None,
            **self.common(data),
        )


def _stops(value: object) -> tuple[str, ...]:
    """Return the stop texts. None and [] mean the model's own end alone."""
    stops = value if isinstance(value, list) else [value] if value is not None else []
    if not all(isinstance(stop, str) and stop for stop in stops):
        raise refused(f"stop is {shown(value)}; it must be a text or a list of texts, none of them empty", "stop")
    if len(stops) > checks.MAX_STOPS:
        raise refused(f"stop has {len(stops)} entries; at most {checks.MAX_STOPS} are allowed", "stop")
    return tuple(stops)


def _prompts(value: object) -> tuple[str | Ids, ...]:
    """Tell the four shapes of a prompt apart: text, texts, token ids, lists of token ids."""
    given: list[Any] = value if isinstance(value, list) else [value]
    if given and all(type(one) is int for one in given):
        return (tuple(given),)
    if given and all(isinstance(one, str) for one in given):
        unicode_only_of("prompt", given)
        return tuple(given)
    if given and all(isinstance(one, list) and one and all(type(token) is int for token in one) for one in given):
        return tuple(tuple(one) for one in given)
    raise refused(
        f"prompt is {shown(value)}; it must be a text, a list of texts, a list of token ids, or a list of such lists, "
        "none of them empty",
        "prompt",
    )


def unicode_only_of(field: str, value: object) -> None:
    """Refuse text that isn't valid Unicode."""
    try:
        unicode_only(value)
    except ValidationError as invalid:
        raise refused(f"{field} {invalid.messages[0]}", field) from None


def _messages(value: object) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not value:
        raise refused("messages must be a list of at least one message", "messages")
    unicode_only_of("messages", value)
    return tuple(_message(f"messages[{index}]", message) for index, message in enumerate(value))


def _message(where: str, message: object) -> Mapping[str, Any]:
    if not isinstance(message, dict):
        raise refused(f"{where} is {shown(message)}; it must be an object with role and content", "messages")
    message = {key: value for key, value in message.items() if value is not None}
    for key in message:
        if key not in ("role", "content", "name"):
            raise refused(f"{where}.{shown(key)} isn't served here: a message has role, content and name", "messages")
    if message.get("role") not in ROLES:
        raise refused(f"{where}.role is {shown(message.get('role'))}; it must be one of {', '.join(ROLES)}", "messages")
    if not isinstance(message.get("name", ""), str):
        raise refused(f"{where}.name is {shown(message['name'])}; it must be a text", "messages")
    return {**message, "content": _content(f"{where}.content", message.get("content"))}


def _content(where: str, content: object) -> str:
    """Return a message's text, which may come in parts."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise refused(f"{where} is {shown(content)}; it must be a text, or a list of parts of type text", "messages")
    return "".join(_part(f"{where}[{index}]", part) for index, part in enumerate(content))


def _part(where: str, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else part
    if kind != "text":
        raise refused(f"{where}.type is {shown(kind)}; only text is served here", "messages")
    assert isinstance(part, dict)
    if set(part) != {"type", "text"} or not isinstance(part["text"], str):
        raise refused(f"{where} must have type and text, and nothing else", "messages")
    text: str = part["text"]
    return text


def in_our_words(text: str) -> str:
    """Return an error of `openrl.app.checks` with the names that these routes have."""
    for theirs, ours in _WORDS.items():
        text = text.replace(theirs, ours)
    return text
