"""Versions for samplers of a full run: each as what changed since the one before it.

A run that was rebuilt begins with an anchor, and so does what follows a version that was not registered: its chain
would lead to a directory that is gone. Which versions count is for rows to say. Knows no operations.

A run that publishes every so many steps gets its next version encoded right after the step that it will be of, before
anybody asks for it. It is used only for the very weights that it was made of.
"""

from __future__ import annotations

import logging
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
from openrl.workers.weights.publish import Publisher, Staged

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """What was written: the manifest that says what it is of, its bytes on disk, the digest it is known by or ""."""

    manifest: Manifest
    size_bytes: int
    digest: str = ""


@dataclass(slots=True)
class _Chain:
    """The versions of one run."""

    publisher: Publisher
    step: int | None = None
    """Of the last version; None: there is none yet."""
    every: int = 0
    """Steps between the last two versions of different steps; 0: there are no two yet."""
    staged: Staged | None = None
    """The next version, if it was encoded ahead."""
    edition: int = 0
    """Of the weights that it was made of."""

    def take(self, trained: Masters) -> Staged | None:
        """Return what was encoded ahead, if it is of these weights."""
        staged, self.staged = self.staged, None
        return staged if self.edition == trained.edition.number else None

    def is_due(self, step: int) -> bool:
        """Whether the next version is likely to be of this step."""
        return self.step is not None and self.every > 0 and step - self.step == self.every

    def note(self, step: int) -> None:
        """Hear of what was published."""
        if self.step not in (None, step):
            self.every = max(0, step - self.step)  # a load may have set it back
        self.step = step


class Versions:
    """Publishes the versions of full runs on one base model."""

    def __init__(self, data_dir: Path, loaded: LoadedModel, *, base_model: str) -> None:
        self._data_dir, self._loaded, self._base_model = data_dir, loaded, base_model
        self._chains: WeakKeyDictionary[Run, _Chain] = WeakKeyDictionary()

    def foresee(self, run: Run) -> None:
        """Encode the next version of a run that has just taken a step, if one is due after as many as the last time.

        It takes host memory until then, as much as the weights that are published and what changed in them. Where it
        can't be done, `publish` does without.
        """
        chain, trained = self._chains.get(run), run.trained
        if chain is None or not isinstance(trained, Masters):
            return
        chain.staged = None
        if run.torn or not chain.is_due(run.moments.step):
            return
        try:
            chain.edition = trained.edition.number
            chain.staged = chain.publisher.stage(trained.published(), gives=True)
        except Exception:
            log.exception("the next version of run %s can't be encoded ahead", run.run_id)

    def let_go(self, run: Run) -> None:
        """Hear that a run takes on other weights: what was encoded ahead takes no memory beside them."""
        if (chain := self._chains.get(run)) is not None:
            chain.staged = None

    def publish(self, directory: str, run: Run) -> Version:
        """Write the run's weights as the version that `directory` (relative to the data directory) names.

        Raises:
            OSError: the disk refused; nothing was published.
        """
        trained = run.weights()
        assert isinstance(trained, Masters), "an adapter has no chain"
        final = layout.resolve(self._data_dir, directory)
        layout.remove(final)  # one of that name can only be one that was never registered
        chain = self._chains.setdefault(run, _Chain(Publisher(final.parent)))
        final.parent.mkdir(parents=True, exist_ok=True)
        base = {"base_model": self._base_model, "base_digest": self._loaded.digest}
        weights = chain.take(trained) or trained.published()
        link = chain.publisher.publish(final.name, weights, step=run.moments.step, extra=base, gives=True)
        chain.note(run.moments.step)
        manifest = states.manifest_of(run, trained, kind=states.SAMPLER, extra={}, **base)
        return Version(manifest=manifest, size_bytes=_size(link), digest=link.ident.digest)

    def forget(self) -> None:
        """Begin anew with the next version: the last one is about to be deleted."""
        self._chains.clear()


def _size(link: Link) -> int:
    return sum(file.size_bytes for file in (link.delta, link.anchor) if file is not None)
