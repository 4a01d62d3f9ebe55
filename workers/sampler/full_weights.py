"""The weights of a loaded model, which become one published version of a full run after another, in place.

Versions are in the checkpoint's coordinates, and so is what is patched: where the model computes on the CPU in the
type that is published, its own memory; else a copy in host memory, from which the touched tensors are loaded again.
Knows files and torch, not who asks for which version.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from openrl.tasks.errors import InvalidRequest
from openrl.workers.model import coordinates
from openrl.workers.model.loading import LoadedModel
from openrl.workers.weights import layout, links
from openrl.workers.weights.lanes import THREADS
from openrl.workers.weights.links import Link
from openrl.workers.weights.reader import Reader, Switch
from openrl.workers.weights.resident import Resident


class Version(NamedTuple):
    """A version of a full run: its directory, and the digest that the registry knows it by, "" where it knows none."""

    directory: str
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A version that was fetched and verified, for the weights that `resident` held then."""

    resident: Resident
    switch: Switch

    @property
    def digest(self) -> str:
        """What the version is known by."""
        return self.switch.target.ident.digest

    def close(self) -> None:
        """Give the files back."""
        self.switch.__exit__()


class FullWeights:
    """Brings a model's weights to versions. `prepare` may run beside the model; `apply` only while it doesn't."""

    def __init__(
        self, loaded: LoadedModel, data_dir: Path, *, in_place: bool | None = None, threads: int = THREADS
    ) -> None:
        """Patch `loaded`; with `in_place` its own memory, by default where it lies on the CPU.

        Memory that others may move or take away, as where accelerators are shared, is not for that.
        """
        self._loaded, self._data_dir, self._threads = loaded, data_dir, threads
        self._in_place = loaded.device.type == "cpu" if in_place is None else in_place
        self._views = coordinates.views(loaded.model)
        self._resident: Resident | None = None

    def prepare(self, version: Version) -> Prepared:
        """Fetch and verify a version; the weights stay as they are, and in use.

        Raises:
            NotFound: there is no such version.
            InvalidRequest: it is torn or altered, for another model or base, or no unbroken chain leads to it.
        """
        path = layout.existing(self._data_dir, version.directory)
        link = links.read(path.parent, path.name, digest=version.digest or None)
        self._check(link)
        if self._resident is None or self._resident.specs != link.specs:
            self._resident = self._room(link)
        switch = Reader(path.parent, self._resident, threads=self._threads).prepare(path.name, digest=link.ident.digest)
        return Prepared(self._resident, switch)

    def apply(self, prepared: Prepared) -> int:
        """Make the model this version; return how many tensors were touched.

        Raises:
            InvalidRequest: it was prepared for other weights than those in memory; where those were changed behind our
                back they are no version any more, and nothing is to be served from them.
        """
        with prepared.switch as switch:
            touched = switch.apply(threads=self._threads)
        try:
            self._install(prepared.resident, touched)
        except BaseException:
            prepared.resident.disown()
            raise
        return len(touched)

    @torch.no_grad()
    def _install(self, resident: Resident, touched: tuple[str, ...]) -> None:
        for name in touched:
            view, tensor = self._views[name], resident.tensors[name]
            if tensor.data_ptr() == view.data_ptr():
                torch.autograd.graph.increment_version(view)
            else:
                view.copy_(tensor)

    def _room(self, link: Link) -> Resident:
        """Return what such versions are kept in; they begin with an anchor."""
        resident = Resident(self._views) if self._in_place else None
        if resident is not None and resident.specs == link.specs:
            return resident
        return Resident.blank(link.specs)

    def _check(self, link: Link) -> None:
        """Refuse a version of another model."""
        base = link.extra.get("base_digest")
        if base and self._loaded.digest and base != self._loaded.digest:
            raise InvalidRequest("these weights were trained on another base than the one served under its name")
        found = {name: spec.shape for name, spec in link.specs.items()}
        expected = {name: tuple(view.shape) for name, view in self._views.items()}
        for name in sorted(found.keys() | expected.keys()):
            if found.get(name) != expected.get(name):
                raise InvalidRequest(
                    f"version {link.name!r} has tensor {name} of shape {found.get(name, 'none')}; "
                    f"this model needs {expected.get(name, 'none')}"
                )
