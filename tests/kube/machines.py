"""What a cluster does around the API server: kube-scheduler with DRA, kubelets, node loss, garbage collection.

Each is a step that a test takes when it likes, on the emulator's own clock: nothing happens between two steps. After
the DRA pages of kubernetes.io: a claim is allocated while a pod that names it is scheduled, on a node whose slices have
a free device that its selectors match; its pods follow it there; the last one that leaves deallocates it.
"""

from __future__ import annotations

import datetime
from functools import cache
from pathlib import Path
from typing import Any

import cel
import yaml

from tests.kube import schema
from tests.kube.objects import Obj, Objects, Refused
from tests.kube.server import Server

CRDS = Path(__file__).parents[2] / "k8s" / "crds"
PROTECTION = "resource.kubernetes.io/delete-protection"
DRIVER = "gpu.nvidia.com"
NAMESPACE = "openrl"
EPOCH = 1_800_000_000.0


class Machines:
    """The machines of one cluster. `server` speaks HTTP; everything else writes as a system component would."""

    def __init__(self) -> None:
        self.clock_s = EPOCH
        self.objects = Objects(now=lambda: stamp(self.clock_s))
        self.server = Server(self.objects)
        self.start_s = 2.0
        """From bound to running."""
        self.stop_s = 1.0
        """From asked to terminated."""
        self.silent: set[str] = set()
        """Nodes that don't answer: nothing of their pods changes."""
        self.exits: dict[str, int] = {}
        """Pods that are about to end by themselves, by name, with the exit code."""
        self.containers: dict[str, Obj] = {}
        """Pods whose container really runs, by uid, as they were when it started: the API may say otherwise."""
        self._since: dict[str, float] = {}
        for crd in definitions():
            self.objects.define(crd)
        self._create("namespaces", "", {"metadata": {"name": NAMESPACE}})
        self._create(
            "deviceclasses",
            "",
            {
                "metadata": {"name": "openrl-gpu"},
                "spec": {"selectors": [{"cel": {"expression": f'device.driver == "{DRIVER}"'}}]},
            },
        )

    def add_node(
        self,
        name: str,
        *,
        gpus: int = 1,
        gpu: str = "80Gi",
        memory: str = "256Gi",
        roles: tuple[str, ...] = ("trainer", "sampler"),
    ) -> None:
        """Add a node that opts in, with its devices."""
        labels = {"openrl.io/enabled": "true", **{f"openrl.io/{role}": "true" for role in roles}}
        self._create(
            "nodes",
            "",
            {
                "metadata": {"name": name, "labels": labels},
                "spec": {},
                "status": {
                    "allocatable": {"memory": memory, "cpu": "64"},
                    "conditions": [{"type": "Ready", "status": "True"}],
                    "nodeInfo": {"bootID": f"boot-{name}-1"},
                },
            },
        )
        devices = [
            {
                "name": f"gpu-{index}",
                "attributes": {"type": {"string": "gpu"}, "cudaComputeCapability": {"version": "9.0.0"}},
                "capacity": {"memory": {"value": gpu}},
            }
            for index in range(gpus)
        ]
        pool = {"name": name, "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": DRIVER, "nodeName": name, "pool": pool, "devices": devices}
        if gpus:
            self._create("resourceslices", "", {"metadata": {"name": f"{name}-gpus"}, "spec": spec})

    def step(self, seconds: float = 1.0) -> None:
        """Let time pass, and every component look once."""
        self.clock_s += seconds
        self.collect()
        self.schedule()
        self.run_kubelets()
        self.settle_claims()
        self.collect()

    def hold_device(self, node: str, device: str, *, namespace: str) -> None:
        """Let a claim of another namespace have a device."""
        self._create("namespaces", "", {"metadata": {"name": namespace}})
        request = {
            "name": "gpu",
            "exactly": {"deviceClassName": "openrl-gpu", "allocationMode": "ExactCount", "count": 1},
        }
        body = {"metadata": {"name": "theirs"}, "spec": {"devices": {"requests": [request]}}}
        self._create("resourceclaims", namespace, body)
        result = {"request": "gpu", "driver": DRIVER, "pool": node, "device": device}
        term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
        allocation = {"devices": {"results": [result]}, "nodeSelector": {"nodeSelectorTerms": [term]}}
        self._write(
            self.objects.get(self._kind("resourceclaims"), namespace, "theirs"), status={"allocation": allocation}
        )

    def cordon(self, name: str) -> None:
        """Let no more pods come to a node, as `kubectl cordon` does."""
        self._merge("nodes", "", name, {"spec": {"unschedulable": True}})

    def shrink_node(self, name: str, memory: str) -> None:
        """Let others take so much of a node's memory that this is left for us, without a word in its books."""
        self._status("nodes", "", name, {"allocatable": {"memory": memory, "cpu": "64"}})

    def lose_node(self, name: str) -> None:
        """The node stops answering: its pods are told to go after a while, and don't."""
        self.silent.add(name)
        self._status("nodes", "", name, {"conditions": [{"type": "Ready", "status": "Unknown"}]})
        for pod in self.objects.all("pods"):
            if pod["spec"].get("nodeName") == name:
                self.evict(pod["metadata"]["name"])

    def reboot_node(self, name: str) -> None:
        """The node is back after a boot: nothing of what ran there runs."""
        self.silent.discard(name)
        node = self.objects.get(self._kind("nodes"), "", name)
        boot = node["status"]["nodeInfo"]["bootID"]
        status = {"conditions": [{"type": "Ready", "status": "True"}], "nodeInfo": {"bootID": boot + "x"}}
        self._status("nodes", "", name, status)
        self._power_off(name)
        for pod in self.objects.all("pods"):
            if pod["spec"].get("nodeName") == name and pod["status"].get("containerStatuses"):
                self._end(pod, 255)

    def remove_node(self, name: str) -> None:
        """The node is gone for good: so are its slices; its pods are removed by pod garbage collection."""
        self.silent.discard(name)
        self._power_off(name)
        self.objects.delete(self._kind("nodes"), "", name, {})
        self._delete_if_there("resourceslices", "", f"{name}-gpus", {})

    def _power_off(self, name: str) -> None:
        self.containers = {uid: pod for uid, pod in self.containers.items() if pod["spec"]["nodeName"] != name}

    def evict(self, name: str) -> None:
        """Ask a pod to go, as the eviction API does."""
        self._delete_if_there("pods", NAMESPACE, name, {})

    def exit(self, name: str, code: int) -> None:
        """Let a pod's container end by itself at the next look."""
        self.exits[name] = code

    def collect(self) -> None:
        """Garbage collection: dependents whose owners are all gone, pods whose node is gone."""
        uids = {
            each["metadata"]["uid"] for kind in self.objects.kinds.values() for each in self.objects.all(kind.plural)
        }
        for plural in ("pods", "resourceclaims", "claimledgers", "workloads"):
            for each in self.objects.all(plural):
                owners = each["metadata"].get("ownerReferences", [])
                if owners and not any(owner["uid"] in uids for owner in owners):
                    meta = each["metadata"]
                    self._delete_if_there(
                        plural, meta["namespace"], meta["name"], {"preconditions": {"uid": meta["uid"]}}
                    )
        nodes = {node["metadata"]["name"] for node in self.objects.all("nodes")}
        for pod in self.objects.all("pods"):
            if pod["spec"].get("nodeName") and pod["spec"]["nodeName"] not in nodes:
                if pod["status"].get("phase") not in ("Failed", "Succeeded"):
                    self._status("pods", NAMESPACE, pod["metadata"]["name"], {"phase": "Failed"})
                self._delete_if_there("pods", NAMESPACE, pod["metadata"]["name"], {"gracePeriodSeconds": 0})

    def schedule(self) -> None:
        """kube-scheduler: bind what fits, and say of the rest that it is unschedulable."""
        for pod in self.objects.all("pods"):
            if pod["spec"].get("nodeName") or "deletionTimestamp" in pod["metadata"]:
                continue
            node, why = self._fit(pod)
            if node is None:
                condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": why}
                old = pod["status"].get("conditions", [])
                if [(c["type"], c["status"]) for c in old] != [("PodScheduled", "False")]:
                    condition["lastTransitionTime"] = stamp(self.clock_s)
                    self._status("pods", NAMESPACE, pod["metadata"]["name"], {"conditions": [condition]})
                continue
            self._bind(pod, node)

    def run_kubelets(self) -> None:
        """Kubelets: start what is bound, end what is to go or is gone from the API, and tell."""
        there = {pod["metadata"]["uid"] for pod in self.objects.all("pods")}
        for uid, pod in list(self.containers.items()):
            if uid not in there and pod["spec"]["nodeName"] not in self.silent:
                del self.containers[uid]
        for pod in self.objects.all("pods"):
            meta, name = pod["metadata"], pod["metadata"]["name"]
            node = pod["spec"].get("nodeName")
            if node is None or node in self.silent or node not in self._nodes():
                continue
            since = self._since.setdefault(meta["uid"], self.clock_s)
            phase = pod["status"]["phase"]
            if "deletionTimestamp" in meta:
                self._terminate(pod)
            elif name in self.exits:
                self._end(pod, self.exits.pop(name))
            elif phase == "Pending" and self.clock_s >= since + self.start_s:
                running = _container({"running": {"startedAt": stamp(self.clock_s)}})
                self.containers[meta["uid"]] = pod
                self._status("pods", NAMESPACE, name, {"phase": "Running", "containerStatuses": [running]})

    def settle_claims(self) -> None:
        """The claim controller: who has left is struck off; the last one deallocates; protection ends with the use."""
        pods = {pod["metadata"]["uid"]: pod for pod in self.objects.all("pods")}
        for claim in self.objects.all("resourceclaims"):
            if claim["metadata"]["namespace"] != NAMESPACE:
                continue  # whose pods aren't here
            status = claim.get("status", {})
            reserved = status.get("reservedFor", [])
            users = [each for each in reserved if each["uid"] in pods and not _is_over(pods[each["uid"]])]
            meta = claim["metadata"]
            if users != reserved or (not users and "allocation" in status):
                new = {"allocation": status["allocation"], "reservedFor": users} if users else {}
                self._write(claim, status=new)
            if not users and PROTECTION in meta.get("finalizers", ()):
                rest = [each for each in meta["finalizers"] if each != PROTECTION]
                self._merge("resourceclaims", NAMESPACE, meta["name"], {"metadata": {"finalizers": rest or None}})

    def running(self) -> dict[str, str]:
        """Return the pods whose containers run, whatever the API says: name -> assignment id."""
        return {
            pod["metadata"]["name"]: environment(pod).get("OPENRL_ASSIGNMENT_ID", "")
            for pod in self.containers.values()
        }

    def _fit(self, pod: Obj) -> tuple[str | None, str]:
        """Return the node that takes a pod, or why none does."""
        names = [entry["resourceClaimName"] for entry in pod["spec"].get("resourceClaims", [])]
        claims = {claim["metadata"]["name"]: claim for claim in self.objects.all("resourceclaims")}
        for name in names:
            if name not in claims:
                return None, f'waiting for resourceclaim "{name}"'
            if "deletionTimestamp" in claims[name]["metadata"]:
                return None, f'resourceclaim "{name}" is being deleted'
        fitting = [node for node in self.objects.all("nodes") if self._takes(node, pod)]
        for node in fitting:
            name = node["metadata"]["name"]
            if all(self._can_allocate(claims[each], name) is not None for each in names):
                return name, ""
        return None, f"0/{len(fitting)} nodes are available: cannot allocate all claims"

    def _takes(self, node: Obj, pod: Obj) -> bool:
        name, labels = node["metadata"]["name"], node["metadata"].get("labels", {})
        if name in self.silent or node["spec"].get("unschedulable"):
            return False
        if any(labels.get(key) != value for key, value in pod["spec"].get("nodeSelector", {}).items()):
            return False
        others = [
            each
            for each in self.objects.all("pods")
            if each["spec"].get("nodeName") == name
            and not _is_over(each)
            and each["metadata"]["uid"] != pod["metadata"]["uid"]
        ]
        room = schema.quantity(node["status"]["allocatable"]["memory"])
        return sum(map(_memory, others)) + _memory(pod) <= room

    def _can_allocate(self, claim: Obj, node: str) -> list[Obj] | None:
        """Return the devices that a claim has or would get on a node; None: it can't be there."""
        allocation = claim.get("status", {}).get("allocation")
        if allocation:
            if len(claim["status"].get("reservedFor", [])) >= 256:
                return None
            (term,) = allocation["nodeSelector"]["nodeSelectorTerms"]
            return allocation["devices"]["results"] if term["matchFields"][0]["values"] == [node] else None
        taken = {
            (result["pool"], result["device"])
            for other in self.objects.all("resourceclaims")
            for result in other.get("status", {}).get("allocation", {}).get("devices", {}).get("results", [])
        }
        results: list[Obj] = []
        for request in claim["spec"]["devices"]["requests"]:
            found = self._devices_for(request, node, taken)
            if found is None:
                return None
            results += found
        return results

    def _devices_for(self, request: Obj, node: str, taken: set[tuple[str, str]]) -> list[Obj] | None:
        options = [(request["name"], request["exactly"])] if "exactly" in request else []
        options += [(f"{request['name']}/{each['name']}", each) for each in request.get("firstAvailable", [])]
        for name, wanted in options:
            free = [
                {
                    "request": name,
                    "driver": piece["spec"]["driver"],
                    "pool": piece["spec"]["pool"]["name"],
                    "device": device["name"],
                }
                for piece in self.objects.all("resourceslices")
                if piece["spec"]["nodeName"] == node
                for device in piece["spec"]["devices"]
                if (piece["spec"]["pool"]["name"], device["name"]) not in taken and self._matches(wanted, piece, device)
            ]
            count = wanted.get("count", 1)
            if len(free) >= count:
                taken |= {(each["pool"], each["device"]) for each in free[:count]}
                return free[:count]
        return None

    def _matches(self, wanted: Obj, piece: Obj, device: Obj) -> bool:
        device_class = self.objects.get(self._kind("deviceclasses"), "", wanted["deviceClassName"])
        selectors = device_class["spec"].get("selectors", []) + wanted.get("selectors", [])
        driver = piece["spec"]["driver"]
        attributes = {
            name: schema_version(value["version"]) if "version" in value else next(iter(value.values()))
            for name, value in device.get("attributes", {}).items()
        }
        capacity = {name: schema.quantity(value["value"]) for name, value in device.get("capacity", {}).items()}
        context = schema.functions()
        context.add_variable(
            "device", {"driver": driver, "attributes": {driver: attributes}, "capacity": {driver: capacity}}
        )
        return all(cel.evaluate(each["cel"]["expression"], context) is True for each in selectors)

    def _bind(self, pod: Obj, node: str) -> None:
        meta = pod["metadata"]
        for entry in pod["spec"].get("resourceClaims", []):
            claim = self.objects.get(self._kind("resourceclaims"), NAMESPACE, entry["resourceClaimName"])
            status = claim.get("status", {})
            results = self._can_allocate(claim, node)
            term = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]}
            allocation = status.get("allocation") or {
                "devices": {"results": results},
                "nodeSelector": {"nodeSelectorTerms": [term]},
            }
            user = {"resource": "pods", "name": meta["name"], "uid": meta["uid"]}
            held = [each for each in status.get("reservedFor", []) if each["uid"] != meta["uid"]]
            finalizers = sorted({*claim["metadata"].get("finalizers", []), PROTECTION})
            self._merge(
                "resourceclaims", NAMESPACE, claim["metadata"]["name"], {"metadata": {"finalizers": finalizers}}
            )
            self._write(claim, status={"allocation": allocation, "reservedFor": [*held, user]})
        self._merge("pods", NAMESPACE, meta["name"], {"spec": {"nodeName": node}})
        done = {"type": "PodScheduled", "status": "True", "lastTransitionTime": stamp(self.clock_s)}
        self._status("pods", NAMESPACE, meta["name"], {"conditions": [done]})

    def _terminate(self, pod: Obj) -> None:
        meta = pod["metadata"]
        asked = datetime.datetime.fromisoformat(meta["deletionTimestamp"]).timestamp()
        if self.clock_s < asked + self.stop_s:
            return
        if not _is_over(pod) or _is_running(pod):
            # Also one that pod garbage collection has called failed: what a kubelet finds no container of has ended.
            self._end(pod, 137 if _is_over(pod) else 0)
        self._delete_if_there("pods", NAMESPACE, meta["name"], {"gracePeriodSeconds": 0})

    def _end(self, pod: Obj, code: int) -> None:
        self.containers.pop(pod["metadata"]["uid"], None)
        ended = _container({"terminated": {"exitCode": code, "finishedAt": stamp(self.clock_s)}})
        phase = "Failed" if code else "Succeeded"
        self._status("pods", NAMESPACE, pod["metadata"]["name"], {"phase": phase, "containerStatuses": [ended]})

    def _nodes(self) -> set[str]:
        return {node["metadata"]["name"] for node in self.objects.all("nodes")}

    def _kind(self, plural: str) -> Any:
        return next(kind for kind in self.objects.kinds.values() if kind.plural == plural)

    def _create(self, plural: str, namespace: str, body: Obj) -> None:
        self.objects.create(self._kind(plural), namespace, body, manager="system")

    def _merge(self, plural: str, namespace: str, name: str, patch: Obj) -> None:
        self.objects.merge(self._kind(plural), namespace, name, patch, manager="system")

    def _status(self, plural: str, namespace: str, name: str, status: Obj) -> None:
        self.objects.merge(self._kind(plural), namespace, name, {"status": status}, manager="system", status=True)

    def _write(self, obj: Obj, *, status: Obj) -> None:
        meta = obj["metadata"]
        kind = self._kind("resourceclaims")
        fresh = self.objects.get(kind, meta["namespace"], meta["name"])
        self.objects.replace(
            kind, meta["namespace"], meta["name"], {**fresh, "status": status}, manager="system", status=True
        )

    def _delete_if_there(self, plural: str, namespace: str, name: str, options: Obj) -> None:
        try:
            self.objects.delete(self._kind(plural), namespace, name, options)
        except Refused as refused:
            if refused.code != 404:
                raise


@cache
def definitions() -> tuple[Obj, ...]:
    """Return the custom resource definitions that are shipped."""
    documents = [each for path in sorted(CRDS.glob("*.yaml")) for each in yaml.safe_load_all(path.read_text())]
    return tuple(each for each in documents if each and each["kind"] == "CustomResourceDefinition")


def environment(pod: Obj) -> dict[str, str]:
    """Return the environment of a pod's worker, without what the downward API fills in."""
    (container,) = [each for each in pod["spec"]["containers"] if each["name"] == "worker"]
    return {each["name"]: each["value"] for each in container.get("env", []) if "value" in each}


def schema_version(text: str) -> list[int]:
    """Return a semantic version as CEL compares it here."""
    return [int(part) for part in text.split(".")]


def stamp(seconds: float) -> str:
    """Return a time as objects have it."""
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _container(state: Obj) -> Obj:
    """Return the status of the one container that pods have here."""
    is_running = "running" in state
    made = {"image": "worker", "imageID": "worker@sha256:0", "restartCount": 0, "ready": is_running}
    return {"name": "worker", "state": state, **made}


def _is_running(pod: Obj) -> bool:
    return any("running" in each["state"] for each in pod["status"].get("containerStatuses", ()))


def _is_over(pod: Obj) -> bool:
    return pod["status"].get("phase") in ("Succeeded", "Failed")


def _memory(pod: Obj) -> float:
    containers: list[Obj] = pod["spec"]["containers"]
    return sum(schema.quantity(c.get("resources", {}).get("requests", {}).get("memory", 0)) for c in containers)
