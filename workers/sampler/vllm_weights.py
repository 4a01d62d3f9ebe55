"""The weights of a model in vLLM, which become one published version of a full run after another.

The host's copy lies in memory that vLLM's processes share; a version is patched into it, and what was touched is
copied to the device through vLLM's weight-update calls. Nothing runs meanwhile, and what was read of prompts under the
old weights is forgotten: only then. Made for a GPU, and not run on one yet: `benchmarks/gpu_sampler.py` checks it.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path

from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

from openrl.tasks.errors import InvalidRequest
from openrl.workers.model.identity import tensor_files
from openrl.workers.sampler.full_weights import Prepared, Version
from openrl.workers.sampler.vllm_client import Client
from openrl.workers.sampler.vllm_transfer import Place, mapped, views
from openrl.workers.weights import layout, links
from openrl.workers.weights.lanes import THREADS
from openrl.workers.weights.links import Link
from openrl.workers.weights.reader import Reader
from openrl.workers.weights.resident import Resident
from openrl.workers.weights.specs import Spec

SHARED = Path("/dev/shm")  # noqa: S108  memory, not a place for files that others could have put there
ALIGNED = 64
_KINDS = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class VllmWeights:
    """Brings vLLM's weights to versions. `prepare` may run beside the model; `apply` only while it doesn't."""

    def __init__(
        self, client: Client, model_path: Path, data_dir: Path, *, digest: str = "", threads: int = THREADS
    ) -> None:
        """Patch what `client` serves; a version must be of the model in `model_path`, which has this digest."""
        self._client, self._data_dir, self._digest, self._threads = client, data_dir, digest, threads
        self._shapes = _shapes(model_path)
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
            self._resident = self._share(link.specs)
        switch = Reader(path.parent, self._resident, threads=self._threads).prepare(path.name, digest=link.ident.digest)
        return Prepared(self._resident, switch)

    def apply(self, prepared: Prepared) -> int:
        """Make vLLM's weights this version; return how many tensors were touched.

        Raises:
            InvalidRequest: as `openrl.workers.sampler.full_weights`; or it was fetched into memory that vLLM doesn't
                have any more, as another was fetched after it whose tensors are of another kind.
        """
        with prepared.switch as switch:
            if prepared.resident is not self._resident:
                raise InvalidRequest("this version was fetched for memory that was given up; it is to be fetched again")
            touched = switch.apply(threads=self._threads)
        try:
            self.install(touched, prepared.digest)
        except BaseException:
            # The device may hold a mixture: the next version begins with an anchor, which touches everything.
            prepared.resident.disown()
            raise
        return len(touched)

    def install(self, touched: tuple[str, ...], version: str) -> None:
        """Let vLLM copy these tensors out of the shared memory; its prompts are read anew from then on."""
        vllm, do = self._client.vllm, self._client.do
        do(vllm.pause_generation(mode="wait", clear_cache=bool(touched))).result()
        try:
            do(vllm.start_weight_update()).result()
            do(vllm.update_weights(WeightTransferUpdateRequest(update_info={"names": list(touched)}))).result()
            do(vllm.finish_weight_update(version)).result()
        finally:
            do(vllm.resume_generation()).result()

    def _share(self, specs: Mapping[str, Spec]) -> Resident:
        """Make room for such versions in memory that vLLM's processes share."""
        places, size = _places(specs)
        path = SHARED / f"openrl-{os.getpid()}-{secrets.token_hex(8)}"
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(handle, 0, size)
            memory = mapped(str(path), size)
            shared = {"path": str(path), "size_bytes": size, "places": [list(place) for place in places]}
            request = WeightTransferInitRequest(init_info=shared)
            self._client.do(self._client.vllm.init_weight_transfer_engine(request)).result()
        finally:
            os.close(handle)
            # It lives on, without a name, as long as a process maps it.
            path.unlink()
        return Resident(views(memory, places))

    def _check(self, link: Link) -> None:
        """Refuse a version of another model."""
        base = link.extra.get("base_digest")
        if base and self._digest and base != self._digest:
            raise InvalidRequest("these weights were trained on another base than the one served under its name")
        found = {name: spec.shape for name, spec in link.specs.items()}
        for name in sorted(found.keys() | self._shapes.keys()):
            if found.get(name) != self._shapes.get(name):
                raise InvalidRequest(
                    f"version {link.name!r} has tensor {name} of shape {found.get(name, 'none')}; "
                    f"this model needs {self._shapes.get(name, 'none')}"
                )
        odd = sorted(name for name, spec in link.specs.items() if spec.dtype not in _KINDS)
        if odd:
            raise InvalidRequest(f"version {link.name!r} has tensor {odd[0]} of a type that vLLM isn't given")


def _places(specs: Mapping[str, Spec]) -> tuple[list[Place], int]:
    """Lay tensors one after another; return where, and how many bytes they take."""
    places: list[Place] = []
    end = 0
    for name, spec in specs.items():
        places.append((name, _KINDS[spec.dtype], list(spec.shape), end))
        end += -(-spec.size_bytes // ALIGNED) * ALIGNED
    return places, max(end, ALIGNED)


def _shapes(model_path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's tensors, from the headers of its files; a tied head is left out."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(set(tensor_files(model_path).values())):
        with (model_path / file).open("rb") as opened:
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        shapes |= {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    if json.loads((model_path / "config.json").read_text(encoding="utf-8")).get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)
    return shapes
