"""Recipes of tinker-cookbook 0.6.1, unmodified and offline, against the running service: to the end, and they learn.

The cookbook has an environment of its own (`make test-cookbook`). It finds tokenizer and data by relative paths, and
it must know the base model's name: the service serves a small model of ours (`base`) under one that it knows.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.cookbook.base import BATCHES, GROUPS, Asking, make_base, problems
from tests.stack.conftest import Service

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(600)]

PYTHON = Path(__file__).parents[2] / ".venv-cookbook" / "bin" / "python"
MODEL = "Qwen/Qwen3-8B-Base"

SL_BATCH, SL_STEPS = 128, 4
"""sl_basic has a fixed batch size."""

INTACT = """
import base64, hashlib, importlib.metadata as metadata
files = [file for file in metadata.files("tinker-cookbook") if file.suffix == ".py"]
for file in files:
    digest = hashlib.sha256(file.read_binary()).digest()
    assert file.hash.value == base64.urlsafe_b64encode(digest).rstrip(b"=").decode(), file
print(metadata.version("tinker-cookbook"), len(files), metadata.distribution("tinker-cookbook").locate_file(""))
"""

ASKING = """
import json
from tinker_cookbook.recipes.math_rl.math_env import Gsm8kDataset, MathEnv
question, answer = MathEnv.standard_fewshot_prefix()
suffixes = [MathEnv.question_suffix(), Gsm8kDataset.question_suffix()]
question = question["content"].removesuffix(suffixes[0])
print(json.dumps({"question": question, "answer": answer["content"], "suffixes": suffixes}))
"""

GSM8K = """---
configs:
- config_name: main
  data_files:
  - {split: train, path: train.jsonl}
  - {split: test, path: test.jsonl}
---
"""

TOOLS = {
    "hammer": "drive a nail", "saw": "cut a board", "plane": "smooth a plank", "level": "find out what is straight",
    "chisel": "carve a joint", "clamp": "hold two parts together", "file": "take off a sharp edge",
    "drill": "make a round hole",
}  # fmt: skip
ASKED = ("What is a {} for?", "Why would I need a {}?", "Tell me about the {}.", "When do I take a {}?")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base model, and data sets of ours in the forms of no_robots and gsm8k."""
    assert PYTHON.is_file(), "there is no environment for the cookbook: make test-cookbook"
    folder = tmp_path_factory.mktemp("cookbook")
    asking = json.loads(cookbook(folder, "-c", ASKING))
    make_base(folder / MODEL, Asking(**asking | {"suffixes": tuple(asking["suffixes"])}))
    rows = [_row(index, tool, asked) for index, (tool, asked) in enumerate(itertools.product(TOOLS, ASKED))]
    _write(folder / "HuggingFaceH4" / "no_robots", train=rows * (SL_STEPS * SL_BATCH // len(rows)), test=rows * 4)
    problems_ = [_problem(one, other) for one, other in problems()]
    _write(folder / "openai" / "gsm8k", train=problems_ * 4, test=problems_)
    (folder / "openai" / "gsm8k" / "README.md").write_text(GSM8K, encoding="utf-8")
    return folder


def _write(folder: Path, **splits: list[dict[str, object]]) -> None:
    folder.mkdir(parents=True)
    for split, rows in splits.items():
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text, encoding="utf-8")


@pytest.fixture(scope="module")
def service(workplace: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """`openrl up` on that model."""
    running = Service(tmp_path_factory.mktemp("service"), workplace / MODEL, MODEL).start()
    yield running
    status = running.stop()
    running.close()
    assert status == 0


def _row(index: int, tool: str, asked: str) -> dict[str, object]:
    question, answer = asked.format(tool), f"You use a {tool} to {TOOLS[tool]}. Put it back when you are done."
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"prompt": question, "prompt_id": str(index), "messages": messages, "category": "Open QA"}


def _problem(one: int, other: int) -> dict[str, object]:
    return {"question": f"What is {one} + {other}?", "answer": f"{one} and {other} make it.\n#### {one + other}"}


def cookbook(workplace: Path, *words: str, base_url: str = "") -> str:
    """Run the cookbook's Python to its end; return what it printed."""
    done = subprocess.run(
        [PYTHON, *words], cwd=workplace, env=_environ(workplace, base_url), capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def _environ(workplace: Path, base_url: str) -> dict[str, str]:
    """No way leads from here to any hub."""
    return {
        "PATH": os.environ["PATH"], "HOME": str(workplace), "HF_HOME": str(workplace / ".hub"), "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TINKER_TELEMETRY": "0",
        "TINKER_API_KEY": "tml-local", "TINKER_BASE_URL": base_url,
    }  # fmt: skip


def words_of(recipe: str, log: Path, *options: str) -> list[str]:
    return ["-m", f"tinker_cookbook.recipes.{recipe}", f"model_name={MODEL}", f"log_path={log}", *options]


def run(service: Service, workplace: Path, recipe: str, *options: str) -> list[dict[str, float]]:
    """Run a recipe to its end; return its own metrics, one row a step."""
    log = workplace / "logs" / recipe
    cookbook(workplace, *words_of(recipe, log, *options), base_url=service.base_url)
    return ended(service, log)


def ended(service: Service, log: Path) -> list[dict[str, float]]:
    """Return a recipe's metrics after a look that its final checkpoint is there."""
    saved = rows_of(log / "checkpoints.jsonl")
    assert saved[-1]["name"] == "final"
    listed = service.http().get("/checkpoints", params={"limit": 1000}).json()["checkpoints"]
    assert saved[-1]["state_path"] in {checkpoint["tinker_path"] for checkpoint in listed}
    return rows_of(log / "metrics.jsonl")


def rows_of(path: Path) -> list[dict[str, Any]]:
    """Return what is whole of a JSONL file that may be written to, or not be there yet."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def series(rows: list[dict[str, float]], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


@pytest.fixture(scope="module")
def installed(workplace: Path) -> Path:
    """Where the cookbook is, after a look that every file is as published."""
    version, num_files, where = cookbook(workplace, "-c", INTACT).split()
    assert version == "0.6.1" and int(num_files) > 100
    return Path(where)


def test_sl_loop_learns_its_data_set(service: Service, workplace: Path, installed: Path) -> None:
    options = ("batch_size=8", "max_steps=16", "learning_rate=3e-3", "lora_rank=16", "save_every=10")
    rows = run(service, workplace, "sl_loop", *options)
    loss = series(rows, "train_mean_nll")
    assert len(loss) == 16
    # From the second step on: the first one mostly learns which letters there are.
    assert loss[-1] < 0.75 * loss[1], loss


def test_sl_loop_goes_on_after_it_and_the_service_were_killed(workplace: Path, installed: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = ("batch_size=8", "max_steps=20", "learning_rate=3e-3", "lora_rank=16", "save_every=4")
    words = words_of("sl_loop", log, *options)
    service = Service(tmp_path / "service", workplace / MODEL, MODEL).start()
    try:
        with subprocess.Popen(
            [PYTHON, *words], cwd=workplace, env=_environ(workplace, service.base_url), stderr=subprocess.DEVNULL
        ) as recipe:
            while len(rows_of(log / "metrics.jsonl")) < 10:
                assert recipe.poll() is None
                time.sleep(0.02)
            recipe.kill()
        service.stop(signal.SIGKILL)
        before = rows_of(log / "metrics.jsonl")
        saved = rows_of(log / "checkpoints.jsonl")[-1]["batch"]
        assert 8 <= saved <= len(before) < 20
        service.start()
        cookbook(workplace, *words, base_url=service.base_url)
        after = ended(service, log)[len(before) :]
        assert service.stop() == 0
    finally:
        service.close()
    num_batches = SL_BATCH * SL_STEPS / 8
    assert [row["progress"] * num_batches for row in before] == list(range(len(before)))
    assert [row["progress"] * num_batches for row in after] == list(range(saved, 20))
    assert [row["step"] for row in after] == list(range(saved + 1, 21)), "the optimizer counts on"
    # What was done twice came out the same: weights and moments are those of the checkpoint.
    twice = [
        (one["train_mean_nll"], other["train_mean_nll"]) for one, other in zip(before[saved:], after, strict=False)
    ]
    assert twice and all(one == pytest.approx(other, rel=1e-5) for one, other in twice), twice
    assert after[-1]["train_mean_nll"] < before[1]["train_mean_nll"]


def test_sl_basic_learns_and_its_test_split_shows_it(service: Service, workplace: Path, installed: Path) -> None:
    options = (f"max_steps={SL_STEPS}", "learning_rate=5e-3", "lora_rank=16", "eval_every=2")
    rows = run(service, workplace, "sl_basic", *options)
    train, test = series(rows, "train_mean_nll"), series(rows, "test/nll")
    assert len(train) == SL_STEPS and len(test) >= 2
    assert train[-1] < train[0] and test[-1] < test[0], (train, test)


def test_chat_sl_learns_the_wheels_own_conversations(service: Service, workplace: Path, installed: Path) -> None:
    conversations = installed / "tinker_cookbook" / "example_data" / "conversations.jsonl"
    options = (f"dataset={conversations}", "batch_size=32", "num_epochs=4", "learning_rate=3e-3", "lora_rank=16")
    rows = run(service, workplace, "chat_sl.train", *options)
    loss = series(rows, "train_mean_nll")
    assert len(loss) == 16
    # An epoch reads each conversation once, so that epochs can be compared whatever is in a batch.
    assert mean(loss[-4:]) < 0.85 * mean(loss[4:8]) and mean(loss[4:8]) < mean(loss[:4]), loss


def test_math_rl_raises_its_reward(service: Service, workplace: Path, installed: Path) -> None:
    options = (
        "env=arithmetic", "loss_fn=importance_sampling", f"groups_per_batch={GROUPS}", f"max_steps={BATCHES}",
        "group_size=16", "max_tokens=8", "learning_rate=2e-3", "lora_rank=16",
    )  # fmt: skip
    rows = run(service, workplace, "math_rl.train", *options)
    reward, correct = series(rows, "env/all/reward/total"), series(rows, "env/all/correct")
    assert len(reward) == BATCHES
    assert mean(reward[-4:]) > mean(reward[:3]) + 0.1, reward
    assert mean(correct[-4:]) > mean(correct[:3]) + 0.1, correct


def test_rl_loop_raises_its_reward(service: Service, workplace: Path, installed: Path) -> None:
    options = (
        "loss_fn=importance_sampling", "batch_size=8", "group_size=16", "max_tokens=8", "learning_rate=2e-3",
        "lora_rank=16",
    )  # fmt: skip
    rows = run(service, workplace, "rl_loop", *options)
    reward = series(rows, "reward/total")
    assert len(reward) == 8
    assert len(series(rows, "grad_norm")) == 8, "a step whose rewards are all the same trains nothing"
    assert mean(reward[-2:]) > mean(reward[:2]) + 0.1, reward


def test_rl_basic_raises_its_reward(service: Service, workplace: Path, installed: Path) -> None:
    options = ("num_epochs=4", "max_steps=4", "max_tokens=8", "learning_rate=3e-3", "lora_rank=16")
    rows = run(service, workplace, "rl_basic", *options)
    reward, correct = series(rows, "env/all/reward/total"), series(rows, "env/all/correct")
    assert len(reward) == 4
    assert reward[-1] > reward[0] + 0.1 and correct[-1] > correct[0], (reward, correct)
