"""Every public method of the installed SDK against the running service: each does what docs/compatibility.md says."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
import tinker

from tests.stack import compatibility
from tests.stack.probes import PROBES, REFUSALS, Lab, probed

pytestmark = [pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"), pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Lab]:
    with compatibility.serving(tmp_path_factory.mktemp("lab"), model_dir) as lab:
        yield lab


@pytest.mark.full
@pytest.mark.parametrize("method", compatibility.all_methods())
def test_a_method_of_the_sdk_does_what_its_page_says(lab: Lab, method: str) -> None:
    compatibility.check(lab, method)


@pytest.mark.full
@pytest.mark.parametrize("argument", REFUSALS)
def test_a_refused_argument_fails_at_once_and_says_what_to_do(lab: Lab, argument: str) -> None:
    call, words, _ = REFUSALS[argument]
    with pytest.raises(tinker.TinkerError, match=words):
        call(lab).result(20)


def test_every_method_of_the_installed_sdk_has_its_probe_and_every_probe_its_method() -> None:
    methods = compatibility.all_methods()
    assert {probed(method) for method in methods} == PROBES.keys() | compatibility.REFUSED.keys()
    assert all(inspect.getdoc(check) for check in PROBES.values())
    assert len(compatibility.REFUSED) <= 5 and all(compatibility.REFUSED.values())


def test_the_page_is_that_of_the_installed_sdk() -> None:
    assert compatibility.PAGE.read_text() == compatibility.page(version("tinker")), "run `make compatibility`"


def test_the_page_names_the_sdks_and_recipes_that_are_tested() -> None:
    tests = Path(__file__).parents[1]
    found = {path.stem.removeprefix("requirements-") for path in (tests / "sdks").glob("requirements-*.*.*.txt")}
    assert found == compatibility.SDKS.keys()
    recipes = "".join(path.read_text() for path in (tests / "cookbook").glob("*.py"))
    assert all(f'"{recipe}"' in recipes for recipe in compatibility.RECIPES)
