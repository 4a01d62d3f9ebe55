"""Who gets a slot, and who reads how much of a prompt."""

from hypothesis import given
from hypothesis import strategies as st

from openrl.tasks.journal import SampleJob
from openrl.tasks.messages import Sample
from openrl.workers.sampler.groups import Group, Slot, Token
from openrl.workers.sampler.requests import Limits, read
from openrl.workers.sampler.slots import SMALLEST, Slots, next_group, prefill_shares

LIMITS = Limits(vocab_size=100, max_context=64, cache_tokens=64, eos_token_ids=(7,))


def group(tenant: str, arrival: int, num_samples: int = 1) -> Group:
    message = Sample(adapter_dir="", prompt=(1, 2, 3), num_samples=num_samples, max_tokens=8, seed=0)
    job = SampleJob(tenant=tenant, request_id=f"{tenant}:{arrival}", message=message, submitted=0.0)
    return Group(read(job, LIMITS), arrival=arrival)


def started(tenant: str, arrival: int, num_samples: int, slots: list[int]) -> Group:
    one = group(tenant, arrival, num_samples)
    places = [Slot(0, index) for index in slots]
    one.slot = places[0]
    one.read_prompt(3, [], [])
    one.begin([Token(5, -1.0)] * num_samples, str)
    for slot in places[1:]:
        one.run_next(slot)
    return one


def positions(slot: Slot) -> range:
    size = SMALLEST << slot.pool
    return range(slot.number * size, (slot.number + 1) * size)


def test_a_slot_is_as_long_as_the_power_of_two_above_what_is_asked_and_the_lowest():
    slots = Slots(9, kv_tokens=1024)
    taken = [slots.take(num_tokens) for num_tokens in (1, 64, 65, 200, 128)]
    assert taken == [Slot(0, 0), Slot(0, 1), Slot(1, 1), Slot(2, 1), Slot(1, 4)]


def test_slots_are_bounded_in_number_and_in_positions():
    slots = Slots(2, kv_tokens=256)
    assert slots.take(300) is None
    first, second = slots.take(128), slots.take(128)
    assert slots.take(1) is None
    slots.give(first)
    assert slots.take(129) is None
    slots.give(second)
    assert slots.take(256) == Slot(2, 0)


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 600)), max_size=60))
def test_slots_in_use_never_overlap_and_all_space_comes_back(steps):
    slots, held = Slots(10, kv_tokens=1024), []
    for takes, number in steps:
        if takes and (slot := slots.take(number)) is not None:
            assert len(positions(slot)) >= number
            held.append(slot)
        elif held and not takes:
            slots.give(held.pop(number % len(held)))
        used = [position for slot in held for position in positions(slot)]
        assert len(used) == len(set(used)) and max(used, default=0) < 1024
    for slot in held:
        slots.give(slot)
    assert slots.take(1024) == Slot(4, 0)


def test_a_new_request_comes_before_a_sibling_of_one_that_runs():
    assert next_group([started("a", 0, 4, [0, 1]), group("a", 1)]).arrival == 1


def test_the_tenant_with_fewer_slots_comes_first():
    assert next_group([started("a", 0, 1, [0]), group("a", 1), group("b", 2)]).arrival == 2


def test_within_a_tenant_and_with_equal_slots_the_oldest_comes_first():
    assert next_group([group("a", 3), group("a", 1), group("a", 2)]).arrival == 1


def test_nobody_wants_a_slot_when_all_run():
    assert next_group([started("a", 0, 2, [0, 1])]) is None


def test_a_waiting_sibling_takes_over_the_last_slot_of_its_group():
    one = started("a", 0, 3, [4])
    first = one.running[0]
    assert one.end(first) is None
    assert one.slots == [Slot(0, 4)] and len(one.waiting) == 1


def test_a_slot_is_given_back_while_another_sibling_still_holds_the_prompt():
    one = started("a", 0, 3, [4, 5])
    assert one.end(one.running[0]) == Slot(0, 4)
    assert one.slots == [Slot(0, 5)] and len(one.waiting) == 1


def test_a_lone_prompt_reads_by_the_whole_budget():
    assert prefill_shares([1000], 512) == [512]
    assert prefill_shares([], 512) == []


def test_a_long_prompt_leaves_half_to_short_ones_and_is_not_starved_by_them():
    assert prefill_shares([5000, 50, 30], 512) == [432, 50, 30]
    assert prefill_shares([5000, *[100] * 9], 512)[0] == 256


@given(st.lists(st.integers(1, 2000), max_size=20), st.integers(1, 600))
def test_the_budget_is_kept_and_never_left_unused(unread, budget):
    shares = prefill_shares(unread, budget)
    assert sum(shares) == min(budget, sum(unread))
    assert all(0 <= share <= most for share, most in zip(shares, unread, strict=True))
