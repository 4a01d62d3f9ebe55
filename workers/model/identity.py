"""Which weights a directory holds, in one short text: two directories with the same are the same base model.

Reads the config, the header of every safetensors file and a sample of every tensor, not all of them: whoever trains
a model changes every tensor nearly everywhere, and 70 billion parameters are told apart in a second. No guard against
somebody who means to deceive. Without torch.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, BinaryIO

SAMPLE_BYTES = 16 << 10
"""What is read of each tensor, from its middle."""

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

_IDLE_FIELDS = ("_name_or_path", "transformers_version")
"""What a config says without any bearing on what is served."""

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


def digest_of(directory: Path) -> str:
    """Return the digest of the weights in `directory`.

    Raises:
        OSError, ValueError, KeyError, AttributeError, TypeError: a file is missing, or isn't what its name says.
    """
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    said = {name: value for name, value in config.items() if name not in _IDLE_FIELDS}
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode())
    for name in sorted(set(tensor_files(directory).values())):
        digest.update(f"\n{name} {(directory / name).stat().st_size}\n".encode())
        with (directory / name).open("rb") as file:
            for part in _parts(file):
                digest.update(part)
    return digest.hexdigest()


def tensor_files(directory: Path) -> dict[str, str]:
    """Return the file of every tensor, from the index or the header of the only file. Raises as `digest_of`."""
    if (directory / INDEX).is_file():
        return dict(json.loads((directory / INDEX).read_text(encoding="utf-8"))["weight_map"])
    with (directory / SINGLE).open("rb") as file:
        return dict.fromkeys(_header(file), SINGLE)


def _parts(file: BinaryIO) -> list[bytes]:
    tensors = _header(file)
    data = file.tell()
    parts = [json.dumps(tensors, sort_keys=True).encode()]
    for begin, end in sorted(tuple(tensor["data_offsets"]) for tensor in tensors.values()):
        size = min(end - begin, SAMPLE_BYTES)
        file.seek(data + (begin + end - size) // 2)
        parts.append(file.read(size))
    return parts


def _header(file: BinaryIO) -> dict[str, Any]:
    length = int.from_bytes(file.read(8), "little")
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    return {name: tensor for name, tensor in json.loads(file.read(length)).items() if name != "__metadata__"}
