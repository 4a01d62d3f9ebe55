"""The chaos test in short: one seed, a handful of faults. `make chaos` is the long form."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path

import pytest

from tests.chaos import campaign, faults

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # the SDK's, of loading a state into a run that exists
]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the services of a campaign live; the SDK finds the tokenizer from here."""
    campaign.model_dir(tmp_path)
    monkeypatch.chdir(tmp_path / "models")
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def test_four_runs_lose_nothing_and_do_nothing_twice_whatever_is_killed(home: Path) -> None:
    part = campaign.embedded(home, seed=5, seconds=0.0, what=faults.SHORT, once=True, calm_apart=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()  # the SDK leaves sockets to the collector
    assert not part.verdict.differences, "\n".join([*part.verdict.differences, part.logs])
    assert (part.verdict.lost, part.verdict.doubled) == (0, 0)
    assert not part.never, part.skipped
    assert part.verdict.operations >= campaign.CLIENTS * 10
