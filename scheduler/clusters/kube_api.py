"""The Kubernetes API as the driver uses it: objects as plain JSON, few verbs, three ways to fail.

The only file that knows the `kubernetes` package: its connection, authentication and TLS, with the bodies left as they
are, since thousands of pods are read every few seconds and each would become a pydantic model. Nothing is retried here:
the next pass of the scheduler looks again. Knows no kind's meaning.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import urllib3
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException

from openrl.scheduler.clusters.errors import ClusterUnavailable

Obj = dict[str, Any]

MANAGER = "openrl-scheduler"
"""Our name as the owner of fields."""
TIMEOUT_S = (5.0, 20.0)
"""To connect, and to answer."""
NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class ApiError(ClusterUnavailable):
    """The API server did not do it, or did not say so; the next pass looks again."""


class Conflict(ApiError):
    """The object is not what it was thought to be: it has changed, exists already, or has another uid."""


class Missing(ApiError):
    """There is no such object."""


class Forbidden(ApiError):
    """Our account may not do it."""


class Expired(ApiError):
    """A watch asks for changes that the server has forgotten; list anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Where the objects of one kind are."""

    group: str
    version: str
    plural: str
    name: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """Return what `apiVersion` says."""
        return f"{self.group}/{self.version}" if self.group else self.version


WORKLOADS = Kind(group="openrl.io", version="v1alpha1", plural="workloads", name="Workload")
LEDGERS = Kind(group="openrl.io", version="v1alpha1", plural="claimledgers", name="ClaimLedger")
CLAIMS = Kind(group="resource.k8s.io", version="v1", plural="resourceclaims", name="ResourceClaim")
ALL_CLAIMS = Kind(
    group="resource.k8s.io", version="v1", plural="resourceclaims", name="ResourceClaim", namespaced=False
)
"""The claims of every namespace, to list alone."""
SLICES = Kind(group="resource.k8s.io", version="v1", plural="resourceslices", name="ResourceSlice", namespaced=False)
PODS = Kind(group="", version="v1", plural="pods", name="Pod")
EVENTS = Kind(group="", version="v1", plural="events", name="Event")
NODES = Kind(group="", version="v1", plural="nodes", name="Node", namespaced=False)


class KubeApi:
    """The objects of one namespace, and those of the cluster."""

    def __init__(self, connection: client.ApiClient, namespace: str) -> None:
        self._connection = connection
        self.namespace = namespace

    @classmethod
    def connect(cls, namespace: str = "", *, kubeconfig: str = "") -> KubeApi:
        """Connect as the pod's service account, else as a kubeconfig says ("" the usual one).

        Raises:
            ValueError: neither is there, or no namespace is known.
        """
        settings = client.Configuration()
        try:
            if kubeconfig:
                config.load_kube_config(kubeconfig, client_configuration=settings)
            elif NAMESPACE_FILE.exists():
                config.load_incluster_config(client_configuration=settings)
            else:
                config.load_kube_config(client_configuration=settings)
        except (ConfigException, OSError) as absent:
            raise ValueError(f"OPENRL_CLUSTER=kubernetes finds no cluster: {absent}") from absent
        if not namespace and NAMESPACE_FILE.exists():
            namespace = NAMESPACE_FILE.read_text().strip()
        if not namespace:
            raise ValueError("OPENRL_NAMESPACE is not set; name the namespace in which workers run")
        return cls.to(settings, namespace)

    @classmethod
    def to(cls, settings: client.Configuration, namespace: str) -> KubeApi:
        """Connect to a known server."""
        settings.retries = False
        return cls(client.ApiClient(settings), namespace)

    def list(self, kind: Kind, *, labels: str = "") -> tuple[list[Obj], str]:
        """Return all objects of a kind with these labels, and the version of the list."""
        body = self._call("GET", kind, query={"labelSelector": labels} if labels else {})
        # Members of a list say neither their kind nor its version.
        items = [{"apiVersion": kind.api_version, "kind": kind.name, **item} for item in body.get("items") or []]
        return items, body["metadata"]["resourceVersion"]

    def get(self, kind: Kind, name: str) -> Obj:
        """Return one object. Raises Missing."""
        return self._call("GET", kind, name)

    def create(self, kind: Kind, body: Obj) -> Obj:
        """Create an object. Raises Conflict where one of its name exists."""
        return self._call("POST", kind, body=body, query={"fieldManager": MANAGER})

    def apply(self, kind: Kind, body: Obj, *, status: bool = False) -> Obj:
        """Create an object or change its fields that are ours (server-side apply). Where it exists so, nothing changes.

        Raises Conflict where another manager owns one of the fields: it is not taken away.
        """
        return self._call(
            "PATCH",
            kind,
            body["metadata"]["name"],
            sub="status" if status else "",
            body=body,
            query={"fieldManager": MANAGER},
            content_type="application/apply-patch+yaml",
        )

    def replace(self, kind: Kind, body: Obj, *, status: bool = False) -> Obj:
        """Replace an object, or its status, if it is still of the version that the body names. Raises Conflict."""
        assert body["metadata"].get("resourceVersion"), "a replace without a version overwrites what it has not seen"
        name = body["metadata"]["name"]
        query = {"fieldManager": MANAGER}
        return self._call("PUT", kind, name, sub="status" if status else "", body=body, query=query)

    def merge(self, kind: Kind, name: str, patch: Obj) -> Obj:
        """Change parts of an object (RFC 7386), at the version that the patch may name. Raises Conflict."""
        return self._call(
            "PATCH",
            kind,
            name,
            body=patch,
            query={"fieldManager": MANAGER},
            content_type="application/merge-patch+json",
        )

    def delete(self, kind: Kind, seen: Obj, *, unchanged: bool = False) -> None:
        """Delete the very object that was seen, `unchanged`: only in the version that was seen. Never by force.

        One that is gone is fine. Raises Conflict where another has its name, or it has changed.
        """
        meta = seen["metadata"]
        conditions = {"uid": meta["uid"], **({"resourceVersion": meta["resourceVersion"]} if unchanged else {})}
        options = {"apiVersion": "v1", "kind": "DeleteOptions", "preconditions": conditions}
        try:
            self._call("DELETE", kind, meta["name"], body=options)
        except Missing:
            return

    def watch(self, kind: Kind, version: str, *, labels: str = "", timeout_s: int = 300) -> Iterator[tuple[str, Obj]]:
        """Yield changes after a version: (type, object), bookmarks among them. Ends with the server's patience.

        Raises Expired where the server has forgotten that version.
        """
        query = {
            "watch": "1",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(timeout_s),
        }
        if labels:
            query["labelSelector"] = labels
        response = self._send("GET", kind, query=query, timeout=(TIMEOUT_S[0], timeout_s + 30.0))
        try:
            for line in _lines(response):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise _error(event["object"].get("code", 0), json.dumps(event["object"]))
                yield event["type"], event["object"]
        except (urllib3.exceptions.HTTPError, OSError) as broken:
            raise ApiError(f"a watch of {kind.plural} broke off: {broken}") from broken
        finally:
            response.close()

    def close(self) -> None:
        """Close the connections."""
        self._connection.close()

    def _call(self, method: str, kind: Kind, name: str = "", **fields: Any) -> Obj:
        response = self._send(method, kind, name, **fields)
        try:
            body: Obj = json.loads(response.data)
        except (urllib3.exceptions.HTTPError, OSError, ValueError) as broken:
            raise ApiError(f"{method} {kind.plural} {name}: the answer broke off: {broken}") from broken
        return body

    def _send(
        self,
        method: str,
        kind: Kind,
        name: str = "",
        *,
        sub: str = "",
        body: Any = None,
        query: dict[str, str] | None = None,
        content_type: str = "application/json",
        timeout: tuple[float, float] = TIMEOUT_S,
    ) -> urllib3.BaseHTTPResponse:
        prefix = f"/apis/{kind.group}/{kind.version}" if kind.group else f"/api/{kind.version}"
        inside = f"/namespaces/{quote(self.namespace)}" if kind.namespaced else ""
        path = f"{prefix}{inside}/{kind.plural}" + "".join(f"/{quote(part)}" for part in (name, sub) if part)
        request = self._connection.param_serialize(
            method,
            path,
            query_params=list((query or {}).items()),
            header_params={"Accept": "application/json", "Content-Type": content_type},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            answer = self._connection.call_api(*request, _request_timeout=timeout)
            if not 200 <= answer.status <= 299:
                raise _error(answer.status, f"{method} {kind.plural} {name} {sub}: {_said(answer.read())}")
        except (urllib3.exceptions.HTTPError, OSError, ApiException) as broken:
            raise ApiError(f"{method} {kind.plural} {name}: {broken}") from broken
        response: urllib3.BaseHTTPResponse = answer.response
        return response


def _error(status: int, message: str) -> ApiError:
    kinds: dict[int, type[ApiError]] = {403: Forbidden, 404: Missing, 409: Conflict, 410: Expired}
    return kinds.get(status, ApiError)(f"{status} {message}")


def _said(body: bytes | None) -> str:
    try:
        return str(json.loads(body or b"")["message"])
    except (ValueError, KeyError, TypeError):
        return repr((body or b"")[:200])


def _lines(response: urllib3.BaseHTTPResponse) -> Iterator[bytes]:
    rest = b""
    for piece in response.stream(amt=None):
        *whole, rest = (rest + piece).split(b"\n")
        yield from (line for line in whole if line)
