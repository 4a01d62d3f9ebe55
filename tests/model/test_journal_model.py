"""Journal, leases and snapshots against the orders of events that hypothesis thinks of (docs/recovery.md).

The short form has few examples, always the same. The long forms (`make test-full`) draw new ones each time, and show
that the machine finds what it is there to find.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase
from hypothesis.stateful import run_state_machine_as_test

from openrl.tasks.errors import StoreFault
from tests.conftest import QUICK_OPTIONS, store_server
from tests.model.damages import DAMAGES
from tests.model.machine import Machine
from tests.model.world import Damage

COMMON = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
SHORT = hypothesis.settings(**COMMON, max_examples=24, stateful_step_count=30, derandomize=True)
LONG = hypothesis.settings(**COMMON, max_examples=200, stateful_step_count=50, print_blob=True)
FIND = hypothesis.settings(
    **COMMON, max_examples=300, stateful_step_count=40, derandomize=True, phases=[Phase.generate],
    report_multiple_bugs=False,
)  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """A store of this module's own: what power cuts do to one is tested elsewhere."""
    with store_server(QUICK_OPTIONS) as url:
        yield url


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Keep the log of thousands of lost leases out of a failure's report."""
    caplog.set_level(logging.CRITICAL)


def machine(server: str, directory: Path, damage: Damage | None = None) -> type[Machine]:
    """Return the machine on a server, with the scripts as they are or damaged."""
    (directory / "data").mkdir()
    return type("Journal", (Machine,), {"url": server, "directory": directory / "data", "damage": damage or {}})


def test_no_order_of_events_loses_or_doubles_an_operation(server: str, tmp_path: Path) -> None:
    run_state_machine_as_test(machine(server, tmp_path), settings=SHORT)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_of_many_orders_of_events_none_loses_or_doubles_an_operation(server: str, tmp_path: Path) -> None:
    run_state_machine_as_test(machine(server, tmp_path), settings=LONG)


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("damage", DAMAGES)
def test_whichever_rule_a_script_forgets_an_order_of_events_is_found_that_shows_it(
    server: str, tmp_path: Path, damage: str
) -> None:
    with pytest.raises((AssertionError, StoreFault)):
        run_state_machine_as_test(machine(server, tmp_path, DAMAGES[damage]), settings=FIND)
