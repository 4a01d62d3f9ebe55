"""Which adapters are in a batch that holds few: of any number of tenants and adapters each gets on."""

import pytest

from openrl.workers.sampler.adapter_places import TURN_S, AdapterPlaces


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def of(tenant: str, count: int) -> list[tuple[str, str]]:
    return [(tenant, f"{tenant}/{number}") for number in range(count)]


def arranged(most: int, asked: list[tuple[str, str]]) -> tuple[AdapterPlaces, Clock]:
    clock = Clock()
    places = AdapterPlaces(most, clock=clock)
    places.arrange(asked)
    for _, name in asked:
        if name in places:
            places.loaded(name)
    return places, clock


def held(places: AdapterPlaces, asked: list[tuple[str, str]]) -> list[str]:
    return [name for _, name in asked if name in places]


def test_a_tenant_with_every_place_gives_one_to_a_newcomer_at_once_and_not_its_last():
    asked = of("a", 8)
    places, _ = arranged(8, asked)
    asked += of("b", 1)
    [lost] = places.arrange(asked)
    assert lost.startswith("a/") and lost not in places
    assert "b/0" in places
    assert places.arrange(asked) == []


def test_tenants_that_want_many_have_equally_many():
    asked = of("a", 8)
    places, _ = arranged(8, asked)
    asked += of("b", 8)
    places.arrange(asked)
    assert [name[0] for name in held(places, asked)] == ["a"] * 4 + ["b"] * 4


def test_nobody_loses_a_place_before_its_time_unless_to_a_poorer_tenant():
    asked = of("a", 3)
    places, clock = arranged(2, asked)
    clock.now = TURN_S - 0.1
    assert places.arrange(asked) == []


def test_what_is_being_loaded_keeps_its_place_however_long_that_takes():
    clock = Clock()
    places = AdapterPlaces(1, clock=clock)
    places.arrange(of("a", 2))
    clock.now = 100.0
    assert places.arrange(of("a", 2)) == []


@pytest.mark.parametrize("asked", [of("a", 9), [(f"t{n}", f"t{n}/0") for n in range(9)], of("a", 20) + of("b", 3)])
def test_of_more_adapters_than_places_each_gets_on(asked):
    clock = Clock()
    places = AdapterPlaces(4, clock=clock)
    had = dict.fromkeys((name for _, name in asked), 0)
    for _ in range(400):
        places.arrange(asked)
        for name in held(places, asked):
            places.loaded(name)
            had[name] += 1
        assert len(held(places, asked)) == 4
        clock.now += TURN_S / 2
    for tenant in {tenant for tenant, _ in asked}:
        times = [had[name] for owner, name in asked if owner == tenant]
        assert min(times) > 0.8 * max(times)


def test_a_place_is_free_once_nobody_asks_for_its_adapter():
    places, _ = arranged(1, of("a", 1))
    assert places.arrange(of("b", 1)) == []
    assert "b/0" in places and "a/0" not in places
