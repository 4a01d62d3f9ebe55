"""What `/api/v1` promised so far, and which changes would break a client: pure, over two OpenAPI documents.

`python -m tests.app.contract` (`make openapi`) writes the kept document anew after an addition, and refuses to after
anything else: such a change belongs to a `/api/v2`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from openrl.app.factory import create_app
from openrl.app.openapi import EXTENSION, operations
from openrl.app.settings import AppSettings
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store

KEPT = Path(__file__).with_name("openapi.v1.json")

Schema = Mapping[str, Any]
_LEAST = ("minimum", "minLength", "minItems")
_MOST = ("maximum", "maxLength", "maxItems")


def kept() -> dict[str, Any]:
    """Return the document as it was last agreed on."""
    found: dict[str, Any] = json.loads(KEPT.read_text())
    return found


@cache
def current() -> dict[str, Any]:
    """Return the document as the code says it now; no store is asked."""
    with tempfile.TemporaryDirectory() as nowhere:
        settings = StoreSettings(redis_url=f"unix://{nowhere}/store.sock", data_dir=Path(nowhere))
        app = create_app(AppSettings(), store=Store.connect(settings))
    found: dict[str, Any] = json.loads(json.dumps(app.extensions[EXTENSION].document()))
    return found


def written(document: Mapping[str, Any]) -> str:
    """Return a document as it is kept: sorted, so that a change is a few lines of difference."""
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def breaks(old: Schema, new: Schema) -> list[str]:
    """Say what a client of the old document could do or read, and of the new one can't."""
    then = {(path, method): operation for path, method, operation in operations(old)}
    now = {(path, method): operation for path, method, operation in operations(new)}
    found: list[str] = []
    for key, operation in then.items():
        where = f"{key[1].upper()} {key[0]}"
        if key not in now:
            found.append(f"{where} is gone")
            continue
        found += [f"{where}: {text}" for text in _operation(_Pair(old, new), operation, now[key])]
    return found


class _Pair:
    """Two documents, and how to follow their references."""

    def __init__(self, old: Schema, new: Schema) -> None:
        self._old, self._new = old, new

    def both(self, old: Schema, new: Schema) -> tuple[Schema, Schema]:
        return _resolved(self._old, old), _resolved(self._new, new)


def _operation(pair: _Pair, old: Schema, new: Schema) -> Iterator[str]:
    yield from _parameters(pair, old.get("parameters", []), new.get("parameters", []))
    yield from _request(pair, old.get("requestBody", {}), new.get("requestBody", {}))
    yield from _answers(pair, old["responses"], new["responses"])
    if old.get("security") == [] and new.get("security") != []:
        yield "needs a key now"


def _parameters(pair: _Pair, old: list[Schema], new: list[Schema]) -> Iterator[str]:
    then, now = ({(each["in"], each["name"]): each for each in side} for side in (old, new))
    for key, parameter in then.items():
        where = f"the {key[0]} parameter {key[1]}"
        if key not in now:
            yield f"{where} is gone"
        else:
            yield from _narrowed(pair, where, parameter["schema"], now[key]["schema"])
    for key, parameter in now.items():
        if parameter.get("required") and not then.get(key, {}).get("required"):
            yield f"the {key[0]} parameter {key[1]} is required now"


def _request(pair: _Pair, old: Schema, new: Schema) -> Iterator[str]:
    if new.get("required") and not old.get("required"):
        yield "a body is required now"
    for kind, content in old.get("content", {}).items():
        if kind not in new.get("content", {}):
            yield f"no {kind} is taken any more"
        else:
            yield from _narrowed(pair, "body", content.get("schema", {}), new["content"][kind].get("schema", {}))


def _answers(pair: _Pair, old: Schema, new: Schema) -> Iterator[str]:
    for status, answer in old.items():
        if "content" not in answer or not status.startswith(("2", "3")):
            continue
        content = new.get(status, {}).get("content", {})
        for kind, body in answer["content"].items():
            if kind not in content:
                yield f"{status} isn't answered with {kind} any more"
            else:
                yield from _lost(pair, "answer", body.get("schema", {}), content[kind].get("schema", {}))


def _narrowed(pair: _Pair, where: str, old: Schema, new: Schema) -> Iterator[str]:
    """Yield what was accepted at `where` and is refused now."""
    old, new = pair.both(old, new)
    if "type" in new and new["type"] != old.get("type"):
        yield f"{where} was {old.get('type', 'anything')} and is {new['type']}"
        return
    if old.get("nullable") and not new.get("nullable"):
        yield f"{where} may not be null any more"
    if "enum" in new and not set(map(str, old.get("enum", ["anything"]))) <= set(map(str, new["enum"])):
        yield f"{where} may be {new['enum']} only"
    for names, tighter in ((_LEAST, float.__gt__), (_MOST, float.__lt__)):
        yield from _bounds(where, old, new, names, tighter)
    if "pattern" in new and new["pattern"] != old.get("pattern"):
        yield f"{where} must fit {new['pattern']}"
    for name in set(new.get("required", ())) - set(old.get("required", ())):
        yield f"{where}.{name} is required now"
    yield from _members(pair, where, old, new, _narrowed)


def _bounds(
    where: str, old: Schema, new: Schema, names: tuple[str, ...], tighter: Callable[[float, float], bool]
) -> Iterator[str]:
    for name in names:
        if name in new and (name not in old or tighter(float(new[name]), float(old[name]))):
            yield f"{where} has {name} {new[name]}, and had {old.get(name, 'none')}"


def _lost(pair: _Pair, where: str, old: Schema, new: Schema) -> Iterator[str]:
    """Yield what could be read at `where` and can't be now."""
    old, new = pair.both(old, new)
    if "type" in old and old["type"] != new.get("type"):
        yield f"{where} was {old['type']} and is {new.get('type', 'anything')}"
        return
    if "type" in old and new.get("nullable") and not old.get("nullable"):
        yield f"{where} may be null now"
    for name in set(old.get("required", ())) - set(new.get("required", ())):
        yield f"{where}.{name} may be absent now"
    yield from _members(pair, where, old, new, _lost)


def _members(
    pair: _Pair, where: str, old: Schema, new: Schema, compare: Callable[[_Pair, str, Schema, Schema], Iterator[str]]
) -> Iterator[str]:
    for name, schema in old.get("properties", {}).items():
        if name in new.get("properties", {}):
            yield from compare(pair, f"{where}.{name}", schema, new["properties"][name])
        else:
            yield f"{where}.{name} is gone"
    for name in ("items", "additionalProperties"):
        inner = old.get(name), new.get(name)
        if all(isinstance(each, Mapping) for each in inner):
            yield from compare(pair, f"{where}[]", *inner)  # type: ignore[arg-type]


def _resolved(document: Schema, schema: Schema) -> Schema:
    """Return a schema with its own reference, or its one `allOf`, put in place."""
    whole = dict(schema)
    for part in [schema, *schema.get("allOf", ())]:
        if "$ref" in part:
            whole = dict(document["components"]["schemas"][part["$ref"].rpartition("/")[2]]) | whole
    return {key: value for key, value in whole.items() if key not in ("$ref", "allOf")}


def main() -> int:
    """Keep the document of today, if everything that the kept one promised still stands."""
    new = current()
    if KEPT.exists() and (broken := breaks(kept(), new)):
        sys.stderr.write("".join(f"{line}\n" for line in broken))
        sys.stderr.write("/api/v1 is frozen: what it has may grow, and not change; nothing was written\n")
        return 1
    KEPT.write_text(written(new))
    return 0


if __name__ == "__main__":
    sys.exit(main())
