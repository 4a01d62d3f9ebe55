"""k8s/manifests.py, which is a script and no package's."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "openrl"

_spec = importlib.util.spec_from_file_location("openrl_manifests", ROOT / "k8s" / "manifests.py")
assert _spec is not None and _spec.loader is not None
manifests = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(manifests)
