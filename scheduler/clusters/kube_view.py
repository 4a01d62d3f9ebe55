"""One look at the cluster: what was listed, joined, and said in the scheduler's own words.

The order of the lists is part of the protocol (docs/kubernetes.md). What names something else is listed before what it
names: claims before ledgers, ledgers and pods before workloads. So a seat, a claim or a pod whose counterpart is
missing from the later list has lost it for good, however old the view is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

from openrl.scheduler.clusters import kube_objects as objects
from openrl.scheduler.clusters.kube_api import (
    ALL_CLAIMS,
    CLAIMS,
    LEDGERS,
    NODES,
    PODS,
    SLICES,
    WORKLOADS,
    Forbidden,
    KubeApi,
    Obj,
)
from openrl.scheduler.clusters.kube_objects import MANAGED, PREFIX
from openrl.scheduler.clusters.kube_settings import KubeSettings
from openrl.scheduler.resources import KINDS, Claim, Device, Node, Process, Seat, Seen, Workload

OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"
"""The taint by which an operator says that a node is shut down."""


@dataclass(frozen=True)
class View:
    """Objects by name. Workloads are by their object's name; `workloads` leaves out what we did not write."""

    nodes: dict[str, Obj]
    slices: list[Obj]
    claims: dict[str, Obj]
    ledgers: dict[str, Obj]
    pods: dict[str, Obj]
    workloads: dict[str, Obj]
    values: dict[str, Workload]
    settings: KubeSettings
    others: tuple[Obj, ...] = ()
    """Claims that aren't ours, of any namespace, as far as we may see them."""

    @classmethod
    def take(cls, api: KubeApi, settings: KubeSettings) -> View:
        """List everything, in the order that the protocol asks for. Raises ApiError."""
        nodes = _by_name(api.list(NODES, labels=f"{PREFIX}enabled=true")[0])
        slices = api.list(SLICES)[0] if settings.device_class else []
        others = _others(api) if settings.device_class else ()
        claims = _by_name(api.list(CLAIMS, labels=MANAGED)[0]) if settings.device_class else {}
        ledgers = _by_name(api.list(LEDGERS)[0]) if settings.device_class else {}
        pods = _by_name(api.list(PODS, labels=MANAGED)[0])
        workloads = _by_name(api.list(WORKLOADS)[0])
        values = {}
        for name, obj in workloads.items():
            try:
                values[name] = objects.workload_value(obj)
            except (ValueError, KeyError):
                continue  # somebody else's: neither counted nor touched
        ours = {name: workloads[name] for name in values}
        return cls(nodes, slices, claims, ledgers, pods, ours, values, settings, others)

    @cached_property
    def seen(self) -> Seen:
        """What the scheduler decides on."""
        return Seen(
            nodes=tuple(self._node(name) for name in sorted(self.nodes)),
            devices=self.devices,
            claims=tuple(self.claim_values[name] for name in sorted(self.ledgers)),
            workloads=tuple(sorted(self._all(), key=lambda workload: workload.name)),
            processes=self._processes(),
            has_claims=bool(self.settings.device_class),
            can_claim=bool(self.settings.device_class),
        )

    @cached_property
    def claim_values(self) -> dict[str, Claim]:
        """Every ledger with its claim."""
        return {name: self._claim(name) for name in self.ledgers}

    @cached_property
    def devices_of(self) -> dict[str, list[Device]]:
        """The devices of each claim that has some."""
        result: dict[str, list[Device]] = {}
        for device in self.devices:
            if device.claim:
                result.setdefault(device.claim, []).append(device)
        return result

    @cached_property
    def by_uid(self) -> dict[str, Obj]:
        """The workloads, by uid."""
        return {obj["metadata"]["uid"]: obj for obj in self.workloads.values()}

    @cached_property
    def places_of_pods(self) -> set[str]:
        """The assignment ids that pods have."""
        return {objects.assignment_of(pod) for pod in self.pods.values()}

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """The accelerators of nodes that opt in, as complete pools of the driver's newest slices tell."""
        holders = {
            (result["pool"], result["device"]): f"{claim['metadata']['namespace']}/{claim['metadata']['name']}"
            for claim in self.others
            for result in _results(claim)
        }
        holders |= {
            (result["pool"], result["device"]): name
            for name, claim in sorted(self.claims.items())
            for result in _results(claim)
        }
        return tuple(
            Device(
                name=f"{piece['spec']['pool']['name']}/{device['name']}",
                node=piece["spec"]["nodeName"],
                device_bytes=objects.size(device.get("capacity", {}).get("memory", {}).get("value", 0)),
                claim=holders.get((piece["spec"]["pool"]["name"], device["name"]), ""),
            )
            for piece in self._newest_slices(self.settings.device_driver)
            if piece["spec"].get("nodeName") in self.nodes
            for device in piece["spec"].get("devices", ())
        )

    def node_of(self, claim: Obj) -> str | None:
        """Return where a claim is allocated; None while it is not."""
        allocation = claim.get("status", {}).get("allocation")
        if not allocation:
            return None
        for term in allocation.get("nodeSelector", {}).get("nodeSelectorTerms", ()):
            for each in (*term.get("matchFields", ()), *term.get("matchExpressions", ())):
                if each["key"] in ("metadata.name", "kubernetes.io/hostname") and each["operator"] == "In":
                    return str(each["values"][0])
        # A driver that names its pools after nodes, as most do.
        return next((result["pool"] for result in _results(claim) if result["pool"] in self.nodes), None)

    def is_gone(self, node: str) -> bool:
        """Tell whether nothing can run on a node any more: it was removed, or an operator says that it is off.

        A node without the opt-in label was not listed; the caller makes sure before it takes one for removed.
        """
        obj = self.nodes.get(node)
        if obj is None:
            return True
        return any(taint["key"] == OUT_OF_SERVICE for taint in obj.get("spec", {}).get("taints") or ())

    def pods_of(self, uid: str) -> list[Obj]:
        """Return the pods of a workload, by its uid."""
        return self._pods_of.get(uid, [])

    def owner(self, pod: Obj) -> Obj | None:
        """Return the workload of a pod; None where it is gone."""
        return next((self.by_uid[uid] for uid in _owners(pod) if uid in self.by_uid), None)

    @cached_property
    def _pods_of(self) -> dict[str, list[Obj]]:
        result: dict[str, list[Obj]] = {}
        for pod in self.pods.values():
            for uid in _owners(pod):
                result.setdefault(uid, []).append(pod)
        return result

    def seats(self) -> Iterable[tuple[str, Obj]]:
        """Return every seat with the name of its ledger."""
        return [
            (name, seat) for name, ledger in sorted(self.ledgers.items()) for seat in ledger["spec"].get("seats", ())
        ]

    def _all(self) -> Iterable[Workload]:
        """Return the workloads; one that is being deleted is on its way out, whatever its status says."""
        for name, value in self.values.items():
            is_going = "deletionTimestamp" in self.workloads[name]["metadata"]
            yield replace(value, phase="Stopping") if is_going else value

    def _processes(self) -> dict[str, Process]:
        """Return each workload's newest pod: of the ones that leave and the one that comes, that one."""
        result: dict[str, Process] = {}
        for pod in self.pods.values():
            name = (pod["metadata"].get("annotations") or {}).get(f"{PREFIX}name", "")
            process = objects.process_value(pod)
            old = result.get(name)
            if old is None or (process.generation, not process.leaving) > (old.generation, not old.leaving):
                result[name] = process
        return result

    def _node(self, name: str) -> Node:
        node = self.nodes[name]
        labels, status = node["metadata"].get("labels") or {}, node.get("status", {})
        is_ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ())
        return Node(
            name=name,
            host_bytes=objects.size(status.get("allocatable", {}).get("memory", 0)),
            kinds=frozenset(kind for kind in KINDS if labels.get(f"{PREFIX}{kind}") == "true"),
            ready=is_ready and not self.is_gone(name),
            takes_new=not node.get("spec", {}).get("unschedulable"),
        )

    def _claim(self, name: str) -> Claim:
        ledger, claim = self.ledgers[name], self.claims.get(name)
        notes = ledger["metadata"].get("annotations") or {}
        is_going = claim is None or "deletionTimestamp" in claim["metadata"]
        node = self.node_of(claim) if claim else None
        told = ledger.get("status", {}).get("memoryPerDevice")
        least = int(notes.get(f"{PREFIX}device-bytes", 0))
        device_bytes = objects.size(told) if told and node else least
        if name in self.devices_of:
            device_bytes = min(device.device_bytes for device in self.devices_of[name])
        made = objects.seconds(ledger["metadata"]["creationTimestamp"])
        return Claim(
            name=name,
            node=node,
            device_bytes=device_bytes,
            tiers=tuple(json.loads(notes.get(f"{PREFIX}tiers", "[]"))),
            seats=tuple(self._seat(entry) for entry in ledger["spec"].get("seats", ())),
            deleting=is_going or "deletionTimestamp" in ledger["metadata"],
            revision=ledger["metadata"]["resourceVersion"],
            since=max(made, float(notes.get(f"{PREFIX}vacant-since", 0.0))),
        )

    def _seat(self, entry: Obj) -> Seat:
        value = self.values.get(entry["workload"])
        return objects.seat_value(entry, value.name if value else entry["workload"])

    def _newest_slices(self, driver: str) -> list[Obj]:
        """Return the slices of pools that are whole in their highest generation; others are in change."""
        pools: dict[str, list[Obj]] = {}
        for piece in self.slices:
            if piece["spec"]["driver"] == driver:
                pools.setdefault(piece["spec"]["pool"]["name"], []).append(piece)
        result = []
        for pieces in pools.values():
            newest = max(piece["spec"]["pool"]["generation"] for piece in pieces)
            whole = [piece for piece in pieces if piece["spec"]["pool"]["generation"] == newest]
            if len(whole) == whole[0]["spec"]["pool"]["resourceSliceCount"]:
                result += whole
        return result


def _others(api: KubeApi) -> tuple[Obj, ...]:
    """Return the claims of all namespaces that aren't ours; none where we may not list them."""
    try:
        found = api.list(ALL_CLAIMS)[0]
    except Forbidden:
        return ()
    return tuple(claim for claim in found if claim["metadata"]["namespace"] != api.namespace or not _is_ours(claim))


def _is_ours(obj: Obj) -> bool:
    return (obj["metadata"].get("labels") or {}).get(f"{PREFIX}managed") == "true"


def _by_name(items: list[Obj]) -> dict[str, Obj]:
    return {item["metadata"]["name"]: item for item in items}


def _owners(obj: Obj) -> set[str]:
    return {each["uid"] for each in obj["metadata"].get("ownerReferences", ())}


def _results(claim: Obj) -> list[Obj]:
    results: list[Obj] = claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", [])
    return results
