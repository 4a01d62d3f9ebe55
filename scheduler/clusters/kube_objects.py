"""Workloads, seats and claims as Kubernetes objects, and back: pure, so that every field is a test.

The custom resources are those of k8s/crds. A workload's spec never changes; what changes is its status, and each change
is a compare-and-swap. Objects are called like their workload where Kubernetes takes the name, else by a digest of it.
"""

from __future__ import annotations

import copy
import datetime
import hashlib
import json
import re
from typing import Any

from openrl.scheduler.clusters.kube_api import CLAIMS, LEDGERS, PODS, WORKLOADS, Obj
from openrl.scheduler.clusters.kube_conditions import conditions
from openrl.scheduler.clusters.kube_settings import CONTAINER, KubeSettings
from openrl.scheduler.resources import Claim, Need, Process, ProcessPhase, Seat, Workload

PREFIX = "openrl.io/"
MANAGED = f"{PREFIX}managed=true"
POD_GONE = f"{PREFIX}pod"
"""Finalizer of a workload: it stays until its pod is gone and its seat is free."""
CONTAINERS_OVER = f"{PREFIX}containers"
"""Finalizer of a pod: it stays, deleted by whomever, until its containers are proved to have ended."""

QUEUE = "kueue.x-k8s.io/queue-name"
"""The template's label with which Kueue admits a pod. It can't account for a claim that several pods share, so the pods
of exclusive workers alone keep it."""

MAX_NAME = 48
"""Of a workload's object: its pod's name is longer by twelve characters and still a host name."""
UNITS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
}


def object_name(workload_name: str) -> str:
    """Return what a workload's object is called: a DNS subdomain, no longer than MAX_NAME."""
    if len(workload_name) <= MAX_NAME and re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", workload_name):
        return workload_name
    digest = hashlib.sha256(workload_name.encode()).hexdigest()[:10]
    plain = re.sub(r"[^a-z0-9]+", "-", workload_name.lower()).strip("-")
    return f"{plain[: MAX_NAME - 11].rstrip('-')}-{digest}"


def quantity(size_bytes: int) -> str:
    """Return a size as Kubernetes writes it, exactly."""
    for unit in ("Gi", "Mi", "Ki"):
        if size_bytes and size_bytes % UNITS[unit] == 0:
            return f"{size_bytes // UNITS[unit]}{unit}"
    return str(size_bytes)


def size(text: str | int) -> int:
    """Return a quantity of memory in bytes. Raises ValueError for what is none."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z]*)", str(text))
    if match is None or match[2] not in (*UNITS, "m"):
        raise ValueError(f"{text!r} is no quantity of memory")
    return int(float(match[1]) * (UNITS[match[2]] if match[2] != "m" else 0.001))


def seconds(stamp: str) -> float:
    """Return the time of an object's stamp, in seconds since the epoch."""
    return datetime.datetime.fromisoformat(stamp).timestamp()


def workload_object(workload: Workload, settings: KubeSettings) -> Obj:
    """Return the custom resource of a new workload, without its status."""
    need = workload.need
    accelerator: Obj = {"mode": "None"}
    if settings.device_class:
        accelerator = {"mode": "SingleGPU", "count": 1, "memory": quantity(max(1, need.device_bytes))}
    spec: Obj = {
        "role": workload.kind,
        "modelId": workload.base,
        "pool": workload.slug,
        "trainingKind": "fft" if workload.pool.is_full else "lora",
        "accelerator": accelerator,
        "exclusive": need.exclusive,
        "priority": need.priority,
        "workerContainerName": CONTAINER,
        "template": {"metadata": _template_metadata(settings), "spec": _pod_spec(workload, settings)},
    }
    if need.owner:
        spec["ownerId"] = need.owner
    if need.host_bytes:
        spec["hostMemory"] = quantity(need.host_bytes)
    return {
        "apiVersion": WORKLOADS.api_version,
        "kind": WORKLOADS.name,
        "metadata": {
            "name": object_name(workload.name),
            "labels": _labels(workload),
            "annotations": {
                f"{PREFIX}name": workload.name,
                f"{PREFIX}since": repr(workload.since),
                f"{PREFIX}version": workload.version,
                f"{PREFIX}words": need.words,
            },
            "finalizers": [POD_GONE],
        },
        "spec": spec,
    }


def workload_value(obj: Obj) -> Workload:
    """Return the workload that a custom resource is. Raises ValueError for one that we did not write."""
    spec, status = obj["spec"], obj.get("status", {})
    notes = obj["metadata"].get("annotations") or {}
    if f"{PREFIX}name" not in notes:
        raise ValueError(f"workload {obj['metadata']['name']} was not made by the scheduler")
    memory = spec["accelerator"].get("memory", "0")
    need = Need(
        device_bytes=size(memory) if memory != "1" else 0,
        host_bytes=size(spec.get("hostMemory", 0)),
        exclusive=spec.get("exclusive", False),
        priority=spec.get("priority", 0),
        owner=spec.get("ownerId", ""),
        words=notes.get(f"{PREFIX}words", ""),
    )
    return Workload(
        name=notes[f"{PREFIX}name"],
        kind=spec["role"],
        base=spec["modelId"],
        slug=spec["pool"],
        since=float(status.get("since", notes[f"{PREFIX}since"])),
        generation=status.get("incarnation", 0),
        claim=status.get("claimName") or None,
        need=need,
        placed=status.get("placements", 0),
        version=status.get("version", notes.get(f"{PREFIX}version", "")),
        phase=status.get("phase", "Pending"),
        reason=status.get("message", ""),
        avoids=status.get("avoids", ""),
    )


def with_status(obj: Obj, workload: Workload, *, at: float, **more: Any) -> Obj:
    """Return the custom resource with the status that a workload's value and further fields make.

    `at`: now, in seconds since the epoch, for the conditions that turn.
    """
    status = {
        **obj.get("status", {}),
        "phase": workload.phase,
        "claimName": workload.claim or "",
        "incarnation": workload.generation,
        "placements": workload.placed,
        "version": workload.version,
        "since": workload.since,
        "avoids": workload.avoids,
        "message": workload.reason[:4096],
        "observedGeneration": obj["metadata"].get("generation", 0),
        **more,
    }
    status["conditions"] = conditions(
        obj.get("status", {}),
        workload,
        assignment=status.get("assignmentID", ""),
        reason=status.get("reason", ""),
        generation=status["observedGeneration"],
        at=at,
    )
    return {**obj, "status": status}


def seat_object(workload: Workload, uid: str, assignment: str) -> Obj:
    """Return a workload's entry in a ledger."""
    need = workload.need
    return {
        "workload": object_name(workload.name),
        "workloadUID": uid,
        "assignmentID": assignment,
        "ownerID": need.owner,
        "exclusive": need.exclusive,
        "deviceRequest": quantity(need.device_bytes),
        "hostRequest": quantity(need.host_bytes),
    }


def seat_value(entry: Obj, name: str) -> Seat:
    """Return a seat; `name` is the workload's own, not its object's."""
    return Seat(
        workload=name,
        assignment=entry["assignmentID"],
        uid=entry["workloadUID"],
        owner=entry.get("ownerID", ""),
        exclusive=entry.get("exclusive", False),
        device_bytes=size(entry.get("deviceRequest", 0)),
        host_bytes=size(entry.get("hostRequest", 0)),
    )


def ledger_object(claim: Claim) -> Obj:
    """Return the empty ledger of a new claim; it says what the claim asks for."""
    return {
        "apiVersion": LEDGERS.api_version,
        "kind": LEDGERS.name,
        "metadata": {
            "name": claim.name,
            "labels": {f"{PREFIX}managed": "true"},
            "annotations": {
                f"{PREFIX}device-bytes": str(claim.device_bytes),
                f"{PREFIX}tiers": json.dumps(list(claim.tiers)),
            },
        },
        "spec": {"claimName": claim.name, "seats": []},
    }


def claim_object(claim: Claim, ledger: Obj, settings: KubeSettings) -> Obj:
    """Return the ResourceClaim of a ledger: one device, of the sizes that are preferred in their order."""
    tiers = [_tier(size_bytes, claim.device_bytes, settings) for size_bytes in claim.tiers[:8]]
    request: Obj = {"name": "gpu", "firstAvailable": tiers}
    if not tiers:
        request = {"name": "gpu", "exactly": _device(claim.device_bytes, None, settings)}
    return {
        "apiVersion": CLAIMS.api_version,
        "kind": CLAIMS.name,
        "metadata": {
            "name": claim.name,
            "labels": {f"{PREFIX}managed": "true"},
            "ownerReferences": [owner(ledger, controller=True)],
        },
        "spec": {"devices": {"requests": [request]}},
    }


def owner(obj: Obj, *, controller: bool) -> Obj:
    """Return the reference to an owner, with whom a dependent goes."""
    return {
        "apiVersion": obj["apiVersion"],
        "kind": obj["kind"],
        "name": obj["metadata"]["name"],
        "uid": obj["metadata"]["uid"],
        "controller": controller,
        "blockOwnerDeletion": False,
    }


def pod_name(obj: Obj) -> str:
    """Return what the pod of a workload in its present seat is called."""
    status = obj["status"]
    return f"{obj['metadata']['name']}-{status['assignmentID'][:8]}-{status.get('incarnation', 0)}"


def pod_object(obj: Obj, settings: KubeSettings, *, preferred: tuple[tuple[str, ...], ...] = ()) -> Obj:
    """Return the pod of a workload in its present seat. `preferred`: groups of nodes, the first one liked best."""
    workload, status = workload_value(obj), obj["status"]
    metadata = _template_metadata(settings)
    spec = _pod_spec(workload, settings)
    (container,) = [each for each in spec["containers"] if each["name"] == CONTAINER]
    labels = {**metadata.get("labels", {}), **_labels(workload), f"{PREFIX}assignment": status["assignmentID"]}
    if not workload.need.exclusive:
        labels.pop(QUEUE, None)
    environment = {
        "OPENRL_ASSIGNMENT_ID": status["assignmentID"],
        "OPENRL_POOL": workload.slug,
    }
    if workload.claim:
        labels[f"{PREFIX}claim"] = workload.claim
        if not workload.need.exclusive:
            # Who has its accelerator to itself takes no turns, and pays for none.
            environment["OPENRL_ACCELERATOR"] = workload.claim
        spec["resourceClaims"] = [{"name": "gpu", "resourceClaimName": workload.claim}]
        container.setdefault("resources", {})["claims"] = [{"name": "gpu"}]
    spec["nodeSelector"] = {f"{PREFIX}enabled": "true", f"{PREFIX}{workload.kind}": "true"}
    if preferred:
        spec["affinity"] = {"nodeAffinity": _preferences(preferred)}
    decided = {"OPENRL_ACCELERATOR", *environment, *DOWNWARD}
    container["env"] = [
        *(each for each in container.get("env", []) if each["name"] not in decided),
        *({"name": name, "value": value} for name, value in environment.items()),
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in DOWNWARD.items()),
    ]
    return {
        "apiVersion": PODS.api_version,
        "kind": PODS.name,
        "metadata": {
            "name": pod_name(obj),
            "labels": labels,
            "annotations": {
                **metadata.get("annotations", {}),
                f"{PREFIX}name": workload.name,
                f"{PREFIX}incarnation": str(workload.generation),
                f"{PREFIX}version": workload.version,
            },
            "finalizers": [CONTAINERS_OVER],
            "ownerReferences": [owner(obj, controller=True)],
        },
        "spec": spec,
    }


DOWNWARD = {
    "OPENRL_POD_UID": "metadata.uid",
    "OPENRL_POD_NAME": "metadata.name",
    "OPENRL_NODE_NAME": "spec.nodeName",
}


def process_value(pod: Obj) -> Process:
    """Return what runs, as a pod says it."""
    notes = pod["metadata"].get("annotations") or {}
    phase = pod.get("status", {}).get("phase", "Pending")
    words: dict[str, ProcessPhase] = {"Pending": "pending", "Running": "running", "Unknown": "running"}
    return Process(
        generation=int(notes.get(f"{PREFIX}incarnation", 0)),
        phase=words.get(phase, "ended"),
        leaving="deletionTimestamp" in pod["metadata"],
        unschedulable=why_unschedulable(pod) != "",
        version=notes.get(f"{PREFIX}version", ""),
        unschedulable_since=_unschedulable_since(pod),
        started=_started(pod),
    )


def why_unschedulable(pod: Obj) -> str:
    """Return why no node takes a pod; "" where one does, or nobody has looked."""
    condition = _unschedulable(pod)
    return "" if condition is None else str(condition.get("message") or "no node has room for it")


def _unschedulable(pod: Obj) -> Obj | None:
    conditions: list[Obj] = pod.get("status", {}).get("conditions") or []
    found = (each for each in conditions if each["type"] == "PodScheduled" and each.get("reason") == "Unschedulable")
    return next(found, None)


def _unschedulable_since(pod: Obj) -> float:
    """Return since when no node takes a pod, 0 where one does or nobody says."""
    stamp = (_unschedulable(pod) or {}).get("lastTransitionTime")
    return seconds(stamp) if stamp else 0.0


def _started(pod: Obj) -> float:
    """Return when a pod's worker started to run, 0 where it doesn't."""
    for each in pod.get("status", {}).get("containerStatuses") or ():
        if each["name"] == CONTAINER and (stamp := each.get("state", {}).get("running", {}).get("startedAt")):
            return seconds(stamp)
    return 0.0


def assignment_of(pod: Obj) -> str:
    """Return the seat that a pod is for."""
    return str((pod["metadata"].get("labels") or {}).get(f"{PREFIX}assignment", ""))


def has_ended(pod: Obj) -> bool:
    """Tell whether the API proves that no container of a pod runs or will run."""
    if not pod["spec"].get("nodeName"):
        return "deletionTimestamp" in pod["metadata"]
    status = pod.get("status", {})
    if status.get("phase") not in ("Succeeded", "Failed"):
        return False
    kinds = ("initContainerStatuses", "containerStatuses", "ephemeralContainerStatuses")
    states = [each.get("state", {}) for kind in kinds for each in status.get(kind) or ()]
    return not any("running" in state for state in states)


def why_ended(pod: Obj, *, is_lost: bool = False) -> str:
    """Return how a pod came to its end: what the cluster says of it, and of its container. `is_lost`: its node is."""
    status = pod.get("status", {})
    where = f"{pod['metadata']['name']} on {pod['spec'].get('nodeName') or 'no node'}"
    parts = ["its node is gone"] if is_lost else []
    parts += [status.get("reason", ""), status.get("message", "")]
    for each in status.get("containerStatuses") or ():
        if each["name"] == CONTAINER and (end := each.get("state", {}).get("terminated")):
            parts += [f"exit code {end['exitCode']}", end.get("reason", ""), end.get("message", "")]
    said = ", ".join(part.strip() for part in parts if part.strip())
    return f"{where} ended: {said or 'nothing is said about why'}"


def _labels(workload: Workload) -> dict[str, str]:
    return {
        f"{PREFIX}managed": "true",
        f"{PREFIX}workload": object_name(workload.name),
        f"{PREFIX}kind": workload.kind,
    }


def _template_metadata(settings: KubeSettings) -> Obj:
    metadata = settings.template.get("metadata") or {}
    return {name: dict(metadata[name]) for name in ("labels", "annotations") if metadata.get(name)}


def _pod_spec(workload: Workload, settings: KubeSettings) -> Obj:
    """Return the template's pod with the worker's image, command and memory."""
    spec: Obj = copy.deepcopy(dict(settings.template["spec"]))
    (container,) = [each for each in spec["containers"] if each["name"] == CONTAINER]
    container["image"] = settings.trainer_image if workload.kind == "trainer" else settings.sampler_image
    container["command"] = ["python", "-m", f"openrl.workers.{workload.kind}"]
    container["args"] = ["--base", workload.base, "--name", workload.name]
    if workload.pool.is_full:
        container["args"] += ["--pool", workload.slug]
    if workload.need.host_bytes:
        resources = container.setdefault("resources", {})
        resources.setdefault("requests", {}).setdefault("memory", "0")
        for bound in resources.values():
            _raise(bound, workload.need.host_bytes)
    spec["automountServiceAccountToken"] = False
    # A worker that has ended comes back as a new pod, by whoever knows whether its seat is still its own.
    spec["restartPolicy"] = "Never"
    return spec


def _raise(bound: Obj, host_bytes: int) -> None:
    """Raise a request or limit of memory that is there to what the worker needs."""
    if "memory" in bound:
        bound["memory"] = quantity(max(host_bytes, size(bound["memory"])))


def _tier(most_bytes: int, least_bytes: int, settings: KubeSettings) -> Obj:
    # Upper bounds are named by the size in MiB: unique among tiers, and a DNS label.
    return {"name": f"t{most_bytes >> 20}", **_device(least_bytes, most_bytes, settings)}


def _device(least_bytes: int, most_bytes: int | None, settings: KubeSettings) -> Obj:
    memory = f'device.capacity["{settings.device_driver}"].memory'
    bounds = [f'{memory}.compareTo(quantity("{quantity(least_bytes)}")) >= 0'] if least_bytes else []
    if most_bytes is not None:
        bounds.append(f'{memory}.compareTo(quantity("{quantity(most_bytes)}")) <= 0')
    device: Obj = {"deviceClassName": settings.device_class, "allocationMode": "ExactCount", "count": 1}
    if bounds:
        device["selectors"] = [{"cel": {"expression": " && ".join(bounds)}}]
    return device


def _preferences(preferred: tuple[tuple[str, ...], ...]) -> Obj:
    """firstAvailable is judged node by node; only a preference among nodes makes the preferred size win."""
    terms = [
        {
            "weight": max(1, 100 - 10 * rank),
            "preference": {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [name]}]},
        }
        for rank, names in enumerate(preferred)
        for name in names[:16]
    ]
    return {"preferredDuringSchedulingIgnoredDuringExecution": terms}
