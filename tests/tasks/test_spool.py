from __future__ import annotations

import pytest

from openrl.tasks.spool import Spool


@pytest.fixture
def spool(tmp_path):
    return Spool(tmp_path, inline_bytes=8)


def files(tmp_path):
    return [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("data", [b"", b"@x", b"=", b"12345678", b"123456789", bytes(range(256)) * 99])
def test_what_was_stowed_comes_back(spool, data):
    assert spool.load(spool.stow("t", data)) == data


def test_small_data_needs_no_file_and_large_data_exactly_one(spool, tmp_path):
    spool.stow("t", b"12345678")
    assert files(tmp_path) == []
    stowed = spool.stow("t", b"123456789")
    assert [f"@{path.relative_to(tmp_path)}".encode() for path in files(tmp_path)] == [stowed]
    spool.discard(stowed)
    spool.discard(stowed)
    assert files(tmp_path) == []


def test_equal_data_has_files_of_its_own(spool):
    first, second = spool.stow("t", b"x" * 9), spool.stow("t", b"x" * 9)
    spool.discard(first)
    assert spool.load(second) == b"x" * 9


def test_a_reference_cannot_leave_the_spool(spool):
    for reference in ("@/etc/passwd", "@spool/../../x", "@other/x"):
        with pytest.raises(AssertionError):
            spool.read(reference)


def test_a_lost_file_is_an_os_error(spool):
    stowed = spool.stow("t", b"x" * 9)
    spool.discard(stowed)
    with pytest.raises(FileNotFoundError):
        spool.load(stowed)
