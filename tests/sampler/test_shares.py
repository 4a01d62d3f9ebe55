"""Slots between tenants, where sequences may give way at any time."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from openrl.workers.sampler import shares

TENANTS = st.sampled_from("abcd")


def test_a_free_slot_goes_to_the_tenant_with_the_fewest_and_then_to_the_oldest():
    assert shares.next_tenant(["a", "b", "a"], Counter(a=2, b=1)) == "b"
    assert shares.next_tenant(["b", "a"], Counter()) == "b"
    assert shares.next_tenant([], Counter(a=1)) is None


def test_a_slot_is_given_up_by_whoever_has_two_more_than_one_that_waits():
    assert shares.giver(["b"], Counter(a=2)) == "a"
    assert shares.giver(["b"], Counter(a=2, b=1)) is None
    assert shares.giver(["a"], Counter(a=5, b=1)) is None
    assert shares.giver([], Counter(a=5)) is None
    assert shares.giver(["a"], Counter()) is None


@given(st.lists(TENANTS, min_size=1), st.integers(1, 12), st.lists(TENANTS))
def test_giving_up_ends_with_equal_shares_of_all_that_want_one(waiting, slots, first):
    running = Counter(first[:slots])
    turns = 0
    while True:
        if sum(running.values()) < slots:
            tenant = shares.next_tenant(waiting, running)
        elif (richest := shares.giver(waiting, running)) is not None:
            running[richest] -= 1
            tenant = shares.next_tenant(waiting, running)
        else:
            break
        running[tenant] += 1
        turns += 1
        assert turns <= 4 * slots, "slots go round for ever"
    poorest = min(running[tenant] for tenant in set(waiting))
    assert max(running.values()) <= poorest + 1
