"""What an operator says about workers on Kubernetes, and the template that their pods are made of."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

CONTAINER = "worker"
"""The template's container that gets the claim, the environment and the arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubeSettings:
    """The settings of the Kubernetes driver."""

    namespace: str = ""
    """OPENRL_NAMESPACE: where workers, their claims, the data volume and the store's secret are; "" the scheduler's."""

    kubeconfig: str = ""
    """OPENRL_KUBECONFIG: how to reach a cluster from outside; "" the pod's account, else the usual file."""

    trainer_image: str
    """OPENRL_TRAINER_IMAGE: by digest or by a tag that never moves, or workers of one version differ."""

    sampler_image: str
    """OPENRL_SAMPLER_IMAGE: likewise."""

    template: Mapping[str, Any] = field(default_factory=lambda: {"spec": {"containers": [{"name": CONTAINER}]}})
    """OPENRL_WORKER_TEMPLATE: a YAML file of `metadata` and `spec` of a pod; all that the scheduler doesn't decide."""

    device_class: str = "openrl-gpu"
    """OPENRL_DEVICE_CLASS: of the accelerators that claims ask for; "" means CPUs, without claims."""

    device_driver: str = "gpu.nvidia.com"
    """OPENRL_DEVICE_DRIVER: the DRA driver, under whose name a device's attributes and its `memory` are."""

    def __post_init__(self) -> None:
        for name, image in (("TRAINER", self.trainer_image), ("SAMPLER", self.sampler_image)):
            if not image:
                raise ValueError(
                    f"OPENRL_{name}_IMAGE is not set; on Kubernetes name the image that {name.lower()}s run"
                )
        spec = self.template.get("spec")
        containers = spec.get("containers") if isinstance(spec, Mapping) else None
        if not isinstance(containers, list) or not any(each.get("name") == CONTAINER for each in containers):
            raise ValueError(f"OPENRL_WORKER_TEMPLATE: spec.containers has no container called {CONTAINER!r}")
        for decided in ("nodeName", "nodeSelector", "affinity", "resourceClaims"):
            if decided in self.template["spec"]:
                raise ValueError(f"OPENRL_WORKER_TEMPLATE: spec.{decided} is the scheduler's to decide; leave it out")

    @property
    def version(self) -> str:
        """Return what tells pods of one make from those of another: a digest of images and template."""
        parts = [self.trainer_image, self.sampler_image, self.template]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:12]

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> KubeSettings:
        """Read the settings. Raises ValueError naming the variable that makes no sense."""
        path = environ.get("OPENRL_WORKER_TEMPLATE", "")
        given: dict[str, Any] = {"template": _template(Path(path))} if path else {}
        for name in ("device_class", "device_driver"):
            if (variable := f"OPENRL_{name.upper()}") in environ:
                given[name] = environ[variable]
        return cls(
            namespace=environ.get("OPENRL_NAMESPACE", ""),
            kubeconfig=environ.get("OPENRL_KUBECONFIG", ""),
            trainer_image=environ.get("OPENRL_TRAINER_IMAGE", ""),
            sampler_image=environ.get("OPENRL_SAMPLER_IMAGE", ""),
            **given,
        )


def _template(path: Path) -> Mapping[str, Any]:
    try:
        template = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as broken:
        raise ValueError(f"OPENRL_WORKER_TEMPLATE={path} is no YAML file that can be read: {broken}") from broken
    if not isinstance(template, dict) or not template.keys() <= {"metadata", "spec"}:
        raise ValueError(f"OPENRL_WORKER_TEMPLATE={path} must hold `spec`, may hold `metadata`, and nothing else")
    return template
