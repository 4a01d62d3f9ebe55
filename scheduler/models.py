"""Base models by name: from a local directory or the Hugging Face hub to a registry row.

Reads configs, headers and samples, not all of the weights. What can't be served is refused here, by the workers' own
rules: a worker that can't load its model could only be started again and again. The hub's own environment (HF_HOME,
HF_HUB_OFFLINE, HF_TOKEN) is respected.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from openrl.tasks import keys
from openrl.tasks.errors import InvalidRequest
from openrl.tasks.registry import BaseModel
from openrl.workers.model import families, identity

FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt"]
"""What is taken from the hub: no other weight formats, and nothing that runs."""

TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]*")


class UnknownModel(InvalidRequest):
    """No such base model, or its files don't hold one: mend the --model option."""


def resolve(arguments: Iterable[str]) -> list[BaseModel]:
    """Return the base model of every NAME or NAME=PATH.

    Raises:
        UnknownModel: one can't be found or isn't whole, or two would be the same model.
    """
    models: dict[str, BaseModel] = {}
    for argument in arguments:
        model = _resolve(argument)
        other = models.get(model.slug)
        if other and other.name == model.name:
            raise UnknownModel(f"--model {model.name} is given twice; give each base model once")
        if other:
            raise UnknownModel(f"--model {other.name} and --model {model.name} have the same short name {model.slug!r}")
        if keys.is_full(model.slug):
            raise UnknownModel(
                f"--model {model.name} is called like the pool of a full run; give another name with =PATH"
            )
        models[model.slug] = model
    return list(models.values())


def _resolve(argument: str) -> BaseModel:
    name, _, path = argument.partition("=")
    if path:
        directory = Path(path).expanduser()
        if not directory.is_dir():
            raise UnknownModel(f"--model {argument}: there is no directory {directory}")
    elif (directory := Path(name).expanduser()).is_dir():
        name = name if _NAME.fullmatch(name) else directory.resolve().name
    else:
        directory = _from_hub(name)
    if not _NAME.fullmatch(name):
        raise UnknownModel(f"--model {argument}: {name!r} is no model name; use letters, digits and . _ / -")
    return describe(name, directory.resolve())


def describe(name: str, directory: Path) -> BaseModel:
    """Return the registry row of the model in `directory`.

    Raises:
        UnknownModel: something that serving needs is missing.
    """
    config = _config(name, directory)
    with _naming(name):
        context = families.max_context(config)
    if not any((directory / file).is_file() for file in TOKENIZERS):
        raise UnknownModel(f"--model {name}: {directory} has no tokenizer ({', '.join(TOKENIZERS[:2])})")
    tensors = _tensor_names(name, directory)
    with _whole(name, directory):
        digest = identity.digest_of(directory)
    tied = config.get("tie_word_embeddings")
    return BaseModel(
        name=name,
        slug=keys.slug(name),
        path=str(directory),
        vocab_size=_integer(name, config, "vocab_size"),
        max_context=context,
        arch=str(config["model_type"]),
        tokenizer_id=name,
        hidden_size=_integer(name, config, "hidden_size"),
        num_layers=_integer(name, config, "num_hidden_layers"),
        tied_embeddings=bool(tied) if tied is not None else "lm_head.weight" not in tensors,
        digest=digest,
    )


@contextmanager
def _naming(name: str) -> Iterator[None]:
    """Say whose model it is that can't be served."""
    try:
        yield
    except InvalidRequest as unfit:
        raise UnknownModel(f"--model {name}: {unfit}") from unfit


def _config(name: str, directory: Path) -> dict[str, Any]:
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as missing:
        raise UnknownModel(f"--model {name}: {directory} has no config.json") from missing
    except ValueError as malformed:
        raise UnknownModel(f"--model {name}: {directory / 'config.json'} is not JSON: {malformed}") from malformed
    if not isinstance(config, dict):
        raise UnknownModel(f"--model {name}: {directory / 'config.json'} is not a JSON object")
    return config


def _integer(name: str, config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or value < 1:
        raise UnknownModel(f"--model {name}: config.json has no {field}; a decoder-only language model is needed")
    return value


def _tensor_names(name: str, directory: Path) -> set[str]:
    with _whole(name, directory):
        files = identity.tensor_files(directory)
    for file in sorted(set(files.values())):
        if not (directory / file).is_file():
            raise UnknownModel(f"--model {name}: {directory} lacks {file}, which its index names")
    return set(files)


@contextmanager
def _whole(name: str, directory: Path) -> Iterator[None]:
    """Say whose weights are missing or damaged."""
    try:
        yield
    except FileNotFoundError as missing:
        raise UnknownModel(f"--model {name}: {directory} has no {identity.SINGLE}") from missing
    except (ValueError, KeyError, AttributeError, TypeError) as malformed:
        raise UnknownModel(f"--model {name}: the safetensors files in {directory} are damaged") from malformed


def _from_hub(name: str) -> Path:
    try:
        from httpx import HTTPError
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ModuleNotFoundError as missing:
        raise UnknownModel(f"--model {name}: no such directory, and huggingface_hub isn't installed") from missing
    try:
        try:
            cached = Path(snapshot_download(name, allow_patterns=FILES, local_files_only=True))
        except LocalEntryNotFoundError:
            cached = None
        # A tokenizer alone may be cached: the SDK fetches it for itself.
        if cached and any(cached.glob("*.safetensors")):
            return cached
        # Its config alone says whether the rest, gigabytes, is worth fetching.
        config = Path(snapshot_download(name, allow_patterns=["config.json"]))
        with _naming(name):
            families.check(_config(name, config))
        return Path(snapshot_download(name, allow_patterns=FILES))
    except HFValidationError as malformed:
        raise UnknownModel(f"--model {name}: neither a directory nor a name that the hub could know") from malformed
    except (HTTPError, OSError) as unreachable:
        where = "the local hub cache" if os.environ.get("HF_HUB_OFFLINE") else "the Hugging Face hub"
        reason = str(unreachable).strip().partition("\n")[0] or type(unreachable).__name__
        raise UnknownModel(f"--model {name}: neither a directory nor found in {where} ({reason})") from unreachable
