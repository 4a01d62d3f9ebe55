"""Recipes of tinker-cookbook 0.6.1, unmodified and offline, against the running service: to the end, and they learn.

The cookbook has an environment of its own (`make test-cookbook`). It finds tokenizer and data by relative paths, and
it must know the base model's name: the service serves a small model of ours (`base`) under one that it knows.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import mean

import pytest

from tests.cookbook.base import BATCHES, GROUPS, make_base
from tests.stack.conftest import Service

pytestmark = [pytest.mark.cookbook, pytest.mark.timeout(600)]

PYTHON = Path(__file__).parents[2] / ".venv-cookbook" / "bin" / "python"
MODEL = "Qwen/Qwen3-8B-Base"

INTACT = """
import base64, hashlib, importlib.metadata as metadata
files = [file for file in metadata.files("tinker-cookbook") if file.suffix == ".py"]
for file in files:
    digest = hashlib.sha256(file.read_binary()).digest()
    assert file.hash.value == base64.urlsafe_b64encode(digest).rstrip(b"=").decode(), file
print(metadata.version("tinker-cookbook"), len(files), metadata.distribution("tinker-cookbook").locate_file(""))
"""

TOOLS = {
    "hammer": "drive a nail", "saw": "cut a board", "plane": "smooth a plank", "level": "find out what is straight",
    "chisel": "carve a joint", "clamp": "hold two parts together", "file": "take off a sharp edge",
    "drill": "make a round hole",
}  # fmt: skip
ASKED = ("What is a {} for?", "Why would I need a {}?", "Tell me about the {}.", "When do I take a {}?")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a base model, and a data set in the form of no_robots."""
    folder = tmp_path_factory.mktemp("cookbook")
    make_base(folder / MODEL)
    rows = [_row(index, tool, asked) for index, (tool, asked) in enumerate(itertools.product(TOOLS, ASKED))]
    for split, chosen in (("train", rows * 4), ("test", rows[:8])):
        path = folder / "HuggingFaceH4" / "no_robots" / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")
    return folder


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


def cookbook(workplace: Path, *words: str, base_url: str = "") -> str:
    """Run the cookbook's Python without the way to any hub; return what it printed."""
    env = {
        "PATH": os.environ["PATH"], "HOME": str(workplace), "HF_HOME": str(workplace / ".hub"), "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TINKER_TELEMETRY": "0",
        "TINKER_API_KEY": "tml-local", "TINKER_BASE_URL": base_url,
    }  # fmt: skip
    done = subprocess.run([PYTHON, *words], cwd=workplace, env=env, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def run(service: Service, workplace: Path, recipe: str, *options: str) -> list[dict[str, float]]:
    """Run a recipe to its end; return its own metrics, one row a step."""
    log = workplace / "logs" / recipe
    module = f"tinker_cookbook.recipes.{recipe}"
    given = (f"model_name={MODEL}", f"log_path={log}", *options)
    cookbook(workplace, "-m", module, *given, base_url=service.base_url)
    saved = [json.loads(line) for line in (log / "checkpoints.jsonl").read_text().splitlines()]
    assert saved[-1]["name"] == "final"
    listed = service.http().get("/checkpoints", params={"limit": 1000}).json()["checkpoints"]
    assert saved[-1]["state_path"] in {checkpoint["tinker_path"] for checkpoint in listed}
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def series(rows: list[dict[str, float]], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


@pytest.fixture(scope="module")
def installed(workplace: Path) -> Path:
    """Where the cookbook is, after a look that every file is as published."""
    assert PYTHON.is_file(), "there is no environment for the cookbook: make test-cookbook"
    version, num_files, where = cookbook(workplace, "-c", INTACT).split()
    assert version == "0.6.1" and int(num_files) > 100
    return Path(where)


def test_sl_loop_learns_its_data_set(service: Service, workplace: Path, installed: Path) -> None:
    rows = run(service, workplace, "sl_loop", "batch_size=8", "learning_rate=3e-3", "lora_rank=16", "save_every=10")
    loss = series(rows, "train_mean_nll")
    assert len(loss) == 16
    # From the second step on: the first one mostly learns which letters there are.
    assert loss[-1] < 0.75 * loss[1], loss


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
