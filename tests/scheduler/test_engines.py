"""Which engine draws samples is settled before anything starts."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from openrl.scheduler import engines
from openrl.tasks.registry import BaseModel
from openrl.workers.sampler.settings import MOST_VLLM_HEAD

MODEL = BaseModel(
    name="m", slug="m", path="/m", vocab_size=260, max_context=512, arch="llama", tokenizer_id="m", hidden_size=64,
    num_layers=2, tied_embeddings=True,
)  # fmt: skip


def interpreter(directory: Path, answer: str, *, status: int = 0) -> str:
    """Write a program that answers as a Python would."""
    path = directory / "python"
    path.write_text(f"#!/bin/sh\necho '{answer}'\nexit {status}\n")
    path.chmod(0o755)
    return str(path)


def choose(wanted: str, python: str = "", *, has_gpu: bool = False) -> engines.Engine:
    return engines.choose(wanted, python, own_python=sys.executable, has_gpu=has_gpu)


def answer(*, openrl: int = engines.DATA, vllm: bool = True, torch: bool = True) -> str:
    return f'{{"openrl": {openrl}, "vllm": {str(vllm).lower()}, "torch": {str(torch).lower()}}}'


@pytest.mark.parametrize(
    ("wanted", "has_gpu", "vllm", "expected"),
    [
        ("torch", True, True, "torch"),
        ("vllm", False, True, "vllm"),
        ("auto", True, True, "vllm"),
        ("auto", True, False, "torch"),
        ("auto", False, True, "torch"),
    ],
)
def test_auto_means_vllm_where_there_is_a_gpu_and_vllm(tmp_path, wanted, has_gpu, vllm, expected):
    python = interpreter(tmp_path, answer(vllm=vllm))
    assert choose(wanted, python, has_gpu=has_gpu) == engines.Engine(name=expected, python=python)


def test_an_interpreter_is_asked_for_real():
    assert choose("auto") == engines.Engine(name="torch", python=sys.executable)
    assert choose("auto", sys.executable, has_gpu=False).python == sys.executable
    with pytest.raises(engines.WrongEngine, match=r"--sampler vllm: .* has no vLLM"):
        choose("vllm")


def test_an_interpreter_that_cannot_serve_is_refused_by_name(tmp_path):
    with pytest.raises(engines.WrongEngine, match=r"--sampler-python /nowhere: there is no such file"):
        choose("auto", "/nowhere")
    with pytest.raises(engines.WrongEngine, match="it has no OpenRL"):
        choose("auto", interpreter(tmp_path, answer(openrl=0)))
    with pytest.raises(engines.WrongEngine, match="another version of OpenRL"):
        choose("auto", interpreter(tmp_path, answer(openrl=99)))
    with pytest.raises(engines.WrongEngine, match="neither torch nor vLLM"):
        choose("auto", interpreter(tmp_path, answer(vllm=False, torch=False)))
    with pytest.raises(engines.WrongEngine, match="doesn't work as a Python interpreter"):
        choose("auto", interpreter(tmp_path, "hello"))
    with pytest.raises(engines.WrongEngine, match="doesn't work as a Python interpreter"):
        choose("auto", interpreter(tmp_path, answer(), status=3))


def test_full_runs_on_vllm_need_a_gpu(tmp_path):
    python = interpreter(tmp_path, answer())
    ask = {"own_python": sys.executable, "full": True}
    assert engines.choose("vllm", python, has_gpu=True, **ask).full
    for wanted, has_gpu in (("vllm", False), ("torch", True)):
        with pytest.raises(engines.WrongEngine, match="OPENRL_SAMPLER_FULL_ENGINE=vllm needs"):
            engines.choose(wanted, python, has_gpu=has_gpu, **ask)


def test_a_base_model_says_which_adapters_its_samplers_serve():
    vllm, torch = (engines.Engine(name=name, python="p") for name in ("vllm", "torch"))
    environ = {"OPENRL_SAMPLER_MAX_LORA_RANK": "32"}
    [found] = engines.as_served([MODEL], vllm, environ)
    assert (found.sampler_rank, found.sampler_head) == (32, True)
    [found] = engines.as_served([replace(MODEL, vocab_size=MOST_VLLM_HEAD + 1)], vllm, environ)
    assert (found.sampler_rank, found.sampler_head) == (32, False)
    qwen = replace(MODEL, arch="qwen2")
    [found] = engines.as_served([qwen], vllm, environ)
    assert not found.sampler_head, "vLLM's class for it takes no adapters there"
    assert engines.as_served([MODEL, qwen], torch, environ) == [MODEL, qwen]
