"""The scripts that measure the trainer's device code alone: they run on a CPU, and the memory bound holds."""

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
FIELDS = {"shape", "device", "name", "tokens", "seconds", "tok_s", "share_of_peak", "peak_bytes", "ratio", "adapters"}


def script(name: str, *args: str, monkeypatch) -> None:
    """Run a script in this process, as if it had been called so."""
    path = ROOT / name
    monkeypatch.setattr(sys, "argv", [str(path), *args])
    monkeypatch.setattr(sys, "path", [str(path.parent), *sys.path])
    runpy.run_path(str(path), run_name="__main__")


def test_the_gpu_script_runs_every_figure_on_a_cpu_with_a_tiny_shape(monkeypatch, capsys):
    torch.set_num_threads(1)
    script("benchmarks/gpu_trainer.py", "--shape", "tiny", "--device", "cpu", monkeypatch=monkeypatch)
    chip, *lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert chip["device"] == "cpu" and chip["matmul_tflops"] > 0 and chip["data_sheet_tflops"] is None
    assert [line["name"] for line in lines] == [
        "solo", "mixed8", "mixed8_grouped", "mixed8_loop", "small8_in_turn", "small8_mixed", "solo_checkpointed",
        "park_and_restore",
    ]  # fmt: skip
    assert [line["name"] for line in lines if line["adapters"] == "grouped"] == ["mixed8_grouped"]
    assert all(set(line) == FIELDS and line["seconds"] > 0 for line in lines)
    assert all(
        (line["ratio"] is None) is (line["name"] in ("solo", "small8_in_turn", "park_and_restore")) for line in lines
    )


def test_the_script_for_turns_parks_and_restores_every_state_on_a_cpu_with_a_tiny_shape(monkeypatch, capsys):
    torch.set_num_threads(1)
    script("benchmarks/gpu_turns.py", "--shape", "tiny", "--device", "cpu", monkeypatch=monkeypatch)
    link, *lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert link["out_gb_s"] > 0 and [line["state"] for line in lines] == ["full"] * 4 + ["lora"] * 4
    assert all(line["restore_gb_s"] > 0 for line in lines)
    # The first park copies everything, the others what has changed: of a LoRA trainer not the base.
    first, later = lines[4]["parked_bytes"], lines[5]["parked_bytes"]
    assert first == lines[4]["state_bytes"] > later > 0


def test_a_gpu_that_is_not_there_is_refused_with_what_to_do(monkeypatch, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(SystemExit):
        script("benchmarks/gpu_trainer.py", "--device", "cuda", monkeypatch=monkeypatch)
    assert "--shape tiny --device cpu" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.timeout(400)
def test_a_large_vocabulary_takes_little_more_memory_than_a_small_one_beside_its_embedding():
    def measured(vocab: int) -> dict:
        command = [sys.executable, ROOT / "benchmarks" / "memory.py", "--measure", str(vocab), "4", "1024"]
        return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)

    small, large = measured(8_192), measured(151_936)
    embedding = large["embedding_bytes"] - small["embedding_bytes"]
    assert large["peak_bytes"] - embedding <= 1.3 * small["peak_bytes"]


@pytest.mark.full
def test_the_experiment_with_mixed_runs_keeps_figures_and_a_plot(tmp_path):
    command = [sys.executable, ROOT / "experiments" / "mixed_curves.py", "--steps", "6", "--to", tmp_path]
    subprocess.run(command, check=True)
    *runs, passes = [json.loads(line) for line in (tmp_path / "mixed_curves.jsonl").read_text().splitlines()]
    assert [run["run"] for run in runs] == list(range(8)) and passes["runs_a_pass"] > 2
    assert max(run["gap"] for run in runs) < 1e-4
    assert (tmp_path / "mixed_curves.svg").read_text().startswith("<?xml")
