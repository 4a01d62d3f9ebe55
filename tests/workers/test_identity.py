"""Which weights a directory holds: every tensor counts, and nothing that doesn't bear on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from openrl.workers.model.identity import SAMPLE_BYTES, digest_of

SIZE = 4 * SAMPLE_BYTES


def write(directory: Path, tensors: dict[str, bytes], **config: object) -> str:
    """Write a model of one file a tensor, in an index; return its digest."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", **config}))
    for name, data in tensors.items():
        header = json.dumps({name: {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
        (directory / f"{name}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    weight_map = {name: f"{name}.safetensors" for name in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return digest_of(directory)


def test_a_change_of_any_tensor_changes_the_digest(tmp_path: Path) -> None:
    tensors = {"a": bytes(SIZE), "b": bytes(10), "c": b""}
    before = write(tmp_path / "m", tensors)
    assert write(tmp_path / "m", tensors) == before
    assert write(tmp_path / "m", {**tensors, "a": b"\1" * SIZE}) != before
    assert write(tmp_path / "m", {**tensors, "b": bytes(9) + b"\1"}) != before
    assert write(tmp_path / "m", {**tensors, "a": bytes(SIZE + 1)}) != before


def test_of_the_config_all_counts_but_its_origin(tmp_path: Path) -> None:
    before = write(tmp_path / "m", {"a": b"1"}, rope_theta=1e4)
    assert write(tmp_path / "m", {"a": b"1"}, rope_theta=1e4, _name_or_path="x", transformers_version="5") == before
    assert write(tmp_path / "m", {"a": b"1"}, rope_theta=1e6) != before


def test_a_large_file_is_not_read_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path / "m", {"a": b"1"})
    size = 1 << 40
    header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    with (tmp_path / "m" / "a.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(file.tell() + size)
    assert digest_of(tmp_path / "m")


def test_a_header_that_lacks_what_it_must_have_is_no_weights(tmp_path: Path) -> None:
    write(tmp_path / "m", {"a": b"1"})
    (tmp_path / "m" / "a.safetensors").write_bytes((8).to_bytes(8, "little") + b'{"a":{}}')
    with pytest.raises(KeyError):
        digest_of(tmp_path / "m")
