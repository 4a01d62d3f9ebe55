"""Whatever happens to the files of a chain, a reader gets the right weights or a refusal, and keeps what it has.

Each case damages one file of a chain (a bit, a byte, an end, a piece from elsewhere, another file altogether) or gives
the reader another base, and asks for a version.
"""

from __future__ import annotations

import random
import shutil
import tempfile
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from openrl.tasks.errors import InvalidRequest, NotFound
from openrl.workers.weights.publish import Publisher
from openrl.workers.weights.reader import Reader
from openrl.workers.weights.resident import Resident
from tests.weights.conftest import MEMORY
from tests.weights.models import DTYPES, Model, copied, model, same, step

NAMES = ("v0", "v1", "v2", "v3")
KINDS = ("flip", "byte", "cut", "more", "zeros", "moved", "swapped", "gone", "version")
SHAPES = st.lists(
    st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 9), max_size=3).map(tuple)), min_size=1, max_size=4
)


@dataclass
class Chain:
    """Published versions, and what they must be."""

    home: Path
    versions: list[Model]
    readers: list[Resident]

    def files(self) -> list[Path]:
        return sorted(path for path in self.home.rglob("*") if path.is_file())


def chain(home: Path, seed: int, shapes: list, density: float) -> Chain:
    first = model(seed, {f"tensor.{number}": shape for number, shape in enumerate(shapes)})
    versions = [first]
    while len(versions) < len(NAMES):
        versions.append(step(versions[-1], seed + len(versions), density))
    publisher = Publisher(home, anchor_every=3, threads=1)
    for name, weights in zip(NAMES, versions, strict=True):
        publisher.publish(name, weights, step=0)
    readers = [Resident(copied(first)) for _ in range(len(NAMES) + 1)]
    for number, name in enumerate(NAMES):
        with Reader(home, readers[number], threads=1).prepare(name) as switch:
            switch.apply(threads=1)
    return Chain(home, versions, readers)


def damage(path: Path, others: list[Path], draw: random.Random) -> str:
    """Do one harm to a file; say which."""
    kind = draw.choice(KINDS)
    data = bytearray(path.read_bytes())
    at = draw.randrange(len(data))
    if kind == "flip":
        data[at] ^= 1 << draw.randrange(8)
    elif kind == "byte":
        data[at] = draw.randrange(256)
    elif kind == "cut":
        del data[at:]
    elif kind == "more":
        data += draw.randbytes(draw.randint(1, 9))
    elif kind == "zeros":
        data[at : at + 64] = bytes(len(data[at : at + 64]))
    elif kind == "moved":
        start = draw.randrange(len(data))
        piece = data[start : start + 16]
        data[at : at + len(piece)] = piece
    elif kind == "swapped":
        data = bytearray(draw.choice([other for other in others if other.name == path.name]).read_bytes())
    if kind == "gone":
        path.unlink()
    elif kind == "version":
        shutil.rmtree(path.parent)
    else:
        path.write_bytes(data)
    return f"{kind} at {at} of {path.parent.name}/{path.name}"


def started(kept: Resident) -> Resident:
    """A reader's weights: some version, or none."""
    resident = Resident(copied(kept.tensors))
    if kept.at is not None:
        resident.settle(kept.at, kept.digests)
    return resident


def harm(resident: Resident, others: list[Resident], draw: random.Random) -> str:
    """Do now and then one harm to a reader's weights; say which."""
    kind = draw.choice(["", "", "", "half", "one", "swapped", "stale"])
    tensors = resident.tensors
    if kind == "half":
        for name, tensor in step(tensors, draw.randrange(99), 0.5).items():
            tensors[name].copy_(tensor)
    elif kind == "one":  # where the next delta changes something, or where it doesn't
        filled = [name for name, words in resident.words.items() if len(words)]
        if filled:
            name = draw.choice(filled)
            words, is_bool = resident.words[name], resident.specs[name].dtype == "BOOL"
            bit = 0 if is_bool else draw.randrange(8 * words.itemsize)
            words[draw.randrange(len(words))] ^= words.dtype.type(1 << bit)
    elif kind == "swapped":
        pairs = [
            pair for pair in combinations(sorted(tensors), 2) if resident.specs[pair[0]] == resident.specs[pair[1]]
        ]
        if pairs:
            one, other = draw.choice(pairs)
            kept = tensors[one].clone()
            tensors[one].copy_(tensors[other])
            tensors[other].copy_(kept)
    elif kind == "stale":  # it takes itself for another version than it is
        other = draw.choice([each for each in others if each.at is not None])
        resident.settle(other.at, other.digests)
    return kind


def check(chain: Chain, target: int, resident: Resident, what: str) -> bool:
    """Bring a reader to a version, or be refused; return whether it was."""
    before = copied(resident.tensors)
    try:
        switch = Reader(chain.home, resident, threads=1).prepare(NAMES[target])
    except (InvalidRequest, NotFound):
        assert same(resident.tensors, before), f"a refusal changed the weights: {what}"
        return False
    with switch:
        assert same(resident.tensors, before), f"preparing changed the weights: {what}"
        switch.apply(threads=1)
    assert same(resident.tensors, chain.versions[target]), f"wrong weights were vouched for: {what}"
    return True


def campaign(seed: int, shapes: list, density: float, *, cases: int) -> None:
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        found = chain(Path(folder) / "home", seed, shapes, density)
        files = found.files()
        shutil.copytree(found.home, Path(folder) / "kept")
        for _ in range(cases):
            path, target = draw.choice(files), draw.randrange(len(NAMES))
            resident = started(draw.choice(found.readers))
            done = harm(resident, found.readers, draw)
            check(found, target, resident, f"{done} {damage(path, files, draw)}")
            shutil.rmtree(path.parent, ignore_errors=True)
            shutil.copytree(Path(folder) / "kept" / path.parent.name, path.parent)
            if done:  # alone, since a damaged file hides what only a harm would show
                harm(resident, found.readers, draw)
                check(found, target, resident, f"{done}, and another harm")
        assert check(found, 3, started(found.readers[-1]), "nothing")


CASES = given(st.integers(0, 2**32), SHAPES, st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0]))


@settings(max_examples=10, deadline=None)
@CASES
def test_damaged_files_give_the_right_weights_or_a_refusal(seed, shapes, density):
    campaign(seed, shapes, density, cases=10)


@pytest.mark.full
@pytest.mark.timeout(300)
@settings(max_examples=400, deadline=None)
@CASES
def test_ten_thousand_damages_give_the_right_weights_or_a_refusal(seed, shapes, density):
    campaign(seed, shapes, density, cases=25)
