"""The codec of one block: any bits, any density, both ways; and what it refuses."""

import hashlib

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from openrl.tasks.errors import InvalidRequest
from openrl.workers.weights import planes
from openrl.workers.weights.digests import block_digest
from openrl.workers.weights.patches import patch
from openrl.workers.weights.planes import CHUNK, Piece, decode, encode

DTYPES = [np.dtype(name) for name in ("u1", "<u2", "<u4", "<u8")]
SIZES = st.one_of(st.integers(1, 600), st.sampled_from([CHUNK - 1, CHUNK, CHUNK + 7, 2 * CHUNK + 3]))
DENSITIES = st.sampled_from([0.0, 1e-5, 1e-3, 0.01, 0.1, 0.2, 0.3, 0.5, 0.9, 1.0])


def change(seed: int, size: int, dtype: np.dtype, density: float, *, clustered: bool) -> tuple[np.ndarray, np.ndarray]:
    """An old block, and a new one with about so many elements changed."""
    draw = np.random.default_rng(seed)
    old = draw.integers(0, 256, size * dtype.itemsize, np.uint8).view(dtype)
    new = old.copy()
    mask = np.arange(size) < density * size if clustered else draw.random(size) < density
    small = draw.random() < 0.5
    xor = draw.integers(1, 4 if small else 256, size, np.uint8).astype(dtype)
    new[mask] ^= xor[mask] << dtype.type(0 if small else 8 * draw.integers(dtype.itemsize))
    return old, new


def decoded(piece: Piece, size: int, dtype: np.dtype, *, back: bool = False) -> planes.Change:
    return decode(piece.form, piece.count, piece.frames, size=size, dtype=dtype, back=back)


def check_both_ways(seed: int, size: int, dtype: np.dtype, density: float, clustered: bool) -> None:
    old, new = change(seed, size, dtype, density, clustered=clustered)
    cut = size // 3
    before = hashlib.sha256(old).digest()
    piece, digests = encode([(old[:cut], new[:cut]), (old[cut:], new[cut:])])
    assert hashlib.sha256(old).digest() == before
    assert digests == [block_digest(new[:cut]), block_digest(new[cut:])]
    assert piece.count == np.count_nonzero(old != new)
    step = decoded(piece, size, dtype)
    there = old.copy()
    patch(there, step)
    assert np.array_equal(there, new)
    patch(there, decoded(piece, size, dtype, back=True))
    assert np.array_equal(there, old)
    parts = [old[:cut].copy(), old[cut:].copy()]
    patch(parts[0], step)
    patch(parts[1], step, start=cut)
    assert np.array_equal(np.concatenate(parts), new)


CASES = given(st.integers(0, 2**32), SIZES, st.sampled_from(DTYPES), DENSITIES, st.booleans())


@settings(max_examples=40, deadline=None)
@CASES
def test_a_change_leads_from_old_to_new_and_back_whatever_the_bits(seed, size, dtype, density, clustered):
    check_both_ways(seed, size, dtype, density, clustered)


@pytest.mark.full
@settings(max_examples=1500, deadline=None)
@CASES
def test_a_change_leads_from_old_to_new_and_back_in_many_more_cases(seed, size, dtype, density, clustered):
    check_both_ways(seed, size, dtype, density, clustered)


@pytest.mark.parametrize(
    ("density", "form"), [(0.0, "same"), (0.001, "gaps"), (0.05, "gaps"), (0.3, "bitmask"), (1.0, "dense")]
)
def test_the_smallest_form_is_taken(density: float, form: str):
    old, new = change(1, 40_000, DTYPES[1], density, clustered=False)
    piece, _ = encode([(old, new)])
    assert piece.form == form


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(0, 300), min_size=1, max_size=9), st.sampled_from(DTYPES), DENSITIES)
def test_however_a_segment_is_cut_into_tensors_it_is_encoded_alike(seed, sizes, dtype, density):
    old, new = change(seed, max(1, sum(sizes)), dtype, density, clustered=False)
    ends = np.cumsum(sizes)[:-1]
    pairs = list(zip(np.split(old, ends), np.split(new, ends), strict=True))
    piece, digests = encode(pairs)
    assert piece == encode([(old, new)])[0]
    assert digests == [block_digest(each) for _, each in pairs]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_frames_are_refused_or_change_elements_of_the_block_only(data):
    size = data.draw(st.integers(1, 500))
    dtype = data.draw(st.sampled_from(DTYPES))
    old, new = change(data.draw(st.integers(0, 999)), size, dtype, data.draw(DENSITIES), clustered=False)
    piece, _ = encode([(old, new)])
    if not piece.frames:
        return
    which = data.draw(st.integers(0, len(piece.frames) - 1))
    frame = bytearray(piece.frames[which])
    at = data.draw(st.integers(0, len(frame) - 1))
    kind = data.draw(st.sampled_from(["flip", "cut", "more"]))
    if kind == "flip":
        frame[at] ^= 1 << data.draw(st.integers(0, 7))
    frame = frame[:at] if kind == "cut" else frame + b"x" if kind == "more" else frame
    frames = [*piece.frames[:which], bytes(frame), *piece.frames[which + 1 :]]
    try:
        found = decode(piece.form, piece.count, frames, size=size, dtype=dtype)
    except InvalidRequest:
        return
    assert kind == "flip"
    patch(old.copy(), found)  # IndexError, had it pointed outside


def bomb(size: int) -> bytes:
    return zstandard.compress(bytes(size))


@pytest.mark.parametrize(
    ("form", "count", "frames", "says"),
    [
        ("gaps", 1, [bomb(1 << 28), bomb(1), bomb(1)], "states 268435456 bytes"),
        ("dense", 1, [bomb(1 << 28), bomb(100)], "states 268435456 bytes"),
        ("bitmask", 1, [bomb(14), bomb(1), bomb(1)], "it must have 13 to 13"),
        ("gaps", 1, [zstandard.compress(b"\x64"), bomb(1), bomb(1)], "lead to element 100; the block has 100"),
        ("gaps", 2, [zstandard.compress(b"\xff\x01"), bomb(2), bomb(2)], "name 1 elements"),
        ("bitmask", 1, [zstandard.compress(bytes(12) + b"\x10"), bomb(1), bomb(1)], "names 1 elements"),
        ("bitmask", 2, [zstandard.compress(b"\x01" + bytes(12)), bomb(2), bomb(2)], "names 1 elements"),
        ("gaps", 1, [zstandard.compress(b"\x01") * 2, bomb(1), bomb(1)], "no whole zstd frame"),
        ("gaps", 1, [bomb(1)], "has 1 frames; it must have 3"),
        ("gaps", 101, [bomb(101), bomb(101), bomb(101)], "can't have 101 changed ones"),
        ("same", 1, [], "can't have 1 changed ones"),
        ("gaps", True, [bomb(1), bomb(1), bomb(1)], "can't have True changed ones"),
        ("pickle", 1, [], "form is 'pickle'; it must be one of same, gaps, bitmask, dense"),
    ],
)
def test_a_block_that_cannot_be_is_refused_by_name_before_it_is_unpacked(form, count, frames, says):
    with pytest.raises(InvalidRequest, match=says.replace("[", r"\[")):
        decode(form, count, frames, size=100, dtype=DTYPES[1])
