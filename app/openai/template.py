"""Chat templates: from messages to the text that a model was tuned on.

A template comes with its model, in the dialect of Jinja that transformers reads: whitespace of blocks trimmed, `break`
and `continue`, the functions `raise_exception` and `strftime_now`, a `tojson` that escapes nothing, and blocks marked
`generation`, which are of use in training only. It runs in Jinja's sandbox. Knows no tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from openrl.tasks.errors import InvalidRequest, shown


class Generation(Extension):
    """Reads a block `{% generation %}` as its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        """Keep the content, in a scope of its own."""
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class Template:
    """One compiled chat template."""

    def __init__(self, source: str) -> None:
        """Compile. Raises InvalidRequest where `source` is no template."""
        try:
            self._compiled = _environment().from_string(source)
        except TemplateSyntaxError as broken:
            raise InvalidRequest(f"the model's chat template is broken, in line {broken.lineno}") from broken

    def render(self, messages: Sequence[Mapping[str, Any]], tokens: Mapping[str, str]) -> str:
        """Return the conversation as text, up to where the assistant speaks; `tokens` are the named special ones.

        Raises:
            InvalidRequest: the template refuses these messages, or fails on them.
        """
        # A template reads `tools` and `documents` to know that there are none.
        names = {**tokens, "messages": list(messages), "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return self._compiled.render(names)
        except TemplateError as refusal:
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {shown(str(refusal))}"
            ) from refusal
        except Exception as failure:  # whatever a template makes of messages that it wasn't written for
            raise InvalidRequest(
                f"the model's chat template fails on these messages ({type(failure).__name__})"
            ) from failure


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(raise_exception=_refuse, strftime_now=_now)
    return environment


def _refuse(reason: object) -> NoReturn:
    raise TemplateError(str(reason))


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
