"""Versions for samplers of a full run: each as what changed since the one before it.

A run that was rebuilt begins with an anchor, and so does what follows a version that was not registered: its chain
would lead to a directory that is gone. Which versions count is for rows to say. Knows no operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

from openrl.workers.model.loading import LoadedModel
from openrl.workers.trainer import states
from openrl.workers.trainer.full import Masters
from openrl.workers.trainer.runs import Run
from openrl.workers.weights import layout
from openrl.workers.weights.links import Link
from openrl.workers.weights.manifest import Manifest
from openrl.workers.weights.publish import Publisher


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """What was written: the manifest that says what it is of, its bytes on disk, the digest it is known by or ""."""

    manifest: Manifest
    size_bytes: int
    digest: str = ""


class Versions:
    """Publishes the versions of full runs on one base model."""

    def __init__(self, data_dir: Path, loaded: LoadedModel, *, base_model: str) -> None:
        self._data_dir, self._loaded, self._base_model = data_dir, loaded, base_model
        self._publishers: WeakKeyDictionary[Run, Publisher] = WeakKeyDictionary()

    def publish(self, directory: str, run: Run) -> Version:
        """Write the run's weights as the version that `directory` (relative to the data directory) names.

        Raises:
            OSError: the disk refused; nothing was published.
        """
        trained = run.weights()
        assert isinstance(trained, Masters), "an adapter has no chain"
        final = layout.resolve(self._data_dir, directory)
        layout.remove(final)  # one of that name can only be one that was never registered
        publisher = self._publishers.get(run) or Publisher(final.parent)
        self._publishers[run] = publisher
        final.parent.mkdir(parents=True, exist_ok=True)
        base = {"base_model": self._base_model, "base_digest": self._loaded.digest}
        link = publisher.publish(final.name, trained.published(), step=run.moments.step, extra=base, gives=True)
        manifest = states.manifest_of(run, trained, kind=states.SAMPLER, extra={}, **base)
        return Version(manifest=manifest, size_bytes=_size(link), digest=link.ident.digest)

    def forget(self) -> None:
        """Begin anew with the next version: the last one is about to be deleted."""
        self._publishers.clear()


def _size(link: Link) -> int:
    return sum(file.size_bytes for file in (link.delta, link.anchor) if file is not None)
