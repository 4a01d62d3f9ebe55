"""A seat's turns in threads: state stays while nobody wants the place, leaves for others, and never overlaps."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import redis

from openrl.timeslice.errors import Broken, NotGranted, Refused
from openrl.timeslice.holder import Holder
from openrl.timeslice.seat import Event, Seat
from openrl.timeslice.turn import Sharing, Turns
from tests.timeslice.world import holder

GPU = "gpu-0"


class Device:
    """What lies on the accelerator; two at once are a violation."""

    def __init__(self) -> None:
        self.lying: list[str] = []
        self.violations = 0


class State:
    """Something parkable that says where it is."""

    def __init__(self, device: Device, name: str) -> None:
        self.device, self.name = device, name
        self.parks = self.restores = 0
        self.fail_park = self.fail_restore = self.leave_bytes = False

    @property
    def resident_bytes(self) -> int:
        return 8 * self.device.lying.count(self.name) + self.leave_bytes

    def park(self) -> None:
        if self.fail_park:
            raise MemoryError("no host memory")
        self.parks += 1
        self.device.lying.remove(self.name)

    def restore(self) -> None:
        self.device.violations += bool(self.device.lying)
        self.device.lying.append(self.name)
        self.restores += 1
        if self.fail_restore:
            raise MemoryError("no device memory")


@pytest.fixture
def turns(client: redis.Redis) -> Turns:
    return Turns(client, Sharing(floor_s=0.005))


@pytest.fixture
def device() -> Device:
    return Device()


@pytest.fixture
def new_seat(turns: Turns, device: Device) -> Iterator[Callable[..., tuple[Seat, State]]]:
    seats: list[Seat] = []

    def new(name: str, **options) -> tuple[Seat, State]:
        state = State(device, name)
        seats.append(Seat(turns, GPU, name, state, holder=holder(len(seats) + 1), **options))
        return seats[-1], state

    yield new
    for seat in seats:
        try:
            seat.close()
        except (Broken, Refused):
            pass


def soon(fact: Callable[[], bool]) -> bool:
    until = time.monotonic() + 60
    while not (found := fact()) and time.monotonic() < until:
        time.sleep(0.005)
    return found


def use_once(seat: Seat) -> None:
    with seat.turn():
        pass


def test_state_stays_on_the_accelerator_while_nobody_else_wants_it(new_seat, device):
    seat, state = new_seat("a")
    tokens = set()
    for _ in range(20):
        with seat.turn() as turn:
            tokens.add(turn.token)
    assert (len(tokens), state.restores, state.parks, device.lying) == (1, 1, 0, ["a"])


def test_an_idle_holder_parks_when_somebody_comes(new_seat, device):
    (first, parked), (second, _) = new_seat("a"), new_seat("b")
    with first.turn() as before:
        pass
    with second.turn() as after:
        assert device.lying == ["b"] and parked.parks == 1
    assert after.token > before.token


def test_a_busy_holder_keeps_its_turn_until_its_body_ends(new_seat, device):
    (first, _), (second, _) = new_seat("a"), new_seat("b")
    with first.turn():
        with pytest.raises(NotGranted, match="within"):
            with second.turn(patience_s=0.3):
                pass
        assert device.lying == ["a"]
    with second.turn():
        assert device.lying == ["b"]


@pytest.mark.parametrize("patience_s", [None, 0.2])
def test_who_waits_for_a_store_that_is_away_gives_up_too_and_says_so(new_seat, turns, monkeypatch, patience_s):
    seat, _ = new_seat("a")

    def away(*args: object, **options: object) -> None:
        raise redis.ConnectionError

    with monkeypatch.context() as context:
        for name in ("withdraw", "ask", "release"):
            context.setattr(turns, name, away)
        with pytest.raises(redis.ConnectionError), seat.turn():
            pass  # the seat owes the store to leave the line
        with (
            pytest.raises(NotGranted) as refused,
            seat.turn(patience_s=patience_s, gives_up=lambda: patience_s is None),
        ):
            pass
    given_up, silent = "it was given up while the store did not answer", "the store did not answer within 0.2 s"
    assert str(refused.value).endswith(f"has no turn on {GPU}: {silent if patience_s else given_up}")
    use_once(seat)


def test_many_turns_of_busy_seats_never_overlap_and_all_are_served(new_seat, device, turns):
    seats = [new_seat(name) for name in "abc"]
    inside, overlaps = [], 0

    def work(seat: Seat) -> None:
        nonlocal overlaps
        for _ in range(15):
            with seat.turn() as turn:
                overlaps += bool(inside)
                inside.append(turn)
                time.sleep(0.001)
                overlaps += inside != [turn]
                inside.remove(turn)

    threads = [threading.Thread(target=work, args=(seat,)) for seat, _ in seats]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert (overlaps, device.violations) == (0, 0)
    assert all(state.restores > 1 for _, state in seats), "they took turns"


@pytest.mark.parametrize("fault", ["fail_park", "leave_bytes"])
def test_a_failed_park_hands_nothing_on(new_seat, device, turns, fault):
    events: list[Event] = []
    (first, state), (second, _) = new_seat("a", on_event=events.append), new_seat("b")
    with first.turn() as turn:
        setattr(state, fault, True)
    with pytest.raises(NotGranted):
        with second.turn(patience_s=0.5):
            pass
    assert soon(lambda: events[-1].kind == "failed")
    with pytest.raises(Broken, match="parking failed"):
        with first.turn():
            pass
    assert turns.redis.hget(f"openrl:accelerator:{GPU}", "state") == b"failed"
    assert turns.redis.hget(f"openrl:accelerator:{GPU}", "token") == str(turn.token).encode()
    with pytest.raises(NotGranted):
        with second.turn(patience_s=0.1):
            pass


def test_a_failed_restore_does_not_go_on_and_hands_nothing_on(new_seat, device, turns):
    (first, state), (second, _) = new_seat("a"), new_seat("b")
    state.fail_restore = True
    entered = False
    with pytest.raises(Broken, match="restoring failed"):
        with first.turn():
            entered = True
    assert not entered
    first.close()
    with pytest.raises(NotGranted):
        with second.turn(patience_s=0.3):
            pass
    assert turns.sweep(GPU, is_gone=lambda known: known == holder(1)), "the turn ends with its processes"


def test_an_error_in_the_body_ends_no_turn(new_seat, device):
    seat, _ = new_seat("a")
    with pytest.raises(ZeroDivisionError):
        with seat.turn() as before:
            raise ZeroDivisionError
    with seat.turn() as after:
        assert before == after


def test_a_turn_that_was_ended_from_outside_is_never_used_again(new_seat, turns):
    seat, _ = new_seat("a")
    with seat.turn() as turn:
        pass
    turns.end(GPU, turn.token)
    with pytest.raises((Refused, Broken)):
        with seat.turn():
            pass
    with pytest.raises(Broken, match="ended from outside"):
        with seat.turn():
            pass


def test_a_closed_seat_leaves_the_accelerator_and_the_line(new_seat, device, turns):
    (first, _), (second, _) = new_seat("a"), new_seat("b")
    waiting = threading.Event()
    failed: list[type] = []

    def wait() -> None:
        waiting.set()
        try:
            with second.turn():
                pass
        except NotGranted as error:
            failed.append(type(error))

    with first.turn():
        thread = threading.Thread(target=wait)
        thread.start()
        waiting.wait()
        assert soon(lambda: turns.redis.zcard(f"openrl:accelerator:{GPU}:line") == 1)
        second.close()
        thread.join(20)
        assert failed == [NotGranted] and turns.redis.zcard(f"openrl:accelerator:{GPU}:line") == 0
    first.close()
    assert device.lying == [] and not turns.redis.hexists(f"openrl:accelerator:{GPU}", "owner")
    with pytest.raises(NotGranted, match="closed"):
        with first.turn():
            pass


def test_whoever_waits_proves_the_holders_death_itself(new_seat, turns, device):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    dead = Holder.of(process.pid)
    assert turns.ask(GPU, "killed", "its seat", dead) is not None
    seat, _ = new_seat("b")
    with pytest.raises(NotGranted):
        with seat.turn(patience_s=0.2):
            pass
    process.kill()
    process.wait()
    with seat.turn(patience_s=30):
        assert device.lying == ["b"]


def test_what_happened_is_told(new_seat, device):
    events: list[Event] = []
    (first, _), (second, _) = new_seat("a", on_event=events.append), new_seat("b")
    with first.turn():
        pass
    with second.turn():
        pass
    assert soon(lambda: len(events) == 3)
    assert [(event.kind, event.resident_bytes) for event in events] == [("granted", 0), ("restored", 8), ("parked", 0)]


def test_a_seat_that_parks_for_itself_is_left_alone_by_the_thread(new_seat, device):
    (first, _), (second, _) = new_seat("a", watch=False), new_seat("b")
    with first.turn():
        pass
    with pytest.raises(NotGranted):
        with second.turn(patience_s=0.3):
            pass
    waiter = threading.Thread(target=use_once, args=(second,))
    waiter.start()

    def rests() -> bool:
        first.rest()
        return device.lying == ["b"]

    assert soon(rests)
    waiter.join(20)


def test_processes_that_are_named_are_part_of_the_proof(new_seat, turns):
    seat, _ = new_seat("a")
    with seat.turn():
        seat.name_processes(os.getpid())
        named = []
        assert not turns.sweep(GPU, is_gone=lambda known: bool(named.append(known)))
    assert [other.pid for other in named[0].others] == [os.getpid()]
