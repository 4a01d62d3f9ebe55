"""The wait of docs/install.md ends when no container runs any more, and not before: kubectl itself on made answers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from openrl.scheduler.clusters.kube_objects import CONTAINERS_OVER, MANAGED
from tests.install.manifests import ROOT

PODS = {"name": "pods", "singularName": "pod", "namespaced": True, "kind": "Pod", "verbs": ["get", "list"]}
DISCOVERY = {
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": []},
    "/api/v1": {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "v1", "resources": [PODS]},
}
RUNNING = {"running": {"startedAt": "2027-01-31T12:00:00Z"}}
ENDED = {"terminated": {"exitCode": 0, "startedAt": "2027-01-31T12:00:00Z", "finishedAt": "2027-01-31T12:01:00Z"}}


class Server(ThreadingHTTPServer):
    """As much of an API server as `kubectl get pods` asks: each list of pods takes the next answer."""

    daemon_threads = True

    def __init__(self, answers: list[list[dict[str, Any]] | None]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = answers
        self.asked: list[str] = []


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        found: dict[str, Any] | None = DISCOVERY.get(path)
        if path.endswith("/pods"):
            self.server.asked.append(query)
            items = self.server.answers.pop(0)
            found = items if items is None else {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}
        body = json.dumps(found or {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 500}).encode()
        self.send_response(200 if found else 500)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    unscheduled = pod("Pending", node="")
    answers = [
        [unscheduled, pod("Running", RUNNING)],
        None,  # a failed question is no answer
        [unscheduled, pod("Pending", {"waiting": {"reason": "ContainerCreating"}})],
        [pod("Succeeded", ENDED), pod("Failed", RUNNING)],  # an eviction calls a pod failed before it has ended
        [unscheduled, pod("Succeeded", ENDED), pod("Failed", ENDED)],
        [],
    ]
    with Server(answers) as made:
        thread = threading.Thread(target=made.serve_forever, args=(0.05,))
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def pod(phase: str, state: dict[str, Any] | None = None, *, node: str = "n1") -> dict[str, Any]:
    """Return a pod that is deleted and keeps its finalizer."""
    meta = {
        "name": "p",
        "namespace": "openrl",
        "finalizers": [CONTAINERS_OVER],
        "deletionTimestamp": "2027-01-31T12:00:00Z",
    }
    statuses = [{"name": "worker", "state": state}] if state else []
    spec = {"containers": [{"name": "worker"}]} | ({"nodeName": node} if node else {})
    return {"kind": "Pod", "apiVersion": "v1", "metadata": meta, "spec": spec,
            "status": {"phase": phase, "containerStatuses": statuses}}  # fmt: skip


def test_the_documented_wait_ends_when_no_container_runs_though_the_pods_stay(server: Server, tmp_path):
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("needs kubectl")
    [wait] = re.findall(r"^until .*?; done$", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE | re.DOTALL)
    assert f"-l {MANAGED} " in wait
    there = f"{kubectl} --server http://127.0.0.1:{server.server_port} --namespace openrl --cache-dir {tmp_path}"
    script = f'kubectl() {{ {there} "$@"; }}\n{wait.replace("sleep 2", "sleep 0.05")}'
    environment = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "KUBECONFIG": "/dev/null"}
    done = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert server.answers == [[]], (server.answers, done.stderr)
