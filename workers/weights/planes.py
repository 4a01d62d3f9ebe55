"""The codec: what changed in one block of a tensor, as a few compressed byte planes, and back.

A change is new minus old, both taken as unsigned integers that wrap around: added it leads from the older block to
the newer one, subtracted back again, bit by bit. A small step moves most numbers by one place in their last bit, which
as a difference is 1 or -1, whatever carries; as XOR it would be any of 1, 3, 7 ... Differences are folded (0, -1, 1,
-2 ... become 0, 1, 2, 3 ...) and split into byte planes: the high ones are nearly all zero. Where they belong is said
in one of three ways, whichever is smallest:

- `gaps`: for each changed element the number of unchanged ones before it, as bytes; 255 means 255 of them and more to
  come. Positions therefore grow by construction, and their bytes are bounded by the block.
- `bitmask`: one bit an element, the first in the lowest bit.
- `dense`: nothing; every element's value is there.

Each plane is one zstd frame (RFC 8878) that states its size. Nothing is decompressed whose stated size is not what the
block allows. Knows arrays and bytes only: neither files nor digests of whole tensors, nor torch.
"""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import zstandard
from numpy.typing import NDArray

from openrl.tasks.errors import InvalidRequest, shown
from openrl.workers.weights.digests import Hasher
from openrl.workers.weights.specs import Words

PACKING = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST, window_log=22, hash_log=6, min_match=7, write_content_size=1
)
"""Of zstd: only long repeats are looked for, which are the zeros of high planes. What else repeats there does so by
chance: levels 1 and 3 spend time on that, and make larger frames."""

CHUNK = 1 << 19
"""Elements compared at once: few enough for a cache, enough that threads don't wait for the interpreter's lock."""

SCRATCH_BYTES = 8 * CHUNK

_MORE = 255
_GAPS_BELOW, _DENSE_ABOVE = 0.25, 0.25
_BITMASK_ABOVE = 0.08


@dataclass(frozen=True, slots=True)
class Piece:
    """The encoded change of one block; no frames where nothing changed."""

    form: str
    """same, gaps, bitmask or dense."""
    count: int
    """How many elements changed."""
    frames: tuple[bytes, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Of all frames."""
        return sum(map(len, self.frames))


@dataclass(frozen=True, slots=True)
class Change:
    """A decoded change: what to add, and the positions (int32, ascending) that it belongs to; None means all."""

    positions: NDArray[np.int32] | None
    values: Words

    @property
    def size_bytes(self) -> int:
        """In memory."""
        return self.values.nbytes + (0 if self.positions is None else self.positions.nbytes)


SAME = Piece("same", 0)
FORMS = ("same", "gaps", "bitmask", "dense")


def encode(pairs: Sequence[tuple[Words, Words]]) -> tuple[Piece, list[bytes]]:
    """Return what leads from the old to the new words of all pairs, taken as one block; and each new one's digest."""
    size, dtype = sum(len(new) for _, new in pairs), pairs[0][1].dtype
    digests = [Hasher() for _ in pairs]
    found = [change for change in _changes(pairs, digests, size, dtype) if change is not None]
    if not found:
        return SAME, [digest.digest() for digest in digests]
    positions, values = (np.concatenate(each) for each in zip(*found, strict=True))
    return _smallest(positions, values, size), [digest.digest() for digest in digests]


def decode(
    form: str, count: int, frames: Sequence[bytes | memoryview], *, size: int, dtype: np.dtype, back: bool = False
) -> Change:
    """Read the change of a block of `size` elements; with `back`, what leads from the newer block to the older one.

    Raises:
        InvalidRequest: it isn't the change of such a block; nothing larger than the block was allocated.
    """
    check(form, count, len(frames), size=size, width=dtype.itemsize)
    if form == "same":
        return Change(np.empty(0, np.int32), np.empty(0, dtype))
    if form == "dense":
        every = _joined(frames, size, dtype)
        if np.count_nonzero(every) != count:
            raise InvalidRequest(f"a dense block changes {np.count_nonzero(every)} elements; its header says {count}")
        return Change(None, _unfolded(every, back=back))
    values = _unfolded(_joined(frames[1:], count, dtype), back=back)
    positions = _from_gaps(frames[0], count, size) if form == "gaps" else _from_bitmask(frames[0], count, size)
    return Change(positions, values)


def check(form: object, count: object, num_frames: int, *, size: int, width: int) -> None:
    """Refuse the header of a piece that no block of `size` elements of `width` bytes has.

    Raises:
        InvalidRequest: it names what is wrong.
    """
    if form not in FORMS:
        raise InvalidRequest(f"a block's form is {shown(form)}; it must be one of {', '.join(FORMS)}")
    if type(count) is not int or not (count == 0 if form == "same" else 1 <= count <= size):
        raise InvalidRequest(f"a block of {size} elements can't have {shown(count)} changed ones in the form {form}")
    expected = {"same": 0, "dense": width}.get(str(form), width + 1)
    if num_frames != expected:
        raise InvalidRequest(f"a block in the form {form} has {num_frames} frames; it must have {expected}")


def _changes(
    pairs: Sequence[tuple[Words, Words]], digests: Sequence[Hasher], size: int, dtype: np.dtype
) -> Iterator[tuple[NDArray[np.int32], Words] | None]:
    """Subtract chunk by chunk, in memory that stays in a core's cache; a chunk goes on with the next pair."""
    chunk, start, filled = scratch(min(CHUNK, size), dtype), 0, 0
    for (old, new), digest in zip(pairs, digests, strict=True):
        at = 0
        while at < len(new):
            taken = min(len(chunk) - filled, len(new) - at)
            after = new[at : at + taken]
            digest.update(after.data)
            np.subtract(after, old[at : at + taken], out=chunk[filled : filled + taken])
            at, filled = at + taken, filled + taken
            if filled == len(chunk):
                yield _nonzero(chunk, start)
                start, filled = start + filled, 0
    if filled:
        yield _nonzero(chunk[:filled], start)


def _nonzero(chunk: Words, start: int) -> tuple[NDArray[np.int32], Words] | None:
    """Positions and values of what isn't zero; words of 8 bytes are looked at first, since most are."""
    shift = 4 - chunk.itemsize.bit_length()  # of 8 bytes to elements: a power of two, since division takes long
    per_word = 1 << shift
    padded = scratch(-(-len(chunk) // per_word) * per_word, chunk.dtype)  # the chunk's own memory
    padded[len(chunk) :] = 0
    eights = padded.view(np.uint64)
    words = np.flatnonzero(eights != 0)
    if not len(words):
        return None
    candidates = eights[words].view(chunk.dtype)
    hits = np.flatnonzero(candidates != 0)
    positions = words[hits >> shift] << shift
    positions += hits & (per_word - 1)
    positions += start
    return positions.astype(np.int32), candidates[hits]


def _smallest(positions: NDArray[np.int32], values: Words, size: int) -> Piece:
    """Only the forms that can be smallest at this density are tried."""
    density = len(positions) / size
    tried = []
    if density <= _GAPS_BELOW:
        tried.append(Piece("gaps", len(values), (_packed(_gaps(positions)), *_planes(_folded(values)))))
    if density >= _BITMASK_ABOVE:
        mask = np.zeros(size, np.bool_)
        mask[positions] = True
        planes = tried[0].frames[1:] if tried else _planes(_folded(values))
        tried.append(Piece("bitmask", len(values), (_packed(np.packbits(mask, bitorder="little")), *planes)))
    if density >= _DENSE_ABOVE:
        every = np.zeros(size, values.dtype)
        every[positions] = _folded(values)
        tried.append(Piece("dense", len(values), _planes(every)))
    return min(tried, key=lambda piece: piece.size_bytes)


def _gaps(positions: NDArray[np.int32]) -> NDArray[np.uint8]:
    gaps = positions.copy()
    gaps[1:] -= positions[:-1]
    gaps[1:] -= 1
    if gaps.max() < _MORE:
        return gaps.astype(np.uint8)
    large = np.flatnonzero(gaps >= _MORE)
    more, gaps[large] = np.divmod(gaps[large], _MORE)
    steps = np.ones(len(gaps), np.int32)
    steps[large] += more
    ends = np.cumsum(steps) - 1
    encoded = np.full(ends[-1] + 1, _MORE, np.uint8)
    encoded[ends] = gaps
    return encoded


def _from_gaps(frame: bytes | memoryview, count: int, size: int) -> NDArray[np.int32]:
    encoded = _unpacked(frame, at_least=count, at_most=count + size // _MORE)
    is_end = encoded != _MORE
    num_ends = int(np.count_nonzero(is_end))
    if num_ends != count or encoded[-1] == _MORE:
        raise InvalidRequest(f"a block's gaps name {num_ends} elements; its header says {count}")
    # An element is one further than the gap before it; the sum of all is at most 256 times the block's size.
    ends: NDArray[np.int32] = np.cumsum(encoded + is_end, dtype=np.int32)
    positions = ends if len(ends) == count else ends[is_end]
    positions -= 1
    if positions[-1] >= size:
        raise InvalidRequest(f"a block's gaps lead to element {positions[-1]}; the block has {size}")
    return positions


def _from_bitmask(frame: bytes | memoryview, count: int, size: int) -> NDArray[np.int32]:
    num_bytes = -(-size // 8)
    bits = np.unpackbits(_unpacked(frame, at_least=num_bytes, at_most=num_bytes), bitorder="little")
    positions = np.flatnonzero(bits).astype(np.int32)
    if len(positions) != count or positions[-1] >= size:
        raise InvalidRequest(f"a block's bitmask names {len(positions)} elements; its header says {count}")
    return positions


def _folded(values: Words) -> Words:
    """Small differences of either sign become small numbers."""
    one = values.dtype.type(1)
    folded: Words = (values << one) ^ (values.dtype.type(0) - (values >> values.dtype.type(8 * values.itemsize - 1)))
    return folded


def _unfolded(values: Words, *, back: bool) -> Words:
    """What `_folded` was given; with `back`, its negative."""
    one = values.dtype.type(1)
    sign = values & one
    np.negative(sign, out=sign)
    plain: Words = (values >> one) ^ sign
    return np.negative(plain) if back else plain


def _planes(values: Words) -> tuple[bytes, ...]:
    return tuple(_packed((values >> values.dtype.type(8 * plane)).astype(np.uint8)) for plane in range(values.itemsize))


def _joined(frames: Sequence[bytes | memoryview], count: int, dtype: np.dtype) -> Words:
    if len(frames) == 1:
        return _unpacked(frames[0], at_least=count, at_most=count).view(dtype)
    if len(frames) == 2:
        low, high = (_unpacked(frame, at_least=count, at_most=count).astype(dtype) for frame in frames)
        high <<= dtype.type(8)
        low |= high
        return low
    bytes_by_value = np.empty((count, dtype.itemsize), np.uint8)
    for plane, frame in enumerate(frames):
        bytes_by_value[:, plane] = _unpacked(frame, at_least=count, at_most=count)
    return bytes_by_value.reshape(-1).view(dtype)


_tools = threading.local()
"""Each thread's compressor, decompressor and scratch memory: to make one anew takes longer than a small block."""


def scratch(length: int, dtype: np.dtype) -> Words:
    """Return memory of up to `SCRATCH_BYTES`, with anything in it, until this thread asks again."""
    if not hasattr(_tools, "scratch"):
        _tools.scratch = np.empty(SCRATCH_BYTES // 8, np.uint64)
    words: Words = _tools.scratch.view(dtype)[:length]
    return words


def _packed(plane: NDArray[np.uint8]) -> bytes:
    if not hasattr(_tools, "compressor"):
        _tools.compressor = zstandard.ZstdCompressor(compression_params=PACKING)
    compressed: bytes = _tools.compressor.compress(plane.data)
    return compressed


def _unpacked(frame: bytes | memoryview, *, at_least: int, at_most: int) -> NDArray[np.uint8]:
    """Decompress one frame, whose own statement of its size is checked before a byte is allocated."""
    if not hasattr(_tools, "decompressor"):
        _tools.decompressor = zstandard.ZstdDecompressor()
    try:
        stated = zstandard.frame_content_size(frame)
        if not at_least <= stated <= at_most:
            raise InvalidRequest(f"a frame states {stated} bytes; it must have {at_least} to {at_most}")
        plane = _tools.decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise InvalidRequest(f"a frame is no whole zstd frame: {error}") from error
    if len(plane) != stated:
        raise InvalidRequest(f"a frame has {len(plane)} bytes; it states {stated}")
    return np.frombuffer(plane, np.uint8)
