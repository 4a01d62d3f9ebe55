"""Settings in the environment that nothing reads: most often a name with a letter missing.

Knows no setting by itself; it sees which ones the parts of a service ask for.
"""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

OURS, OF_TESTS = "OPENRL_", "OPENRL_TEST_"
OF_OPTIONS = frozenset(
    f"OPENRL_{name}" for name in ("MODELS", "RESTART_MAX_S", "SAMPLER", "SAMPLER_PYTHON", "VERBOSE", "PARENT_PID")
)
"""What options of `openrl up` are read from, and no part of the service; the last is what a process tells another."""
OF_PODS = tuple(
    f"OPENRL_{name}"
    for name in (
        "NAMESPACE", "KUBECONFIG", "TRAINER_IMAGE", "SAMPLER_IMAGE", "WORKER_TEMPLATE", "DEVICE_CLASS", "DEVICE_DRIVER",
        "ASSIGNMENT_ID", "ALIVE_FILE", "POOL", "POD_UID", "POD_NAME", "NODE_NAME",
    )
)  # fmt: skip
"""What the scheduler on Kubernetes and its pods are told."""


def unread(environ: Collection[str], asked: Collection[str]) -> list[str]:
    """Say of each name of ours in `environ` that neither a part asks for nor an option, and what may be meant."""
    read = OF_OPTIONS.union(asked)
    ours = sorted(name for name in environ if name.startswith(OURS) and not name.startswith(OF_TESTS))
    return [_said(name, read) for name in ours if name not in read]


def _said(name: str, read: Collection[str]) -> str:
    if name in OF_PODS:
        return f"{name} is set, and has no effect on one machine: it is for Kubernetes"
    near = get_close_matches(name, read, 1, 0.85)
    meant = f"; did you mean {near[0]}?" if near else ""
    return f"{name} is set, and no part of this service reads it{meant}"
