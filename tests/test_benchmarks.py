"""The lines that `make bench` prints: the whole bench runs on next to nothing, and no time is looked at."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "benchmarks" / "bench.py"
FIELDS = {"name", "value", "unit", "baseline", "ratio", "runs", "spread"}
UNITS = {
    "pair_over_plain_ms": "ms",
    "train_tok_s": "tok/s",
    "train_tok_s_smol": "tok/s",
    "mixed8_tok_s": "tok/s",
    "mixed8_small": "tok/s",
    "mixed8_tok_s_smol": "tok/s",
    "sample64_tok_s": "tok/s",
    "sample_ragged": "tok/s",
    "sample16_tok_s_smol": "tok/s",
    "save_to_first_token_ms": "ms",
    "heartbeat_p99_ms": "ms",
    "snapshot_step_ratio": "x",
}


@pytest.fixture(scope="module")
def lines() -> list[dict]:
    process = subprocess.Popen(
        [sys.executable, BENCH, "--small"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        output, _ = process.communicate(timeout=150)
    finally:
        process.send_signal(signal.SIGTERM)  # the service that it started ends with it
        process.wait(30)
    assert process.returncode == 0
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.timeout(180)
def test_each_figure_is_one_line_with_exactly_the_promised_fields(lines: list[dict]):
    assert sorted(line["name"] for line in lines) == sorted(UNITS)
    for line in lines:
        assert set(line) == FIELDS
        assert line["unit"] == UNITS[line["name"]]


def test_a_ratio_is_given_where_the_target_is_one_and_nowhere_else(lines: list[dict]):
    for line in lines:
        if line["unit"] == "ms":
            assert line["ratio"] is None
        else:
            assert line["ratio"] == pytest.approx(line["value"] / line["baseline"], rel=2e-3)


def test_every_number_is_finite_and_says_how_often_it_was_measured(lines: list[dict]):
    for line in lines:
        assert line["runs"] == 1 and line["spread"] == 0.0
        assert line["baseline"] > 0
        assert line["name"] == "pair_over_plain_ms" or line["value"] > 0
