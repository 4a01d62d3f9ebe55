"""The emulated API server: HTTP for the official client over `objects`, with faults where a test wants them.

Every request is counted. Before a request takes effect `fault` is asked what goes wrong with it: nothing, an error of
the server, a broken connection before the effect, or one after it, so that the answer is lost.
"""

from __future__ import annotations

import json
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from tests.kube.apply import Conflicts
from tests.kube.objects import Event, Kind, Obj, Objects, Refused

PATH = re.compile(
    r"^/(?:api/(?P<core>v1)|apis/(?P<group>[^/]+)/(?P<version>[^/]+))"
    r"(?:/namespaces/(?P<namespace>[^/]+)(?=/[^/]))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+)(?:/(?P<sub>[^/]+))?)?$"
)
WRITES = ("POST", "PUT", "PATCH", "DELETE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One request, as faults and tests see it. `number` counts all, `write` the writes, from 1; 0: it is none."""

    number: int
    write: int
    method: str
    plural: str
    name: str
    sub: str
    query: dict[str, str]
    content_type: str

    def __str__(self) -> str:
        return f"{self.method} {'/'.join(part for part in (self.plural, self.name, self.sub) if part)}"


@dataclass(frozen=True, slots=True)
class Fault:
    """What goes wrong. `error`: an answer of this status; `lost`: done, but unanswered; `cut`: neither."""

    kind: Literal["error", "lost", "cut"]
    code: int = 500

    def refused(self) -> Refused:
        """Return the answer of the server."""
        reason = {409: "Conflict", 429: "TooManyRequests", 403: "Forbidden"}.get(self.code, "InternalError")
        return Refused(self.code, reason, "a fault was injected")


class Server:
    """One API server on a free port of this machine. Use it as a context manager."""

    def __init__(self, objects: Objects) -> None:
        self.objects = objects
        self.fault: Callable[[Request], Fault | None] = lambda _: None
        self.calls: list[Request] = []
        self.mistakes: list[str] = []
        """Of the emulator itself: none in a test that passes."""
        self.unanswered_watches_s = 30.0
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._http = _Http(("127.0.0.1", 0), _Handler)
        self._http.owner = self
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True)

    @property
    def url(self) -> str:
        """Return where it listens."""
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> Server:
        # Client and server are threads of one interpreter: who waits for an answer must not wait for its turn too.
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(0.0002)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        sys.setswitchinterval(self._interval)
        self._stopping.set()
        with self.objects.changed:
            self.objects.changed.notify_all()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    @contextmanager
    def failing(self, fault: Callable[[Request], Fault | None]) -> Iterator[None]:
        """Ask `fault` for the time of the `with`."""
        self.fault = fault
        try:
            yield
        finally:
            self.fault = lambda _: None

    @property
    def writes(self) -> list[Request]:
        """Return the writes so far, events left out."""
        return [call for call in self.calls if call.method in WRITES and call.plural != "events"]

    @property
    def is_stopping(self) -> bool:
        """Tell whether watches are to end."""
        return self._stopping.is_set()

    def count(self, method: str, target: dict[str, str], query: dict[str, str], content_type: str) -> Request:
        """Count a request."""
        with self._lock:
            # Events are said and never read: nothing comes between two writes by them.
            is_write = method in WRITES and target["plural"] != "events"
            request = Request(
                number=len(self.calls) + 1,
                write=len(self.writes) + 1 if is_write else 0,
                method=method,
                plural=target["plural"],
                name=target["name"] or "",
                sub=target["sub"] or "",
                query=query,
                content_type=content_type,
            )
            self.calls.append(request)
            return request


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    owner: Server

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hangs up is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Http
    disable_nagle_algorithm = True
    wbufsize = -1

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        self._serve()

    do_POST = do_PUT = do_PATCH = do_DELETE = do_GET

    def _serve(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(length) if length else b""
        parts = urlsplit(self.path)
        query = dict(parse_qsl(parts.query))
        match = PATH.match(unquote(parts.path))
        if match is None:
            self._answer(404, Refused(404, "NotFound", "the server could not find the requested resource").status())
            return
        server = self.server.owner
        request = server.count(self.command, match.groupdict(), query, self.headers.get("Content-Type", ""))
        fault = server.fault(request)
        try:
            if fault and fault.kind == "cut":
                self.close_connection = True
                return
            if fault and fault.kind == "error":
                raise fault.refused()
            kind = self._kind(match)
            if query.get("watch") in ("1", "true"):
                self._watch(kind, match["namespace"], query)
                return
            code, body = self._call(kind, match, request, json.loads(raw) if raw else {})
        except Conflicts as conflicts:
            code, body = 409, Refused(409, "Conflict", f"Apply failed: {conflicts}").status()
        except Refused as refused:
            code, body = refused.code, refused.status()
        except Exception:
            server.mistakes.append(f"{request}: {traceback.format_exc()}")
            code, body = 500, Refused(500, "InternalError", "the emulator is wrong").status()
        if fault and fault.kind == "lost":
            self.close_connection = True
            return
        self._answer(code, body)

    def _kind(self, match: re.Match[str]) -> Kind:
        kind = self.server.owner.objects.kinds.get((match["group"] or "", match["plural"]))
        if kind is None or kind.version != (match["core"] or match["version"]):
            raise Refused(404, "NotFound", "the server could not find the requested resource")
        return kind

    def _call(self, kind: Kind, match: re.Match[str], request: Request, body: Obj) -> tuple[int, Obj]:
        objects, query = self.server.owner.objects, request.query
        namespace, name, sub = match["namespace"] or "", match["name"], match["sub"]
        manager = query.get("fieldManager") or self.headers.get("User-Agent", "unknown").split("/")[0]
        if unknown := query.keys() - {
            "fieldManager",
            "force",
            "labelSelector",
            "fieldSelector",
            "resourceVersion",
            "pretty",
        }:
            raise Refused(501, "NotImplemented", f"{sorted(unknown)} are not emulated")
        if sub not in (None, "status") or (sub and not kind.has_status):
            raise Refused(404, "NotFound", f"{kind.plural} have no {sub}")
        if kind.namespaced and not namespace and (name or request.method != "GET"):
            raise Refused(400, "BadRequest", f"{kind.plural} are in a namespace")
        is_status = sub == "status"
        match request.method, bool(name):
            case "GET", True:
                return 200, objects.get(kind, namespace, name)
            case "GET", False:
                return 200, self._list(kind, match["namespace"], query)
            case "POST", False:
                return 201, objects.create(kind, namespace, body, manager=manager)
            case "PUT", True:
                return 200, objects.replace(kind, namespace, name, body, manager=manager, status=is_status)
            case "DELETE", True:
                return 200, objects.delete(kind, namespace, name, body)
            case "PATCH", True:
                return self._patch(kind, namespace, name, body, request, manager, is_status=is_status)
        raise Refused(405, "MethodNotAllowed", f"{request} is not emulated")

    def _patch(
        self, kind: Kind, namespace: str, name: str, body: Obj, request: Request, manager: str, *, is_status: bool
    ) -> tuple[int, Obj]:
        objects = self.server.owner.objects
        if request.content_type == "application/merge-patch+json":
            return 200, objects.merge(kind, namespace, name, body, manager=manager, status=is_status)
        if request.content_type == "application/apply-patch+yaml":
            manager, force = request.query.get("fieldManager", ""), request.query.get("force") == "true"
            applied, is_new = objects.apply(kind, namespace, name, body, manager=manager, force=force, status=is_status)
            return (201 if is_new else 200), applied
        raise Refused(415, "UnsupportedMediaType", f"{request.content_type} is not emulated")

    def _list(self, kind: Kind, namespace: str | None, query: dict[str, str]) -> Obj:
        objects = self.server.owner.objects
        if query.get("resourceVersion") not in (None, "", "0"):
            raise Refused(501, "NotImplemented", "a list at a resourceVersion is not emulated")
        with objects.changed:
            items = objects.list(kind, namespace, selected(query))
            meta = {"resourceVersion": objects.version}
        return {"kind": f"{kind.name}List", "apiVersion": kind.api_version, "metadata": meta, "items": items}

    def _watch(self, kind: Kind, namespace: str | None, query: dict[str, str]) -> None:
        """Stream changes: from a version on, or first what is there; bookmarks at the end where they are allowed."""
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        server, matches = self.server.owner, selected(query)
        objects = server.objects
        wanted = query.get("resourceVersion", "")
        version = int(wanted or 0)
        with objects.changed:
            first = []
            if wanted in ("", "0"):
                version = int(objects.version)
                first = [{"type": "ADDED", "object": each} for each in objects.list(kind, namespace, matches)]
        timeout_s = min(float(query.get("timeoutSeconds", server.unanswered_watches_s)), server.unanswered_watches_s)
        self._chunk(*first)
        self._follow(kind, namespace, matches, version, timeout_s, bookmarks=query.get("allowWatchBookmarks") == "true")

    def _follow(
        self,
        kind: Kind,
        namespace: str | None,
        matches: Callable[[Obj], bool],
        version: int,
        timeout_s: float,
        *,
        bookmarks: bool,
    ) -> None:
        server = self.server.owner
        objects = server.objects
        while True:
            with objects.changed:
                try:
                    events = objects.since(version)
                except Refused as refused:
                    self._chunk({"type": "ERROR", "object": refused.status()})
                    break
                if not events:
                    woken = not server.is_stopping and objects.changed.wait(timeout_s)
                    if woken and not server.is_stopping:
                        continue
                    if bookmarks:
                        meta = {"resourceVersion": objects.version, "creationTimestamp": None}
                        mark = {"kind": kind.name, "apiVersion": kind.api_version, "metadata": meta}
                        self._chunk({"type": "BOOKMARK", "object": mark})
                    break
                version = events[-1].version
            self._chunk(*(told for each in events if (told := _told(each, kind, namespace, matches))))
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, *events: Obj) -> None:
        for event in events:
            line = json.dumps(event).encode() + b"\n"
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
        self.wfile.flush()

    def _answer(self, code: int, body: Obj) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _told(event: Event, kind: Kind, namespace: str | None, matches: Callable[[Obj], bool]) -> Obj | None:
    """Return what a watch hears of a change: entering its selection is ADDED, leaving it DELETED."""
    group, plural, where, _ = event.key
    if (group, plural) != (kind.group, kind.plural) or namespace not in (None, where):
        return None
    was = event.before is not None and matches(event.before)
    now = event.type != "DELETED" and matches(event.object)
    if not was and not now:
        return None
    return {"type": "MODIFIED" if was and now else "ADDED" if now else "DELETED", "object": event.object}


def selected(query: dict[str, str]) -> Callable[[Obj], bool]:
    """Return the predicate of a label and a field selector."""
    labels = [_label_term(term) for term in _terms(query.get("labelSelector", ""))]
    fields = [_field_term(term) for term in _terms(query.get("fieldSelector", ""))]
    return lambda obj: all(term(obj) for term in (*labels, *fields))


def _terms(text: str) -> list[str]:
    return [term.strip() for term in re.split(r",(?![^(]*\))", text) if term.strip()]


def _label_term(term: str) -> Callable[[Obj], bool]:
    def labels(obj: Obj) -> dict[str, str]:
        return obj["metadata"].get("labels") or {}

    if match := re.fullmatch(r"(\S+)\s+(in|notin)\s+\(([^)]*)\)", term):
        name, verb, values = match[1], match[2], {value.strip() for value in match[3].split(",")}
        return lambda obj: (labels(obj).get(name) in values) == (verb == "in")
    if match := re.fullmatch(r"([^=!]+)(==|=|!=)(.*)", term):
        name, verb, value = match[1].strip(), match[2], match[3].strip()
        return lambda obj: (labels(obj).get(name) == value) == (verb != "!=")
    if term.startswith("!"):
        return lambda obj: term[1:] not in labels(obj)
    return lambda obj: term in labels(obj)


FIELDS = ("metadata.name", "metadata.namespace", "spec.nodeName", "status.phase", "spec.driver", "spec.pool.name")


def _field_term(term: str) -> Callable[[Obj], bool]:
    match = re.fullmatch(r"([^=!]+)(==|=|!=)(.*)", term)
    if match is None or match[1] not in FIELDS:
        raise Refused(400, "BadRequest", f"field label not supported: {term}")
    path, verb, value = match[1].split("."), match[2], match[3]

    def is_so(obj: Obj) -> bool:
        at: Any = obj
        for part in path:
            at = (at or {}).get(part)
        return ((at or "") == value) == (verb != "!=")

    return is_so
