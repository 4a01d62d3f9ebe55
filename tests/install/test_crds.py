"""The custom resources take the documented examples and refuse the documented mistakes, each in its own words."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.install.definitions import CRDS, Definition, definitions

REFUSED = "# refused: "
EXAMPLES = sorted((CRDS / "examples").glob("*.yaml"))
MISTAKES = sorted((CRDS / "mistakes").glob("*.yaml"))


@pytest.fixture(scope="module")
def kinds() -> dict[str, Definition]:
    return definitions()


def _documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def _reason(path: Path) -> str:
    first = path.read_text().partition("\n")[0]
    assert first.startswith(REFUSED)
    return first.removeprefix(REFUSED)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_taken_and_may_be_written_again_with_another_status(kinds: dict[str, Definition], path: Path):
    [document] = _documents(path)
    definition = kinds[document["kind"]]
    assert definition.errors(document) == []
    assert definition.errors({**document, "status": {"observedGeneration": 7}}, document) == []


@pytest.mark.parametrize("path", MISTAKES, ids=lambda path: path.stem)
def test_a_mistake_is_refused_with_its_reason_and_no_other(kinds: dict[str, Definition], path: Path):
    *before, mistake = _documents(path)
    definition = kinds[mistake["kind"]]
    assert [definition.errors(document) for document in before] == [[] for _ in before]
    [error] = definition.errors(mistake, before[0] if before else None)
    assert _reason(path) in error


def test_every_rule_has_a_mistake_that_it_refuses(kinds: dict[str, Definition]):
    rules = {node["message"] for kind in kinds.values() for node in _walk(kind.schema) if "rule" in node}
    assert rules <= {_reason(path) for path in MISTAKES}


def test_lists_and_strings_are_bounded_so_that_the_rules_are_cheap_enough(kinds: dict[str, Definition]):
    """An API server refuses a definition whose rules may cost too much; it judges that by the bounds."""
    for kind in kinds.values():
        kind.schema["properties"].pop("apiVersion")
        kind.schema["properties"].pop("kind")
        for node in _walk(kind.schema):
            assert node.get("type") != "array" or "maxItems" in node, node
            assert node.get("type") != "string" or {"maxLength", "enum", "format"} & node.keys(), node


def test_names_are_short_and_nobody_elses(kinds: dict[str, Definition]):
    short = {kind: definition.names["shortNames"] for kind, definition in kinds.items()}
    assert short == {"ClaimLedger": ["orlcl"], "Workload": ["orlw"]}
    for definition in kinds.values():
        assert definition.manifest["metadata"]["name"] == f"{definition.names['plural']}.openrl.io"
        assert definition.version["subresources"] == {"status": {}}
        assert definition.version["additionalPrinterColumns"]


def _walk(node: Any) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        yield node
        for value in node.values():
            yield from _walk(value)
    if isinstance(node, list):
        for value in node:
            yield from _walk(value)
