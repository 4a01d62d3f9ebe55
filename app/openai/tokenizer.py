"""Tokenizers of the base models, read from the directories that they are served from, without torch or transformers.

`tokenizer.json` is the tokenizer, also in what a text begins and ends with; `tokenizer_config.json` adds what
transformers takes from it: the special tokens by name. A test compares the result with transformers' own.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from openrl.app.greenlets import off_loop
from openrl.app.openai.template import Template
from openrl.tasks.errors import InvalidRequest
from openrl.tasks.records import BaseModel

log = logging.getLogger(__name__)


class Unreadable(InvalidRequest):
    """The API has no tokenizer for this model: an operator must mend its directory, or show it to the API."""


class Encoded(NamedTuple):
    """A text as tokens: ids, and where in the text each one begins (in characters)."""

    ids: tuple[int, ...]
    starts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """Text to tokens and back. `named` are special tokens by what they are for; `template` None: the model has none."""

    backend: Backend
    template: Template | None
    named: Mapping[str, str]
    special_ids: frozenset[int]

    def encode(self, text: str, *, special: bool) -> Encoded:
        """Tokenise; `special` adds what the model begins and ends a text with."""
        encoding = self.backend.encode(text, add_special_tokens=special)
        return Encoded(tuple(encoding.ids), tuple(start for start, _ in encoding.offsets))

    def exceeds(self, text: str, most: int) -> bool:
        """Tell whether a text has over twice `most` tokens, without tokenising much more than so many at a time."""
        size, num_tokens = 4 * most, 0
        if len(text) <= size:
            return False
        for start in range(0, len(text), size):
            num_tokens += len(self.backend.encode(text[start : start + size], add_special_tokens=False))
            if num_tokens > 2 * most:
                return True
        return False

    def decode(self, ids: Sequence[int], *, special: bool) -> str:
        """Return the text; `special` tokens are a part of it or left out."""
        text: str = self.backend.decode(list(ids), skip_special_tokens=not special)
        return text

    def own_name(self, token: int) -> str:
        """Return what the tokenizer itself calls a token; no two have the same name."""
        return self.backend.id_to_token(token) or f"<{token}>"

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return a conversation as the model's template writes it.

        Raises:
            InvalidRequest: there is no template, or it refuses these messages.
        """
        if self.template is None:
            raise InvalidRequest(
                "the model has no chat template: use /v1/completions, or have an operator put chat_template.jinja into "
                "the model's directory and start the service anew"
            )
        return self.template.render(messages, self.named)


class Tokenizers:
    """The tokenizers of this process, each loaded when it is first asked for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loaded: dict[tuple[str, str], Tokenizer] = {}

    def of(self, model: BaseModel) -> Tokenizer:
        """Return the tokenizer of a base model.

        Raises:
            Unreadable: this process can't read one in the model's directory.
        """
        key = (model.path, model.digest)
        with self._lock:
            if key not in self._loaded:
                self._loaded[key] = off_loop(load, Path(model.path), model.name, large=True)
            return self._loaded[key]


def load(directory: Path, name: str) -> Tokenizer:
    """Read the tokenizer in `directory`, which is called `name` in errors.

    Raises:
        Unreadable: there is none that can be read here.
    """
    try:
        backend = Backend.from_str((directory / "tokenizer.json").read_text(encoding="utf-8"))
        config = _config(directory)
        template = _template(directory, config)
    except FileNotFoundError as missing:
        log.error("the tokenizer of %s: %s is not there", name, directory / "tokenizer.json")
        raise Unreadable(_missing(directory, name)) from missing
    except InvalidRequest:
        raise
    except Exception as broken:  # `tokenizers` raises bare exceptions
        log.error("the tokenizer of %s in %s can't be read", name, directory, exc_info=broken)
        raise Unreadable(
            f"the tokenizer files of {name!r} can't be read by the API; an operator finds the cause in its log"
        ) from broken
    backend.no_truncation()
    backend.no_padding()
    named = {key: _content(value) for key, value in config.items() if key.endswith("_token") and _content(value)}
    _add_missing(backend, config, named)
    special_ids = frozenset(number for number, token in backend.get_added_tokens_decoder().items() if token.special)
    return Tokenizer(backend=backend, template=template, named=named, special_ids=special_ids)


def _missing(directory: Path, name: str) -> str:
    if directory.is_dir():
        return (
            f"{name!r} has no tokenizer.json, which the API needs to read text: an operator makes one with "
            "transformers' AutoTokenizer.from_pretrained(DIRECTORY).save_pretrained(DIRECTORY)"
        )
    return (
        f"the API can't see the directory that {name!r} was registered with, so it has no tokenizer for it: an "
        "operator must make it readable at the same path for the API process too"
    )


def _config(directory: Path) -> dict[str, Any]:
    config = _read(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= _read(directory / "special_tokens_map.json")
    return config


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return found if isinstance(found, dict) else {}


def _template(directory: Path, config: Mapping[str, Any]) -> Template | None:
    """Return the default chat template; its own file comes before the config's."""
    path, source = directory / "chat_template.jinja", config.get("chat_template")
    if path.is_file():
        source = path.read_text(encoding="utf-8")
    elif isinstance(source, list):
        source = {one["name"]: one["template"] for one in source}.get("default")
    return Template(source) if source else None


def _content(value: object) -> str:
    """Return a token's text, which a config holds as such or in an object; "" where it is neither."""
    found = value.get("content") if isinstance(value, Mapping) else value
    return found if isinstance(found, str) else ""


def _add_missing(backend: Backend, config: Mapping[str, Any], named: Mapping[str, str]) -> None:
    """Add tokens that only the config knows, and mark those as special that it names as such."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    decoder = config.get("added_tokens_decoder") or {}
    for _, token in sorted(decoder.items(), key=lambda item: int(item[0])):
        if token["content"] not in known:
            known[token["content"]] = AddedToken(**token)
            backend.add_tokens([known[token["content"]]])
    more = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    more = more.values() if isinstance(more, Mapping) else more
    for text in dict.fromkeys((*named.values(), *map(_content, more))):
        token = known.get(text) or AddedToken(text, normalized=False)
        if text and not (text in known and token.special):
            token.special = True
            backend.add_special_tokens([token])
