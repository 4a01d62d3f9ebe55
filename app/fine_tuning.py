"""What a client asks of us by names of our own: `openrl.*` keys in metadata, and tags of that form.

The SDK has no way to ask for full fine-tuning: it always sends a `lora_config`. So a run says so in its
`user_metadata`, or all runs of a session by a tag. What begins with `openrl.` and isn't known here is refused: it would
be taken for something that works.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from openrl.tasks.errors import InvalidRequest, shown
from openrl.tasks.records import FULL, LORA

PREFIX = "openrl."
KEY = f"{PREFIX}fine_tuning_type"
TYPES = (LORA, FULL)


def check_metadata(metadata: Mapping[str, Any]) -> str:
    """Return the fine-tuning that metadata asks for, "" for none; refuse what we don't know."""
    for name in metadata:
        if name.startswith(PREFIX) and name != KEY:
            raise InvalidRequest(f"user_metadata[{shown(name)}] is not known; of {PREFIX}* there is {KEY}")
    return _type(metadata[KEY], f"user_metadata[{KEY!r}]") if KEY in metadata else ""


def of_session(tags: Iterable[str], metadata: Mapping[str, Any]) -> str:
    """Return the fine-tuning that a session asks for, by its tags or its metadata; "" for none."""
    asked = check_metadata(metadata)
    for tag in tags:
        if not tag.startswith(PREFIX):
            continue
        name, _, value = tag.partition("=")
        if name != KEY:
            raise InvalidRequest(f"tags: {shown(tag)} is not known; of {PREFIX}* there is {KEY}=full or {KEY}=lora")
        value = _type(value, f"tags: {KEY}")
        if asked and asked != value:
            raise InvalidRequest(f"the session asks for both {KEY}={asked} and {KEY}={value}; give one of them")
        asked = value
    return asked


def wanted(metadata: Mapping[str, Any], of_session: str) -> str:
    """Return what a run's metadata or its session asks for, "" for nothing. They must not contradict each other."""
    mine = check_metadata(metadata)
    if mine and of_session and mine != of_session:
        raise InvalidRequest(
            f"user_metadata[{KEY!r}] is {mine}, and the session asks for {of_session}; make one of them go"
        )
    return mine or of_session


def of_new_run(asked: str, lora_config: Mapping[str, Any] | None) -> str:
    """Return the fine-tuning of a new run: what was asked for, else by whether there is a `lora_config`.

    The rank and the seed of a `lora_config`, which the SDK always sends, mean nothing to a full run.
    """
    if lora_config is None:
        if asked == LORA:
            raise InvalidRequest(f"lora_config is absent, and {KEY} is lora; give a rank, or ask for {FULL}")
        return FULL
    if asked != FULL:
        return LORA
    frozen = [name for name in ("train_attn", "train_mlp", "train_unembed") if not lora_config.get(name, True)]
    if frozen:
        raise InvalidRequest(f"lora_config.{frozen[0]} is false, and {KEY} is full: all weights are trained")
    return FULL


def require_type(of_checkpoint: str, asked: str) -> None:
    """Refuse a checkpoint of the other type than what is asked for; "" asks for nothing."""
    if asked and asked != of_checkpoint:
        raise InvalidRequest(
            f"path: the checkpoint is of {of_checkpoint} fine-tuning, and {KEY} is {asked}; "
            f"a run that starts from it is {of_checkpoint}"
        )


def _type(value: object, where: str) -> str:
    if not isinstance(value, str) or value not in TYPES:
        raise InvalidRequest(f"{where} is {shown(value)}; it must be one of {', '.join(TYPES)}")
    return value
