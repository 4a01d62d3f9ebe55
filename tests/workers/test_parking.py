"""Park and restore are exact, in place, and cost no more host memory the thousandth time than the first."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn

from openrl.workers.model.arena import Arena, ArenaFull
from openrl.workers.model.parking import RESIDUE_BYTES, Cuda, Parking, ParkingError

MB = 1 << 20


class Trainer:
    """A small model whose optimizer replaces its moments, as ours does, and whose gradients come and go."""

    def __init__(self, width: int = 64) -> None:
        torch.manual_seed(5)
        self.model = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width, bias=False))
        self.model[2].weight = self.model[0].weight
        self.frozen = torch.randn(width, width)
        self.moments: list[Tensor] = []
        self.count = sum(parameter.numel() for parameter in self.model.parameters())

    def tensors(self) -> list[Tensor]:
        parameters = list(self.model.parameters())
        gradients = [each.grad for each in parameters if each.grad is not None]
        return [*parameters, *gradients, *self.moments, self.frozen]

    def step(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model.zero_grad()
        (self.model(torch.randn(4, self.frozen.shape[0])) @ self.frozen).square().mean().backward()
        flat = torch.cat([each.grad.reshape(-1) for each in self.model.parameters()]) * 0.1
        if self.moments:
            flat += 0.9 * torch.cat([each.reshape(-1) for each in self.moments])
        sizes = [each.numel() for each in self.model.parameters()]
        self.moments = [part.view_as(each) for part, each in
                        zip(flat.split(sizes), self.model.parameters(), strict=True)]  # fmt: skip
        with torch.no_grad():
            for parameter, moment in zip(self.model.parameters(), self.moments, strict=True):
                parameter.sub_(0.01 * moment)


def bits(tensors: list[Tensor]) -> list[bytes]:
    return [tensor.detach().clone().contiguous().view(torch.uint8).numpy().tobytes() for tensor in tensors]


@pytest.fixture
def arena(tmp_path: Path) -> Arena:
    return Arena(tmp_path / "arena", size_bytes=4 * MB)


def parked_trainer(arena: Arena) -> tuple[Trainer, Parking]:
    trainer = Trainer()
    trainer.step(0)
    arena.admit(trainer.tensors())
    return trainer, Parking(trainer.tensors, arena)


def test_what_was_parked_comes_back_bit_by_bit_and_in_place(arena: Arena):
    trainer, parking = parked_trainer(arena)
    trainer.frozen[0, 0], trainer.frozen[0, 1] = float("nan"), -0.0
    before, same = bits(trainer.tensors()), [id(tensor) for tensor in trainer.tensors()]
    resident = parking.resident_bytes
    assert arena.resident() and resident > 0
    parking.park()
    assert (parking.resident_bytes, arena.resident()) == (0, {})
    parking.restore()
    assert (bits(trainer.tensors()), [id(tensor) for tensor in trainer.tensors()]) == (before, same)
    assert parking.resident_bytes == resident == sum(arena.resident().values())
    assert trainer.model[0].weight is trainer.model[2].weight
    assert trainer.moments[0].untyped_storage()._cdata == trainer.moments[1].untyped_storage()._cdata


def test_parking_twice_and_restoring_twice_is_as_once(arena: Arena):
    trainer, parking = parked_trainer(arena)
    before = bits(trainer.tensors())
    parking.restore()
    parking.park()
    parking.park()
    parking.restore()
    parking.restore()
    assert bits(trainer.tensors()) == before


def test_training_between_parks_gives_the_same_bits_as_training_without(arena: Arena):
    plain, (trainer, parking) = Trainer(), parked_trainer(arena)
    plain.step(0)
    for seed in range(1, 30):
        plain.step(seed)
        trainer.step(seed)
        parking.park()
        parking.restore()
        assert bits(trainer.tensors()) == bits(plain.tensors())


def test_what_has_not_changed_is_not_copied_out_again(arena: Arena):
    trainer, parking = parked_trainer(arena)
    parking.park()
    everything = parking.copied_bytes
    parking.restore()
    assert parking.copied_bytes == everything
    parking.park()
    assert parking.copied_bytes == 0
    parking.restore()
    with torch.no_grad():
        trainer.model[0].bias.view(8, 8)[3].add_(1)
    before, changed = bits(trainer.tensors()), trainer.model[0].bias.nbytes
    parking.park()
    assert parking.copied_bytes == changed
    parking.restore()
    assert bits(trainer.tensors()) == before


def test_a_tensor_that_took_the_place_of_another_is_not_mistaken_for_it(arena: Arena):
    held = [torch.zeros(1024)]
    arena.admit(held)
    parking = Parking(lambda: held, arena)
    for value in range(1, 40):
        parking.park()
        parking.restore()
        held[0] = torch.full((1024,), float(value))
        parking.park()
        parking.restore()
        assert held[0].eq(value).all()


def test_host_memory_of_sizes_that_were_parked_once_is_not_kept(arena: Arena):
    held = [torch.zeros(1024)]
    parking = Parking(lambda: held, arena)
    for size in range(1, 101):
        held[0] = torch.full((1024 * size,), float(size))
        parking.park()
        parking.restore()
        assert held[0].eq(size).all()
        assert parking.host_bytes == held[0].nbytes


def test_a_gpu_is_not_left_while_something_lies_there_that_nobody_named(monkeypatch):
    """The figures of torch's allocator are stood in for: there is no GPU here."""
    left = {}
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: left.pop("workspaces", None), raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: sum(left.values()))
    device = Cuda(torch.device("cuda", 0))
    left |= {"workspaces": 1 << 30, "constants": RESIDUE_BYTES}
    device.leave()
    left["a run that was dropped"] = 1
    with pytest.raises(ParkingError, match="were not parked"):
        device.leave()


def test_two_states_do_not_fit_on_the_arena_together(tmp_path: Path):
    first, second = Trainer(), Trainer()
    size = sum(each.untyped_storage().nbytes() for each in first.tensors())
    arena = Arena(tmp_path / "arena", size_bytes=size + size // 2)
    arena.admit(first.tensors())
    with pytest.raises(ArenaFull, match="don't fit"):
        arena.admit(second.tensors())
    parking = Parking(first.tensors, arena)
    parking.park()
    arena.admit(second.tensors())
    with pytest.raises(ParkingError, match="brought back"):
        parking.restore()


@pytest.mark.full
def test_another_process_finds_the_arena_taken_and_a_dead_ones_place_free(tmp_path: Path):
    book = tmp_path / "arena"
    code = f"""
import sys, torch
from pathlib import Path
from openrl.workers.model.arena import Arena
arena = Arena(Path({str(book)!r}), size_bytes=1000)
arena.admit([torch.zeros(200)])
print("here", flush=True)
sys.stdin.readline()
"""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], text=True, **pipes) as other:
        assert other.stdout and other.stdout.readline() == "here\n"
        arena = Arena(book, size_bytes=1000)
        with pytest.raises(ValueError, match="other processes"):
            Arena(book, size_bytes=2000)
        with pytest.raises(ArenaFull, match=f"process {other.pid}"):
            arena.admit([torch.zeros(100)])
        other.kill()
    arena.admit([torch.zeros(100)])


def test_memory_that_can_not_be_released_is_refused_before_anything_changes(arena: Arena):
    held = [torch.ones(16), torch.from_numpy(np.ones(16, dtype=np.float32))]
    arena.admit(held)
    parking = Parking(lambda: held, arena)
    with pytest.raises(ParkingError, match="can't be released"):
        parking.park()
    assert parking.resident_bytes == 128 and held[0].eq(1).all()


@pytest.mark.parametrize("size", [0, -1])
def test_an_arena_without_room_is_refused(tmp_path: Path, size: int):
    with pytest.raises(ValueError, match="size_bytes"):
        Arena(tmp_path / "arena", size_bytes=size)


def cycles(tmp_path: Path, count: int, width: int) -> None:
    trainer, process = Trainer(width), psutil.Process()
    trainer.step(0)
    arena = Arena(tmp_path / "arena", size_bytes=16 * sum(each.nbytes for each in trainer.tensors()))
    arena.admit(trainer.tensors())
    parking = Parking(trainer.tensors, arena)
    for cycle in range(count):
        if cycle == count // 4:
            buffers, memory = parking.host_bytes, process.memory_info().rss
        if cycle % 5 == 0:
            trainer.step(cycle)
        before = bits(trainer.tensors())
        parking.park()
        parking.restore()
        assert bits(trainer.tensors()) == before
    assert parking.host_bytes == buffers
    one_state = sum(each.nbytes for each in trainer.tensors())
    grown = (process.memory_info().rss - memory) / one_state
    assert grown < count / 8, f"{grown:.1f} states more after {count} cycles; the process does other things too"


def test_forty_cycles_change_no_bit_and_take_no_more_host_memory(tmp_path: Path):
    cycles(tmp_path, 40, 128)


@pytest.mark.full
def test_a_thousand_cycles_change_no_bit_and_take_no_more_host_memory(tmp_path: Path):
    cycles(tmp_path, 1000, 256)
