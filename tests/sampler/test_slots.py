"""Who gets a slot and a place, who gives way, and who reads how much of a prompt: simulated without a model."""

from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from openrl.tasks.journal import SampleJob
from openrl.tasks.messages import Sample
from openrl.workers.sampler.groups import Group, Token
from openrl.workers.sampler.places import Place, Places, pool_of
from openrl.workers.sampler.requests import Limits, read
from openrl.workers.sampler.slots import PATIENCE, Slots, prefill_shares

VOCAB = 1000
STOP = VOCAB - 1


def group(tenant: str, arrival: int, *, prompt: int = 3, num_samples: int = 1, max_tokens: int = 8) -> Group:
    limits = Limits(vocab_size=VOCAB, max_context=1 << 20, cache_tokens=1 << 20, eos_token_ids=(STOP,))
    tokens = tuple((arrival * 31 + i) % STOP for i in range(prompt))
    message = Sample(adapter_dir="", prompt=tokens, num_samples=num_samples, max_tokens=max_tokens, seed=arrival)
    job = SampleJob(tenant=tenant, request_id=f"{tenant}:{arrival}", message=message, submitted=0.0)
    return Group(read(job, limits), arrival=arrival, decode=str)


def drawn(arrival: int, index: int, position: int) -> int:
    """The token that a seed gives at a position; now and then the one that ends the sequence."""
    number = (arrival * 7919 + index * 104729 + position * 1299709) % 4001
    return STOP if number < 4 else number % STOP


def alone(one: Group) -> list[list[int]]:
    """What a request draws when it has all for itself."""
    whole = []
    for index in range(one.request.num_samples):
        tokens = [drawn(one.arrival, index, 0)]
        while tokens[-1] != STOP and len(tokens) < one.request.max_new:
            tokens.append(drawn(one.arrival, index, len(tokens)))
        whole.append(tokens)
    return whole


class Line:
    """A cache that holds token ids in place of keys and values."""

    def __init__(self, kv_tokens: int) -> None:
        self.cells: list[int | None] = [None] * kv_tokens

    def held(self, place: Place) -> slice:
        return slice(place.start, place.start + place.length)

    def clear(self, place):
        self.cells[self.held(place)] = [None] * place.length

    def copy(self, source, target, num_tokens):
        assert self.cells[self.held(target)] == [None] * target.length
        self.cells[target.start : target.start + num_tokens] = self.cells[source.start : source.start + num_tokens]

    def move(self, source, target):
        tokens = self.cells[self.held(source)]
        self.clear(source)
        assert self.cells[self.held(target)] == [None] * target.length
        self.cells[target.start : target.start + len(tokens)] = tokens


@dataclass
class World:
    """Steps as the engine takes them; every draw is checked against what lies in the place."""

    num_slots: int = 4
    kv_tokens: int = 4096
    prefill_tokens: int = 64
    groups: list[Group] = field(default_factory=list)
    ended: dict[int, int] = field(default_factory=dict)
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.line = Line(self.kv_tokens)
        self.slots = Slots(self.num_slots, kv_tokens=self.kv_tokens, memory=self.line)

    def held(self, tenant: str) -> int:
        return sum(len(one.running) for one in self.groups if one.tenant == tenant)

    def step(self) -> None:
        self.num_steps += 1
        able = self.slots.arrange(self.groups)
        self.check()
        assert sorted(one.age for one in able) == [
            one.age for each in self.groups for one in sorted(each.running, key=lambda one: one.age) if not one.outgrown
        ]
        assert able or not self.groups, "nobody can go on"
        reading = [one for one in able if not one.group.begun or one.num_held + 1 < one.num_known]
        shares = prefill_shares([one.num_known - one.num_held for one in reading], self.prefill_tokens)
        for one, share in [*zip(reading, shares, strict=True), *((one, 1) for one in able if one not in reading)]:
            self.read(one, share)

    def check(self) -> None:
        running = [one for each in self.groups for one in each.running]
        assert len(running) <= self.num_slots
        stretches = sorted((one.place.start, one.place.start + one.place.length) for one in running)
        assert all(stop <= start for (_, stop), (start, _) in pairwise(stretches))
        assert all(stop <= self.kv_tokens for _, stop in stretches)

    def read(self, one, num_tokens: int) -> None:
        start = one.place.start + one.num_held
        self.line.cells[start : start + num_tokens] = one.known(one.num_held, one.num_held + num_tokens)
        one.num_held += num_tokens
        self.slots.charge(one.group.tenant, num_tokens)
        if one.num_held < one.num_known:
            return
        whole = list(one.known(0, one.num_known))
        assert self.line.cells[one.place.start : one.place.start + len(whole)] == whole
        each = one.group
        if each.begun:
            one.push(Token(drawn(each.arrival, one.index, len(one.tokens)), -1.0))
        else:
            each.begin([Token(drawn(each.arrival, index, 0), -1.0) for index in range(each.request.num_samples)])
        if one.stop_reason:
            self.slots.end(one)
        if each.done:
            self.slots.drop(each)
            self.groups.remove(each)
            self.ended[each.arrival] = self.num_steps

    def run(self, groups: list[Group], *, most_steps: int) -> None:
        for one in groups:
            wanted = alone(one)
            self.groups.append(one)
            one.wanted = wanted
        while self.groups:
            self.step()
            assert self.num_steps < most_steps, "somebody starves"
        for one in groups:
            assert [list(each.tokens) for each in one.result().sequences] == one.wanted
        assert not any(self.line.cells), "something was left in the cache"
        self.slots.arrange([group("a", 0, prompt=self.kv_tokens, max_tokens=1)])
        assert self.slots._running, "some room was lost"


def test_a_place_is_the_power_of_two_above_what_is_asked_and_the_lowest():
    places = Places(1024)
    taken = [places.take(pool_of(num_tokens)) for num_tokens in (1, 64, 65, 200, 128)]
    assert taken == [Place(0, 0), Place(0, 1), Place(1, 1), Place(2, 1), Place(1, 4)]


def test_a_place_grows_into_its_free_other_half_and_elsewhere_when_that_is_taken():
    places = Places(512)
    first, second = places.take(0), places.take(0)
    assert (second, places.grow(second)) == (Place(0, 1), Place(1, 1))
    places.give(second)
    assert places.grow(first) == Place(1, 0)
    assert places.grow(Place(1, 0)) == Place(2, 1)


@given(st.lists(st.tuples(st.sampled_from(["take", "give", "grow"]), st.integers(1, 600)), max_size=80))
def test_places_in_use_never_overlap_and_all_room_comes_back(steps):
    places, held = Places(1024), []
    for what, number in steps:
        at = number % len(held) if held else 0
        if what == "take" and (place := places.take(pool_of(number))) is not None:
            assert place.length >= number
            held.append(place)
        elif what == "give" and held:
            places.give(held.pop(at))
        elif what == "grow" and held and (place := places.grow(held[at])) is not None:
            if place != held[at].whole:
                held.append(held[at])
            held[at] = place
        used = [position for place in held for position in range(place.start, place.start + place.length)]
        assert len(used) == len(set(used)) and max(used, default=0) < 1024
    for place in held:
        places.give(place)
    assert places.take(pool_of(1024)) == Place(4, 0)


@st.composite
def scenarios(draw) -> tuple[World, list[Group]]:
    kv_tokens = draw(st.sampled_from([512, 1024, 2048]))
    world = World(draw(st.integers(1, 6)), kv_tokens, draw(st.sampled_from([16, 64, 512])))
    groups = []
    for arrival in range(draw(st.integers(1, 8))):
        prompt = draw(st.integers(1, kv_tokens // 2))
        most = kv_tokens - prompt + 1
        groups.append(
            group(
                draw(st.sampled_from("abc")), arrival, prompt=prompt, num_samples=draw(st.integers(1, 5)),
                max_tokens=draw(st.one_of(st.integers(1, 40), st.integers(1, most), st.just(most))),
            )
        )  # fmt: skip
    return world, groups


@settings(max_examples=60, deadline=None)
@given(scenarios())
def test_whoever_gives_way_every_request_ends_with_the_tokens_it_draws_alone_and_nobody_starves(scenario):
    world, groups = scenario
    work = sum(
        one.request.num_samples * (one.request.max_new + 2 + 4 * len(one.request.prompt) / world.prefill_tokens)
        for one in groups
    )
    world.run(groups, most_steps=int(2 * work) + 100)


@given(st.integers(2, 8), st.sampled_from([1024, 4096]), st.integers(0, 700), st.integers(1, 60))
@settings(max_examples=30, deadline=None)
def test_a_newcomer_draws_in_its_first_step_however_many_sequences_another_has(num_slots, kv_tokens, before, prompt):
    world = World(num_slots, kv_tokens)
    world.groups += [group("a", 0, num_samples=1000, max_tokens=900), group("a", 1, num_samples=9, max_tokens=900)]
    for _ in range(before):
        world.step()
    several = world.held("a") > 1
    world.groups.append(group("b", 2, prompt=prompt, max_tokens=40))
    if several:
        world.step()
        assert world.groups[-1].begun or 2 in world.ended


def test_two_tenants_with_many_sequences_have_half_of_the_slots_each_at_once():
    world = World(8)
    world.groups.append(group("a", 0, num_samples=100, max_tokens=300))
    for _ in range(20):
        world.step()
    world.groups.append(group("b", 1, num_samples=100, max_tokens=300))
    for _ in range(3):
        world.step()
    assert (world.held("a"), world.held("b")) == (4, 4)


def test_tenants_who_share_one_slot_take_turns_by_what_they_had_of_it():
    world = World(1)
    world.groups += [group("a", i, max_tokens=100) for i in range(0, 40, 2)]
    world.groups += [group("b", i, max_tokens=100) for i in range(1, 40, 2)]
    for _ in range(2500):
        world.step()
    ends = [sum(arrival % 2 == rest for arrival in world.ended) for rest in (0, 1)]
    assert sum(ends) > 20 and abs(ends[0] - ends[1]) <= 10_000 / 100


def test_a_request_of_a_tenant_comes_before_the_waiting_sequences_of_its_own_running_one():
    world = World(2)
    world.groups.append(group("a", 0, num_samples=4, max_tokens=20))
    world.step()
    world.groups.append(group("a", 1))
    world.step()
    assert [len(one.running) for one in world.groups] == [1, 1]


def test_a_sequence_begins_small_though_it_may_become_long_so_that_many_run_at_once():
    world = World(16, kv_tokens=8192)
    world.groups += [group("a", i, prompt=20, max_tokens=8000) for i in range(16)]
    world.slots.arrange(world.groups)
    assert [len(one.running) for one in world.groups] == [1] * 16


def test_small_requests_pass_a_big_one_that_finds_no_place_but_only_for_a_while():
    world = World(8, kv_tokens=1024)
    world.groups += [group("a", i, prompt=3, max_tokens=400) for i in range(4)]
    world.step()
    big = group("a", 4, prompt=600, max_tokens=50)
    world.groups.append(big)
    for arrival in range(5, 600):
        if not big.running:
            world.groups.append(group("a", arrival, max_tokens=5 + arrival % 7))
        world.step()
    passed = [arrival for arrival in world.ended if 4 < arrival < 5 + PATIENCE]
    assert big.running or 4 in world.ended
    assert len(passed) > 10


def growers(*sizes: tuple[str, int, int]) -> list[Group]:
    """Requests of a tenant, with a prompt and a number of tokens that they do draw."""
    arrivals, found = iter(range(10_000)), []
    for tenant, prompt, num_tokens in sizes:
        requests = (group(tenant, arrival, prompt=prompt, max_tokens=num_tokens) for arrival in arrivals)
        found.append(next(one for one in requests if len(alone(one)[0]) == num_tokens))
    return found


def test_who_waits_in_vain_for_a_longer_place_gives_up_its_own():
    world = World(4, kv_tokens=2048, prefill_tokens=2048)
    world.groups += growers(("a", 500, 500), ("a", 3, 500), ("a", 250, 600))
    for _ in range(262 + PATIENCE):
        world.step()
    assert [one.running[0].outgrown for one in world.groups] == [False, False, True]
    for _ in range(3):
        world.step()
    assert [len(one.running) for one in world.groups] == [1, 1, 0]


def test_when_all_have_outgrown_their_places_the_youngest_gives_way():
    world = World(4, kv_tokens=2048, prefill_tokens=2048)
    world.run(growers(("a", 768, 400), ("a", 256, 400), ("b", 256, 400)), most_steps=2000)


def test_a_place_that_was_left_for_a_longer_one_elsewhere_is_free_again():
    world = World(4, kv_tokens=4096)
    world.run(growers(("a", 3, 700), ("a", 3, 700)), most_steps=2000)


def test_the_last_of_a_group_hands_its_prompt_on():
    world = World(1, prefill_tokens=8)
    one = group("a", 0, prompt=40, num_samples=3, max_tokens=2)
    world.run([one], most_steps=100)
    assert world.num_steps == 5 + sum(len(tokens) - 1 for tokens in alone(one))


def test_a_tenant_with_one_slot_gives_it_up_between_two_of_its_sequences():
    world = World(1)
    world.groups.append(group("a", 0, num_samples=50, max_tokens=10))
    world.step()
    world.groups.append(group("b", 1, max_tokens=3))
    for _ in range(16):
        world.step()
    assert 1 in world.ended


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
