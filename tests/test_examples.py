"""The rules inside the examples, and what the demo claims. `make demo` runs the examples on a real model."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"openrl_examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("english", "pig_latin"),
    [
        ("good morning", "oodgay orningmay"),
        ("the apple", "ethay appleway"),
        ("string", "ingstray"),
        ("queen", "eenquay"),
        ("yellow sky", "ellowyay yskay"),
        ("hmm", "hmmway"),
    ],
)
def test_pig_latin_moves_the_consonants_that_open_a_word(english: str, pig_latin: str):
    assert example("pig_latin_sft").pig_latin(english) == pig_latin


@pytest.mark.parametrize(
    ("text", "stopped", "value"),
    [
        (" 12\n", True, 1.0),
        (" 11\n", True, 0.55),
        (" 99\n", True, 0.1),
        (" 12", False, 0.0),
        (" about 12\n", True, 0.0),
    ],
)
def test_only_a_number_alone_on_its_line_is_rewarded_and_the_right_one_most(text: str, stopped: bool, value: float):
    assert example("arithmetic_rl").reward(text, stopped, 12) == pytest.approx(value)


def test_the_demo_fails_when_nothing_was_learned_and_passes_when_it_was():
    demo = example("demo")
    flat = {"loss": [7.0] * 9, "before": {"a": "x"}, "after": {"a": "x"}}, {"reward": [0.1] * 9}
    learned = (
        {"loss": [7.0] * 5 + [0.1] * 5, "before": {"a": "x"}, "after": {"a": "xay"}},
        {"reward": [0.1] * 5 + [0.5] * 5},
    )
    assert not any(demo.claims(*flat).values())
    assert all(demo.claims(*learned).values())


@pytest.mark.parametrize("name", ["pig_latin_sft", "arithmetic_rl"])
def test_an_example_is_short(name: str):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 120
