"""The objects of the emulated API server: what a write does, what it refuses, and what a watch hears of it.

Semantics of kube-apiserver as the API concepts page states them (kubernetes.io/docs/reference/using-api/api-concepts)
for what the scheduler uses. What is not emulated is refused with 501, never answered by guess. Knows no HTTP.
"""

from __future__ import annotations

import copy
import itertools
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.kube import apply as fields
from tests.kube import schema

Obj = dict[str, Any]
Key = tuple[str, str, str, str]
"""group, plural, namespace, name"""


class Refused(Exception):
    """What the server answers instead: an HTTP status, a reason and a message of a Status body."""

    def __init__(self, code: int, reason: str, message: str, details: Obj | None = None) -> None:
        super().__init__(message)
        self.code, self.reason, self.message, self.details = code, reason, message, details or {}

    def status(self) -> Obj:
        """Return the Status body."""
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            "details": self.details,
            "code": self.code,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of object that the server knows."""

    group: str
    version: str
    plural: str
    name: str
    namespaced: bool = True
    has_status: bool = True
    needs_version: bool = False
    """A PUT without resourceVersion is refused, as for custom resources."""
    immutable: tuple[str, ...] = ()
    """Fields whose change is refused: "spec", or "spec.x"."""
    crd: Obj | None = None

    @property
    def api_version(self) -> str:
        """Return what `apiVersion` says."""
        return f"{self.group}/{self.version}" if self.group else self.version


BUILT_IN = (
    Kind(group="", version="v1", plural="namespaces", name="Namespace", namespaced=False),
    Kind(group="", version="v1", plural="nodes", name="Node", namespaced=False),
    Kind(
        group="",
        version="v1",
        plural="pods",
        name="Pod",
        immutable=("spec.resourceClaims", "spec.containers", "spec.volumes", "spec.affinity", "spec.nodeSelector"),
    ),
    Kind(group="", version="v1", plural="events", name="Event", has_status=False),
    Kind(group="", version="v1", plural="configmaps", name="ConfigMap", has_status=False),
    Kind(
        group="resource.k8s.io",
        version="v1",
        plural="resourceclaims",
        name="ResourceClaim",
        immutable=("spec",),
    ),
    Kind(
        group="resource.k8s.io",
        version="v1",
        plural="resourceslices",
        name="ResourceSlice",
        namespaced=False,
        has_status=False,
    ),
    Kind(
        group="resource.k8s.io",
        version="v1",
        plural="deviceclasses",
        name="DeviceClass",
        namespaced=False,
        has_status=False,
    ),
)


@dataclass(slots=True)
class Event:
    """One change: what a watch is told, and what the object was before, for selectors."""

    version: int
    key: Key
    type: str
    object: Obj
    before: Obj | None = None


@dataclass(slots=True)
class Objects:
    """All objects, one lock around them, and the log of changes that watches read.

    `now` gives the time of stamps, as text of RFC 3339.
    """

    now: Callable[[], str]
    kinds: dict[tuple[str, str], Kind] = field(default_factory=dict)
    changed: threading.Condition = field(default_factory=lambda: threading.Condition(threading.RLock()))
    log: list[Event] = field(default_factory=list)
    compacted: int = 0
    _objects: dict[Key, Obj] = field(default_factory=dict)
    _version: int = 100
    _names: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def __post_init__(self) -> None:
        for kind in BUILT_IN:
            self.kinds[kind.group, kind.plural] = kind

    def define(self, crd: Obj) -> None:
        """Serve the kind of a CustomResourceDefinition."""
        spec = crd["spec"]
        (version,) = [each for each in spec["versions"] if each["served"] and each["storage"]]
        kind = Kind(
            group=spec["group"],
            version=version["name"],
            plural=spec["names"]["plural"],
            name=spec["names"]["kind"],
            namespaced=spec["scope"] == "Namespaced",
            has_status="status" in version.get("subresources", {}),
            needs_version=True,
            crd=version,
        )
        self.kinds[kind.group, kind.plural] = kind

    @property
    def version(self) -> str:
        """Return the version of the last change."""
        return str(self._version)

    def all(self, plural: str) -> list[Obj]:
        """Return all objects of a kind, by key: for the emulator's own controllers and for tests, to read only.

        What is stored never changes: a write stores another object. So nothing that is read needs a copy.
        """
        with self.changed:
            return [self._objects[key] for key in sorted(self._objects) if key[1] == plural]

    def get(self, kind: Kind, namespace: str, name: str) -> Obj:
        """Return one object. Raises Refused 404."""
        with self.changed:
            return self._get(kind, namespace, name)

    def list(self, kind: Kind, namespace: str | None, matches: Callable[[Obj], bool]) -> list[Obj]:
        """Return the objects of a kind in a namespace, None: of all namespaces."""
        with self.changed:
            return [
                each
                for key, each in sorted(self._objects.items())
                if key[:2] == (kind.group, kind.plural) and (namespace is None or key[2] == namespace) and matches(each)
            ]

    def create(self, kind: Kind, namespace: str, body: Obj, *, manager: str) -> Obj:
        """Create an object as POST does."""
        body = copy.deepcopy(body)
        meta = body.setdefault("metadata", {})
        self._check_identity(kind, namespace, body, name=None)
        if meta.get("resourceVersion"):
            raise Refused(400, "BadRequest", "resourceVersion should not be set on objects to be created")
        if not meta.get("name"):
            if not meta.get("generateName"):
                raise _invalid(kind, "", "metadata.name: Required value: name or generateName is required")
            meta["name"] = f"{meta['generateName']}{next(self._names):05x}"
        with self.changed:
            self._check_namespace(kind, namespace)
            key = self._key(kind, namespace, meta["name"])
            if key in self._objects:
                message = f'{kind.plural}.{kind.group} "{meta["name"]}" already exists'
                raise Refused(409, "AlreadyExists", message, {"name": meta["name"], "kind": kind.plural})
            self._complete(kind, namespace, body)
            self._validate(kind, body, None)
            fields.own_update(None, body, manager, self.now())
            return self._store(key, "ADDED", body)

    def replace(self, kind: Kind, namespace: str, name: str, body: Obj, *, manager: str, status: bool = False) -> Obj:
        """Replace an object, or its status alone, as PUT does."""
        self._check_identity(kind, namespace, body, name=name)
        with self.changed:
            old = self._get(kind, namespace, name)
            wanted = body.get("metadata", {}).get("resourceVersion")
            if not wanted and kind.needs_version:
                raise _invalid(
                    kind, name, "metadata.resourceVersion: Invalid value: 0: must be specified for an update"
                )
            self._check_version(kind, old, body)
            return self._update(kind, old, copy.deepcopy(body), manager=manager, status=status)

    def merge(self, kind: Kind, namespace: str, name: str, patch: Obj, *, manager: str, status: bool = False) -> Obj:
        """Change an object as a JSON merge patch does (RFC 7386)."""
        with self.changed:
            old = self._get(kind, namespace, name)
            self._check_version(kind, old, patch)
            new = _merged(old, patch)
            self._check_identity(kind, namespace, new, name=name)
            return self._update(kind, old, new, manager=manager, status=status)

    def apply(
        self, kind: Kind, namespace: str, name: str, body: Obj, *, manager: str, force: bool, status: bool = False
    ) -> tuple[Obj, bool]:
        """Apply as server-side apply does; returns the object, and whether it is new."""
        body = copy.deepcopy(body)
        self._check_identity(kind, namespace, body, name=name)
        if not manager:
            raise Refused(400, "BadRequest", "PatchOptions.meta.k8s.io is invalid: fieldManager: Required value")
        if body.get("metadata", {}).get("managedFields"):
            raise Refused(400, "BadRequest", "metadata.managedFields must be nil")
        with self.changed:
            key = self._key(kind, namespace, name)
            if key not in self._objects:
                if status:
                    raise _not_found(kind, name)
                self._check_namespace(kind, namespace)
                if body.get("metadata", {}).get("uid"):
                    raise Refused(409, "Conflict", f"uid mismatch: the object {name} does not exist")
                new: Obj = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": {"name": name}}
                new = fields.applied(new, _without_status(kind, body), manager, force=force, now=self.now())
                self._complete(kind, namespace, new)
                self._validate(kind, new, None)
                return self._store(key, "ADDED", new), True
            old = self._objects[key]
            self._check_version(kind, old, body)
            body = (
                {"metadata": {"name": name}, "status": body.get("status", {})}
                if status
                else _without_status(kind, body)
            )
            new = fields.applied(old, body, manager, force=force, now=self.now())
            return self._update(kind, old, new, manager=None, status=status), False

    def delete(self, kind: Kind, namespace: str, name: str, options: Obj) -> Obj:
        """Delete an object as DELETE does: at once, or once its finalizers and its grace period are over."""
        with self.changed:
            old = self._get(kind, namespace, name)
            wanted = options.get("preconditions") or {}
            for what, is_now in (
                ("uid", old["metadata"]["uid"]),
                ("resourceVersion", old["metadata"]["resourceVersion"]),
            ):
                if wanted.get(what) not in (None, is_now):
                    message = f"Precondition failed: {what} in precondition: {wanted[what]}, in object meta: {is_now}"
                    raise _conflict(kind, name, message)
            if options.get("propagationPolicy", "Background") != "Background":
                raise Refused(
                    501, "NotImplemented", f"propagationPolicy {options['propagationPolicy']} is not emulated"
                )
            grace = _grace(kind, old, options)
            new = copy.deepcopy(old)
            meta = new["metadata"]
            if grace == 0 and not meta.get("finalizers"):
                return self._remove(self._key(kind, namespace, name))
            if "deletionTimestamp" not in meta:
                meta["deletionTimestamp"] = self.now()
                meta["generation"] = meta.get("generation", 0) + 1
            if kind.plural == "pods":
                meta["deletionGracePeriodSeconds"] = min(grace, meta.get("deletionGracePeriodSeconds", grace))
            else:
                meta["deletionGracePeriodSeconds"] = 0
            if new == old:
                return old
            return self._store(self._key(kind, namespace, name), "MODIFIED", new)

    def since(self, version: int) -> list[Event]:
        """Return the changes after a version. Raises Refused 410 where the log has forgotten some of them."""
        if version < self.compacted:
            message = f"too old resource version: {version} ({self.compacted})"
            raise Refused(410, "Expired", message)
        if version > self._version:
            raise Refused(504, "Timeout", f"Too large resource version: {version}, current: {self._version}")
        return [event for event in self.log if event.version > version]

    def compact(self) -> None:
        """Forget the log: whoever watches from before must list again."""
        with self.changed:
            self.compacted = self._version
            self.log.clear()
            self.changed.notify_all()

    def _update(self, kind: Kind, old: Obj, new: Obj, *, manager: str | None, status: bool) -> Obj:
        """Store what becomes of `old`; `manager` None: the owners of fields are settled already."""
        name, namespace = old["metadata"]["name"], old["metadata"].get("namespace", "")
        new = _status_only(old, new) if status else _without_foreign_status(kind, old, new)
        self._keep_system_fields(old, new)
        if not status:
            _check_immutable(kind, old, new)
            _check_finalizers(kind, old, new)
        self._validate(kind, new, old)
        if _content(new) != _content(old):
            new["metadata"]["generation"] = old["metadata"].get("generation", 0) + 1
        if manager is not None:
            fields.own_update(old, new, manager, self.now(), subresource="status" if status else "")
        if new == old or _same_but_times(new, old):
            return old
        meta = new["metadata"]
        key = self._key(kind, namespace, name)
        over = kind.plural != "pods" or meta.get("deletionGracePeriodSeconds") == 0
        if "deletionTimestamp" in meta and not meta.get("finalizers") and over:
            self._objects[key] = new
            return self._remove(key)
        return self._store(key, "MODIFIED", new)

    def _store(self, key: Key, event: str, new: Obj) -> Obj:
        before = self._objects.get(key)
        self._version += 1
        new["metadata"]["resourceVersion"] = str(self._version)
        self._objects[key] = new
        self.log.append(Event(self._version, key, event, new, before))
        self.changed.notify_all()
        return new

    def _remove(self, key: Key) -> Obj:
        gone = self._objects.pop(key)
        self._version += 1
        last = {**gone, "metadata": {**gone["metadata"], "resourceVersion": str(self._version)}}
        self.log.append(Event(self._version, key, "DELETED", last, gone))
        self.changed.notify_all()
        return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}

    def _complete(self, kind: Kind, namespace: str, new: Obj) -> None:
        new["apiVersion"], new["kind"] = kind.api_version, kind.name
        meta = new["metadata"]
        for system in ("deletionTimestamp", "deletionGracePeriodSeconds", "selfLink"):
            meta.pop(system, None)
        meta.update(uid=str(uuid.uuid4()), creationTimestamp=self.now(), generation=1)
        if kind.namespaced:
            meta["namespace"] = namespace
        if kind.has_status and kind.plural not in ("nodes", "namespaces"):
            new.pop("status", None)
        if kind.plural == "pods":
            new.setdefault("spec", {}).setdefault("terminationGracePeriodSeconds", 30)
            new["status"] = {"phase": "Pending"}

    def _keep_system_fields(self, old: Obj, new: Obj) -> None:
        new["apiVersion"], new["kind"] = old["apiVersion"], old["kind"]
        meta = new.setdefault("metadata", {})
        for system in (
            "name",
            "namespace",
            "uid",
            "creationTimestamp",
            "generation",
            "resourceVersion",
            "deletionTimestamp",
            "deletionGracePeriodSeconds",
        ):
            if system in old["metadata"]:
                meta[system] = old["metadata"][system]
            else:
                meta.pop(system, None)
        meta.setdefault("managedFields", old["metadata"].get("managedFields", []))

    def _check_identity(self, kind: Kind, namespace: str, body: Obj, *, name: str | None) -> None:
        said = body.get("apiVersion", kind.api_version), body.get("kind", kind.name)
        if said != (kind.api_version, kind.name):
            raise Refused(400, "BadRequest", f"{said} is not {kind.api_version} {kind.name}")
        meta = body.get("metadata", {})
        if kind.namespaced and meta.get("namespace", namespace) != namespace:
            raise Refused(400, "BadRequest", "the namespace of the object does not match the namespace on the request")
        if name is not None and meta.get("name", name) != name:
            raise Refused(400, "BadRequest", f"the name of the object ({meta['name']}) does not match the URL ({name})")
        for own in meta.get("ownerReferences", ()):
            if missing := {"apiVersion", "kind", "name", "uid"} - own.keys():
                raise _invalid(kind, meta.get("name", ""), f"metadata.ownerReferences: {sorted(missing)} required")

    def _check_namespace(self, kind: Kind, namespace: str) -> None:
        if kind.namespaced and ("", "namespaces", "", namespace) not in self._objects:
            raise Refused(404, "NotFound", f'namespaces "{namespace}" not found')

    def _check_version(self, kind: Kind, old: Obj, body: Obj) -> None:
        meta = body.get("metadata") or {}
        if meta.get("resourceVersion") not in (None, "", old["metadata"]["resourceVersion"]):
            raise _conflict(
                kind,
                old["metadata"]["name"],
                "the object has been modified; please apply your changes to the latest version and try again",
            )
        if meta.get("uid") not in (None, "", old["metadata"]["uid"]):
            raise _conflict(
                kind,
                old["metadata"]["name"],
                f"Precondition failed: uid in precondition: {meta['uid']}, in object meta: {old['metadata']['uid']}",
            )

    def _validate(self, kind: Kind, new: Obj, old: Obj | None) -> None:
        if kind.plural == "events" and new["involvedObject"].get("namespace", "") != new["metadata"]["namespace"]:
            raise _invalid(kind, new["metadata"]["name"], "involvedObject.namespace: does not match event.namespace")
        if kind.crd is None:
            return
        schema.prune(kind.crd, new)
        if errors := schema.check(kind.crd, new, old):
            raise _invalid(kind, new["metadata"]["name"], "; ".join(errors))

    def _get(self, kind: Kind, namespace: str, name: str) -> Obj:
        try:
            return self._objects[self._key(kind, namespace, name)]
        except KeyError:
            raise _not_found(kind, name) from None

    @staticmethod
    def _key(kind: Kind, namespace: str, name: str) -> Key:
        return kind.group, kind.plural, namespace if kind.namespaced else "", name


def _not_found(kind: Kind, name: str) -> Refused:
    return Refused(404, "NotFound", f'{kind.plural} "{name}" not found', {"name": name, "kind": kind.plural})


def _conflict(kind: Kind, name: str, why: str) -> Refused:
    message = f'Operation cannot be fulfilled on {kind.plural} "{name}": {why}'
    return Refused(409, "Conflict", message, {"name": name, "kind": kind.plural})


def _invalid(kind: Kind, name: str, why: str) -> Refused:
    return Refused(422, "Invalid", f'{kind.name} "{name}" is invalid: {why}', {"name": name, "kind": kind.name})


def _grace(kind: Kind, old: Obj, options: Obj) -> int:
    """Return for how many seconds a pod may go on; other kinds, and pods that no node has, are done at once."""
    if kind.plural != "pods" or not old["spec"].get("nodeName"):
        return 0
    if old.get("status", {}).get("phase") in ("Succeeded", "Failed"):
        return 0
    asked = options.get("gracePeriodSeconds")
    return int(old["spec"]["terminationGracePeriodSeconds"] if asked is None else asked)


def _merged(old: Any, patch: Any) -> Any:
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    result = copy.deepcopy(old) if isinstance(old, dict) else {}
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        else:
            result[name] = _merged(result.get(name), value)
    return result


def _without_status(kind: Kind, body: Obj) -> Obj:
    return {name: value for name, value in body.items() if name != "status" or not kind.has_status}


def _without_foreign_status(kind: Kind, old: Obj, new: Obj) -> Obj:
    """A write to the object itself leaves its status alone."""
    if not kind.has_status:
        return new
    new = _without_status(kind, new)
    if "status" in old:
        new["status"] = copy.deepcopy(old["status"])
    return new


def _status_only(old: Obj, new: Obj) -> Obj:
    """A write to the status leaves all else alone."""
    result = copy.deepcopy(old)
    result.pop("status", None)
    if "status" in new:
        result["status"] = copy.deepcopy(new["status"])
    if "managedFields" in new.get("metadata", {}):
        result["metadata"]["managedFields"] = new["metadata"]["managedFields"]
    return result


def _check_immutable(kind: Kind, old: Obj, new: Obj) -> None:
    for path in kind.immutable:
        if _at(old, path) != _at(new, path):
            raise _invalid(kind, old["metadata"]["name"], f"{path}: Forbidden: field is immutable")


def _check_finalizers(kind: Kind, old: Obj, new: Obj) -> None:
    meta = new["metadata"]
    added = set(meta.get("finalizers", ())) - set(old["metadata"].get("finalizers", ()))
    if "deletionTimestamp" in old["metadata"] and added:
        why = f"metadata.finalizers: Forbidden: no new finalizers can be added if the object is being deleted: {added}"
        raise _invalid(kind, meta["name"], why)


def _at(obj: Obj, path: str) -> Any:
    value: Any = obj
    for part in path.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return value or None


def _content(obj: Obj) -> str:
    return json.dumps(
        {name: value for name, value in obj.items() if name not in ("metadata", "status")}, sort_keys=True
    )


def _same_but_times(new: Obj, old: Obj) -> bool:
    """A write that changes nothing but the time in managedFields changes nothing."""

    def bare(obj: Obj) -> Obj:
        managed = [{**each, "time": ""} for each in obj["metadata"].get("managedFields", ())]
        return {**obj, "metadata": {**obj["metadata"], "managedFields": managed}}

    return bare(new) == bare(old)
