"""What a CustomResourceDefinition accepts: its structural schema and its CEL rules.

The part of OpenAPI v3 that structural schemas may use (kubernetes.io, "Extend the Kubernetes API with CRDs"); rules run
in a CEL interpreter of their own (`common-expression-language`). A keyword that isn't known here is an error of the
test, so that nothing passes unchecked.
"""

from __future__ import annotations

import re
from typing import Any

import cel

Obj = dict[str, Any]

KNOWN = {
    "type", "properties", "items", "additionalProperties", "required", "enum", "minimum", "maximum", "minLength",
    "maxLength", "pattern", "minItems", "maxItems", "maxProperties", "default", "description", "format", "nullable",
    "exclusiveMinimum", "x-kubernetes-validations", "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
    "x-kubernetes-preserve-unknown-fields", "x-kubernetes-int-or-string", "x-kubernetes-map-type", "title",
    "uniqueItems", "x-kubernetes-embedded-resource", "anyOf", "minProperties",
}  # fmt: skip
TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
}
UNITS = {"": 1, "m": 0.001, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12} | {
    f"{unit}i": 1 << (10 * power) for power, unit in enumerate("KMGTP", 1)
}


def check(version: Obj, obj: Obj, old: Obj | None = None) -> list[str]:
    """Return what is wrong with an object under one version of a CRD (an entry of its `spec.versions`)."""
    root = version["schema"]["openAPIV3Schema"]
    return [error for error in _check(root, obj, old, "", is_root=True) if error]


def prune(version: Obj, obj: Obj) -> None:
    """Drop fields that the schema doesn't name, fill in defaults; metadata, apiVersion and kind stay."""
    root = version["schema"]["openAPIV3Schema"]
    for name in [each for each in obj if each not in ("apiVersion", "kind", "metadata")]:
        if name in root.get("properties", {}):
            _prune(root["properties"][name], obj[name])
        else:
            del obj[name]
    for name, inner in root.get("properties", {}).items():
        if "default" in inner and name not in obj:
            obj[name] = inner["default"]


def _prune(schema: Obj, value: Any) -> None:
    if isinstance(value, list):
        for each in value:
            _prune(schema.get("items", {}), each)
    if not isinstance(value, dict):
        return
    more = schema.get("additionalProperties")
    for name in list(value):
        if name in schema.get("properties", {}):
            _prune(schema["properties"][name], value[name])
        elif isinstance(more, dict):
            _prune(more, value[name])
        elif not schema.get("x-kubernetes-preserve-unknown-fields") and not more:
            del value[name]
    for name, inner in schema.get("properties", {}).items():
        if "default" in inner and name not in value:
            value[name] = inner["default"]


def _check(schema: Obj, value: Any, old: Any, path: str, *, is_root: bool = False) -> list[str]:
    if unknown := schema.keys() - KNOWN:
        raise AssertionError(f"{path}: the emulator does not know {sorted(unknown)}")
    if value is None:
        return [] if schema.get("nullable") else [f"{path}: Invalid value: null"]
    if errors := _check_type(schema, value, path):
        return errors
    errors = _check_scalar(schema, value, path)
    if isinstance(value, dict):
        errors += _check_object(schema, value, old if isinstance(old, dict) else None, path, is_root=is_root)
    if isinstance(value, list):
        errors += _check_list(schema, value, old if isinstance(old, list) else None, path)
    return errors or _check_rules(schema, value, old, path)


def _check_type(schema: Obj, value: Any, path: str) -> list[str]:
    if schema.get("x-kubernetes-int-or-string"):
        return [] if isinstance(value, int | str) else [f"{path}: must be an integer or a string"]
    wanted = schema.get("type")
    if wanted is None:
        return []
    is_right = isinstance(value, TYPES[wanted]) and (wanted == "boolean" or not isinstance(value, bool))
    return [] if is_right else [f"{path}: Invalid value: {type(value).__name__}: must be of type {wanted}"]


def _check_scalar(schema: Obj, value: Any, path: str) -> list[str]:
    errors = []
    if "enum" in schema and value not in schema["enum"]:
        errors.append(f"{path}: Unsupported value: {value!r}: supported values: {schema['enum']}")
    if isinstance(value, str):
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
            errors.append(f"{path}: Invalid value: {value!r}: length")
        if "pattern" in schema and not re.search(schema["pattern"], value):
            errors.append(f"{path}: Invalid value: {value!r}: should match {schema['pattern']!r}")
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not schema.get("minimum", value) <= value <= schema.get("maximum", value):
            errors.append(
                f"{path}: Invalid value: {value}: must be within {schema.get('minimum')}..{schema.get('maximum')}"
            )
        if schema.get("exclusiveMinimum") is True and value == schema.get("minimum"):
            errors.append(f"{path}: Invalid value: {value}: must be above {schema['minimum']}")
    return errors


def _check_object(schema: Obj, value: Obj, old: Obj | None, path: str, *, is_root: bool) -> list[str]:
    errors = [f"{path}.{name}: Required value".lstrip(".") for name in schema.get("required", ()) if name not in value]
    if len(value) > schema.get("maxProperties", len(value)):
        errors.append(f"{path}: Too many: must have at most {schema['maxProperties']} properties")
    more = schema.get("additionalProperties")
    for name, each in value.items():
        if is_root and name in ("apiVersion", "kind", "metadata"):
            continue
        inner = schema.get("properties", {}).get(name, more if isinstance(more, dict) else None)
        if inner is not None:
            errors += _check(inner, each, (old or {}).get(name), f"{path}.{name}".lstrip("."))
    return errors


def _check_list(schema: Obj, value: list[Any], old: list[Any] | None, path: str) -> list[str]:
    errors = []
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        errors.append(f"{path}: Invalid value: {len(value)} items: must have at most {schema.get('maxItems')}")
    keys = schema.get("x-kubernetes-list-map-keys", ())
    kind = schema.get("x-kubernetes-list-type", "atomic")
    names = (
        [repr([each.get(key) for key in keys]) for each in value] if kind == "map" else [repr(each) for each in value]
    )
    if kind in ("map", "set") and len(set(names)) != len(names):
        errors.append(f"{path}: Duplicate value: {sorted(name for name in names if names.count(name) > 1)[0]}")
    before = {}
    if kind == "map" and old is not None:
        before = {repr([each.get(key) for key in keys]): each for each in old}
    for index, each in enumerate(value):
        errors += _check(schema.get("items", {}), each, before.get(names[index]), f"{path}[{index}]")
    return errors


def _check_rules(schema: Obj, value: Any, old: Any, path: str) -> list[str]:
    errors = []
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" in rule["rule"] and old is None:
            continue  # a transition rule says nothing of a new value
        context = functions()
        context.add_variable("self", value)
        if old is not None:
            context.add_variable("oldSelf", old)
        try:
            passed = cel.evaluate(rule["rule"], context)
        except Exception as error:  # whatever the interpreter raises, the rule has not passed
            passed, rule = False, {**rule, "message": f"{rule['rule']}: {error!r}"}
        if passed is not True:
            errors.append(f"{path or '<root>'}: Invalid value: {rule.get('message', 'failed rule: ' + rule['rule'])}")
    return errors


def functions() -> Any:
    """Return a CEL context with what Kubernetes adds to the language, as far as it is used here."""
    context = cel.Context()
    context.add_function("quantity", quantity)
    context.add_function("isQuantity", lambda text: re.fullmatch(r"\d+(\.\d+)?(m|k|M|G|T|[KMGTP]i)?", text) is not None)
    context.add_function("compareTo", lambda one, other: (one > other) - (one < other))
    context.add_function("semver", lambda text: [int(part) for part in text.split(".")])
    return context


def quantity(text: str | int) -> float:
    """Return a Kubernetes quantity in its base unit."""
    number, unit = re.fullmatch(r"([0-9.]+)([a-zA-Z]*)", str(text)).groups()  # type: ignore[union-attr]
    return float(number) * UNITS[unit]
