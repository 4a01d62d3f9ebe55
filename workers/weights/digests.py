"""Digests: 128 bits tell whether weights are those that are meant, SHA-256 whether a manifest is.

Weights are digested with XXH3 (Collet, github.com/Cyan4973/xxHash), which keeps up with memory: SHA-256 over a model
would take longer than all the rest of a hand-off. It guards against accidents, not against somebody who may write into
the directory and would also write the manifest. Manifests are tied to each other by SHA-256. Without torch.

A tensor's digest is over all of its bits, also where a delta changed few of them. One that is updated for changes alone
(sums of hashes of place and value) would catch a torn file, a wrong place and a wrong base where it changes something;
it would vouch for weights that were altered, or swapped, where no delta touches them.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence

import xxhash

from openrl.workers.weights.specs import Segment, Spec, Words

Hasher = xxhash.xxh3_128
"""Takes bytes piece by piece; `digest()` has 16."""

_WEIGHTS = re.compile(r"[0-9a-f]{32}")
_MANIFEST = re.compile(r"[0-9a-f]{64}")


def block_digest(words: Words) -> bytes:
    """Digest the bits of one block."""
    return Hasher(words.data).digest()


def tensor_digest(spec: Spec, digests: Iterable[bytes]) -> str:
    """Digest a tensor, given those of its blocks in order: its type and shape count as much as its bits."""
    head = f"{spec.dtype} {'x'.join(map(str, spec.shape))}\n".encode()
    return Hasher(head + b"".join(digests)).hexdigest()


def tensor_digests(
    specs: Mapping[str, Spec], joined: Sequence[Segment], digests: Iterable[Sequence[bytes]]
) -> dict[str, str]:
    """Digest all tensors, given the digests of their blocks as they lie in the segments."""
    blocks: dict[str, list[bytes]] = {name: [] for name in specs}
    for segment, of_segment in zip(joined, digests, strict=True):
        for part, digest in zip(segment.parts, of_segment, strict=True):
            blocks[part.name].append(digest)
    return {name: tensor_digest(spec, blocks[name]) for name, spec in specs.items()}


def manifest_digest(text: bytes) -> str:
    """Digest the bytes of a manifest."""
    return hashlib.sha256(text).hexdigest()


def is_weights_digest(value: object) -> bool:
    """Whether it has the form of a digest of weights or of a file."""
    return isinstance(value, str) and _WEIGHTS.fullmatch(value) is not None


def is_manifest_digest(value: object) -> bool:
    """Whether it has the form of a manifest's digest."""
    return isinstance(value, str) and _MANIFEST.fullmatch(value) is not None
