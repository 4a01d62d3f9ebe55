"""Server-side apply: who owns which fields, what a manager's new words change, and when two disagree.

After KEP-555 and the merge strategies of structured-merge-diff. Fields are paths; lists that the API types declare as
maps are merged by their keys, all other lists are one value. `managedFields` hold each path as one name, not
nested: clients only pass them on.
"""

from __future__ import annotations

import copy
import json
from typing import Any

Obj = dict[str, Any]
Path = tuple[str, ...]

LIST_KEYS = {
    ("spec", "seats"): ("workload",),
    ("status", "conditions"): ("type",),
    ("metadata", "ownerReferences"): ("uid",),
    ("spec", "containers"): ("name",),
    ("spec", "containers", "*", "env"): ("name",),
    ("spec", "resourceClaims"): ("name",),
    ("spec", "volumes"): ("name",),
}
SET_LISTS = {("metadata", "finalizers")}
IGNORED: set[Path] = {
    ("apiVersion",),
    ("kind",),
    ("metadata", "name"),
    ("metadata", "namespace"),
    ("metadata", "uid"),
    ("metadata", "resourceVersion"),
    ("metadata", "generation"),
    ("metadata", "creationTimestamp"),
    ("metadata", "deletionTimestamp"),
    ("metadata", "deletionGracePeriodSeconds"),
}


class Conflicts(Exception):
    """Another manager owns fields that this one would change."""

    def __init__(self, who: dict[str, list[str]]) -> None:
        super().__init__(
            "; ".join(f'conflict with "{name}": {", ".join(paths)}' for name, paths in sorted(who.items()))
        )


def applied(old: Obj, words: Obj, manager: str, *, force: bool, now: str) -> Obj:
    """Return what `old` becomes when `manager` applies `words`. Raises Conflicts, unless `force`."""
    said, had = leaves(words), leaves(old)
    owners = _owners(old)
    mine = owners.pop((manager, "Apply"), set())
    quarrels: dict[str, list[str]] = {}
    for path, value in said.items():
        for (other, _), theirs in owners.items():
            if path in theirs and had.get(path, value) != value:
                quarrels.setdefault(other, []).append(".".join(path))
    if quarrels and not force:
        raise Conflicts(quarrels)
    new = copy.deepcopy(old)
    for path in mine - said.keys():
        if not any(path in theirs for theirs in owners.values()):
            _remove(new, path)
    for path, value in said.items():
        _set(new, path, value)
        for theirs in owners.values():
            if had.get(path, value) != value:
                theirs.discard(path)
    owners[manager, "Apply"] = set(said)
    _write_owners(new, old, owners, now)
    return new


def own_update(old: Obj | None, new: Obj, manager: str, now: str, *, subresource: str = "") -> None:
    """Note that an ordinary write of `manager` owns the fields that it changed."""
    before, after = leaves(old or {}), leaves(new)
    changed = {path for path, value in after.items() if path not in before or before[path] != value}
    gone = before.keys() - after.keys()
    owners = _owners(new if old is None else old)
    for paths in owners.values():
        paths -= changed | gone
    if changed:
        owners.setdefault((manager, "Update"), set()).update(changed)
    _write_owners(new, old or {}, owners, now)


def leaves(value: Any, path: Path = (), pattern: Path = ()) -> dict[Path, Any]:
    """Return every field that has a value of its own, by path. Elements of keyed lists are named by their keys."""
    if path in IGNORED or path == ("metadata", "managedFields"):
        return {}
    if isinstance(value, dict) and value:
        return {k: v for name, each in value.items() for k, v in leaves(each, (*path, name), (*pattern, name)).items()}
    if isinstance(value, list) and pattern in LIST_KEYS:
        result: dict[Path, Any] = {}
        for each in value:
            result.update(leaves(each, (*path, _name(each, pattern)), (*pattern, "*")))
        return result
    if isinstance(value, list) and pattern in SET_LISTS:
        return {(*path, json.dumps(each)): each for each in value}
    return {path: value} if path else {}


def _name(element: Obj, pattern: Path) -> str:
    return json.dumps({key: element[key] for key in LIST_KEYS[pattern]}, sort_keys=True)


def _set(obj: Any, path: Path, value: Any, pattern: Path = ()) -> None:
    head, *rest = path
    if isinstance(obj, list) and pattern in SET_LISTS:
        if value not in obj:
            obj.append(value)
        return
    if isinstance(obj, list):
        element = _find(obj, head)
        if element is None:
            element = json.loads(head)
            obj.append(element)
        _set(element, tuple(rest), value, (*pattern, "*"))
        return
    inner = (*pattern, head)
    if not rest:
        obj[head] = copy.deepcopy(value)
        return
    empty: Any = [] if inner in LIST_KEYS or inner in SET_LISTS else {}
    if not isinstance(obj.get(head), type(empty)):
        obj[head] = empty
    _set(obj[head], tuple(rest), value, inner)


def _remove(obj: Any, path: Path) -> None:
    head, *rest = path
    if isinstance(obj, list):
        element = _find(obj, head)
        if not rest:
            obj[:] = [each for each in obj if json.dumps(each) != head]
        elif element is not None:
            _remove(element, tuple(rest))
            keys = json.loads(head)
            if element.keys() <= keys.keys():
                obj.remove(element)
        return
    if not isinstance(obj, dict) or head not in obj:
        return
    if rest:
        _remove(obj[head], tuple(rest))
        if obj[head] in ({}, []):
            del obj[head]
    else:
        del obj[head]


def _find(elements: list[Obj], name: str) -> Obj | None:
    keys = json.loads(name)
    if not isinstance(keys, dict):
        return None
    return next((each for each in elements if all(each.get(k) == v for k, v in keys.items())), None)


def _owners(obj: Obj) -> dict[tuple[str, str], set[Path]]:
    managed = obj.get("metadata", {}).get("managedFields", [])
    return {
        (each["manager"], each["operation"]): {tuple(json.loads(path)) for path in each["fieldsV1"]} for each in managed
    }


def _write_owners(new: Obj, old: Obj, owners: dict[tuple[str, str], set[Path]], now: str) -> None:
    before = {(e["manager"], e["operation"]): e for e in old.get("metadata", {}).get("managedFields", [])}
    rows = []
    for (manager, operation), paths in sorted(owners.items()):
        if not paths:
            continue
        texts = sorted(json.dumps(list(path)) for path in paths)
        last = before.get((manager, operation))
        time = last["time"] if last and list(last["fieldsV1"]) == texts else now
        fields: Obj = {text: {} for text in texts}
        rows.append(
            {"manager": manager, "operation": operation, "time": time, "fieldsType": "FieldsV1", "fieldsV1": fields}
        )
    new.setdefault("metadata", {})["managedFields"] = rows
