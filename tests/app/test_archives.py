"""Archives for older SDKs: a redirect to one tar.gz, whose length is told beforehand and which is never held."""

from __future__ import annotations

import io
import tarfile
import tracemalloc
from email.utils import parsedate_to_datetime
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from openrl.app.archives import Archive
from tests.app.conftest import Api, Worker
from tests.app.test_publishing import FILES, change, saved


@pytest.mark.parametrize("sizes", [(0, 1), (511, 512, 513), (65535, 65536), (65535 - 1024 - 1536,), (200_000, 7)])
def test_an_archive_is_as_long_as_it_says_and_holds_the_files(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    files = {f"f{n}": tmp_path / f"f{n}" for n in range(len(sizes))}
    for (name, path), size in zip(files.items(), sizes, strict=True):
        path.write_bytes((name.encode() * size)[:size])
    archive = Archive(files, modified=1_700_000_000.5)
    packed = b"".join(archive.pieces())
    archive.close()
    assert len(packed) == archive.num_bytes
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as tar:
        assert tar.getnames() == [*files, "checkpoint_complete"]
        for name, path in files.items():
            assert tar.extractfile(name).read() == path.read_bytes()


def test_an_archive_is_not_held_in_memory(tmp_path: Path) -> None:
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(32 << 20)
    archive = Archive({"large": large}, modified=0.0)
    tracemalloc.start()
    sent = sum(len(piece) for piece in archive.pieces())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    archive.close()
    assert sent == archive.num_bytes and peak < 1 << 20


def test_a_file_that_is_deleted_while_its_archive_is_read_is_sent_whole(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100_000)
    archive = Archive({"a": tmp_path / "a"}, modified=0.0)
    pieces = archive.pieces()
    first = next(pieces)
    (tmp_path / "a").unlink()
    packed = first + b"".join(pieces)
    archive.close()
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as tar:
        assert tar.extractfile("a").read() == b"x" * 100_000
    with pytest.raises(FileNotFoundError):
        Archive({"a": tmp_path / "a"}, modified=0.0)


@pytest.mark.parametrize("accept", ["application/gzip", "application/json"])
def test_the_redirect_suits_every_sdk_that_asks_for_one(api: Api, worker: Worker, accept: str) -> None:
    run = api.run()
    saved(api, worker, "local", 1, "weights", run)
    where = f"/training_runs/{run}/checkpoints/weights/ck"
    answer = api.get(f"{where}/archive", headers={"Accept": accept})
    assert answer.status_code == 302 and answer.get_json()["url"] == answer.headers["Location"]
    assert parsedate_to_datetime(answer.headers["Expires"]).tzinfo is not None
    parts = urlsplit(answer.headers["Location"])
    packed = api.client.get(f"{parts.path}?{parts.query}", buffered=True)
    assert packed.status_code == 200 and packed.content_length == len(packed.data)
    with tarfile.open(fileobj=io.BytesIO(packed.data)) as tar:
        assert {name: tar.extractfile(name).read() for name in FILES} == FILES
    head = api.client.head(f"{parts.path}?{parts.query}", buffered=True)
    assert (head.status_code, head.data, head.content_length) == (200, b"", len(packed.data))
    assert api.client.get(f"{parts.path}?{parts.query}x").status_code == 403
    change(api, "DELETE", where)
    assert api.client.get(f"{parts.path}?{parts.query}", buffered=True).status_code == 404
    assert api.get(f"{where}/archive").status_code == 404
