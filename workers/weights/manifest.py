"""What a directory of weights says about itself: `manifest.json`.

Names the base, the shape of the adapter and the step, and holds the SHA-256 digest and size of every other
file, so that a torn or altered directory is refused before a tensor is read. Without torch.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from openrl.tasks.errors import InvalidRequest, OtherVersion
from openrl.tasks.schema import MANIFEST

FILENAME = "manifest.json"
OPTIMIZER_FILE = "optimizer.safetensors"
GRADIENTS_FILE = "gradients.safetensors"
STATE_FILES = (FILENAME, OPTIMIZER_FILE, GRADIENTS_FILE)
"""What a directory holds beside what stock readers load."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One directory of weights; `files` is filled in by `write`."""

    kind: str
    """training, sampler, external or snapshot."""
    base_model: str
    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Exact module paths with an adapter, in the order of its parameters."""
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    step: int
    """Optimizer steps taken."""
    base_digest: str = ""
    """Which weights the base model had; empty in directories of earlier versions."""
    seed: int | None = None
    """What A was drawn from; None when nobody recorded it."""
    has_optimizer: bool = False
    fine_tuning: str = "lora"
    """`lora`: an adapter; `full`: all weights, as a model's directory. `rank` is 0 then, and there are no targets."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """What its writer alone reads back (JSON values)."""
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """File name -> {"sha256", "size_bytes"}."""

    @property
    def size_bytes(self) -> int:
        """All files together, the manifest itself not counted."""
        return sum(int(entry["size_bytes"]) for entry in self.files.values())


def write(directory: Path, manifest: Manifest) -> Manifest:
    """Digest every file that lies in `directory` and write the manifest beside them; returns it complete."""
    files = {path.name: _entry(path) for path in sorted(directory.iterdir()) if path.name != FILENAME}
    complete = replace(manifest, files=files)
    text = json.dumps(_values(complete), indent=2, sort_keys=True)
    (directory / FILENAME).write_text(text + "\n", encoding="utf-8")
    return complete


def read(directory: Path) -> Manifest:
    """The manifest of `directory`, its files not yet looked at.

    Raises:
        InvalidRequest: there is none, it can't be read, or its schema is not ours.
    """
    try:
        values = json.loads((directory / FILENAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"weights {directory.name!r} have no readable {FILENAME}") from error
    known = {item.name for item in fields(Manifest)}
    try:
        values = MANIFEST.current(values)
        manifest = Manifest(**{key: value for key, value in values.items() if key in known})
        return replace(manifest, targets=tuple(manifest.targets), files=dict(manifest.files))
    except OtherVersion as other:
        raise InvalidRequest(f"weights {directory.name!r} can't be read: {other}") from other
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{FILENAME} of weights {directory.name!r} has a wrong field: {error}") from error


def verify(directory: Path) -> Manifest:
    """Read the manifest and compare size and digest of every file that it names.

    Raises:
        InvalidRequest: also when a file is missing or differs.
    """
    manifest = read(directory)
    for name in manifest.files:
        _require(_entry(_file(directory, name)), manifest, directory, name)
    return manifest


def contents(directory: Path) -> tuple[Manifest, dict[str, bytes]]:
    """Do so, and return what the files hold by name, each read once: what is used is what was compared.

    Raises:
        InvalidRequest: as `verify`.
    """
    manifest = read(directory)
    found: dict[str, bytes] = {}
    for name in manifest.files:
        content = found[name] = _file(directory, name).read_bytes()
        entry = {"sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}
        _require(entry, manifest, directory, name)
    return manifest, found


def _file(directory: Path, name: str) -> Path:
    path = directory / name
    if Path(name).name != name or not path.is_file():
        raise InvalidRequest(f"weights {directory.name!r} lack the file {name!r}")
    return path


def _require(found: Mapping[str, Any], manifest: Manifest, directory: Path, name: str) -> None:
    if found != manifest.files[name]:
        raise InvalidRequest(f"file {name!r} of weights {directory.name!r} differs from its manifest")


def _values(manifest: Manifest) -> dict[str, Any]:
    return MANIFEST.numbered({**asdict(manifest), "targets": list(manifest.targets)})


def _entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"sha256": digest, "size_bytes": path.stat().st_size}
