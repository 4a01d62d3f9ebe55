"""`make manifests`: everything under k8s/ and helm/ that follows from something else.

The chart is the one truth about our objects, the definitions in k8s/crds about our kinds, values.schema.json about the
chart's settings. From them come the Kustomize base, the one-file install, the chart's copy of the definitions and the
table in its README. A test says whether what lies here is current.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

ROOT = Path(__file__).parents[1]
CHART = ROOT / "helm" / "openrl"
CRDS = ROOT / "k8s" / "crds"
NAME = NAMESPACE = "openrl"

GENERATED = "# Made by `make manifests` from helm/openrl: change that.\n"
TABLE = ("<!-- settings -->\n", "<!-- end -->\n")


def files() -> dict[Path, str]:
    """Return every generated file and what it must hold."""
    parts = rendered({})
    namespace = (ROOT / "k8s" / "base" / "namespace.yaml").read_text()
    definitions = {path.name: path.read_text() for path in sorted(CRDS.glob("[!k]*.yaml"))}
    made = {ROOT / "k8s" / "base" / f"{part}.yaml": GENERATED + text for part, text in parts.items()}
    made[ROOT / "k8s" / "base" / "kustomization.yaml"] = _kustomization(parts)
    made[ROOT / "k8s" / "openrl.yaml"] = GENERATED + "---\n".join([namespace, *definitions.values(), *parts.values()])
    made |= {CHART / "crds" / name: text for name, text in definitions.items()}
    made[CHART / "README.md"] = _readme((CHART / "README.md").read_text())
    return made


def rendered(values: Mapping[str, Any], *, namespace: str = NAMESPACE) -> dict[str, str]:
    """Return the chart's objects under these values, as YAML by the template that they come from."""
    with Chart.load(CHART) as chart:
        found = chart.render(dict(values), name=NAME, namespace=namespace)
    texts = {Path(path).stem: text.strip("\n") + "\n" for path, text in sorted(found.items()) if path.endswith(".yaml")}
    return {name: text.removeprefix("---\n") for name, text in texts.items() if any(yaml.safe_load_all(text))}


def settings() -> Iterator[tuple[str, str, str]]:
    """Yield each setting of the chart: its path, its default as JSON, its description."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    yield from _settings(schema, yaml.safe_load((CHART / "values.yaml").read_text()), "")


def _settings(schema: Mapping[str, Any], values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, value in values.items():
        part = schema["properties"][name]
        if "description" in part:
            yield f"{prefix}{name}", json.dumps(value), part["description"]
        else:
            yield from _settings(part, value, f"{prefix}{name}.")


def _kustomization(parts: Mapping[str, str]) -> str:
    resources = ["namespace.yaml", "../crds", *(f"{part}.yaml" for part in parts)]
    listed = "".join(f"- {resource}\n" for resource in resources)
    head = "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
    return f"{GENERATED}{head}resources:\n{listed}"


def _readme(text: str) -> str:
    before, _, rest = text.partition(TABLE[0])
    after = rest.partition(TABLE[1])[2]
    rows = "".join(f"| `{path}` | `{default}` | {words} |\n" for path, default, words in settings())
    return f"{before}{TABLE[0]}| setting | default | |\n|---|---|---|\n{rows}{TABLE[1]}{after}"


def main() -> None:
    """Write what isn't current."""
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            sys.stdout.write(f"{path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main()
