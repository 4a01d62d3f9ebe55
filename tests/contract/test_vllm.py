"""What only vLLM has: processes of its own, a cache of prompts, limits on adapters, and another reading of both."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from openrl.tasks.errors import InvalidRequest
from openrl.workers.sampler import scoring
from tests.contract.bases import Base
from tests.contract.conftest import MAX_RANK, PROMPT, Serving

pytestmark = pytest.mark.vllm

LONG = tuple(b"all happy families are alike; each unhappy family is unhappy in its own way. " * 4)
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    base = Base(tmp_path_factory.mktemp("base"), tied=True)
    # As Llama 3's: far more than the cache has.
    config = json.loads((base.path / "config.json").read_text())
    (base.path / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 131_072}))
    serving = Serving(base, "vllm")
    yield serving
    serving.runner.close()


def cached(served, **fields) -> int:
    """Run a request; return how many tokens of its prompt vLLM did not read again."""
    said = []
    runner = served.runner
    take = runner._take

    def listening(stream, one):
        said.append(one)
        return take(stream, one)

    runner._take = listening
    try:
        [ended] = served.run(served.request(prompt=LONG, max_tokens=2, **fields))
    finally:
        runner._take = take
    assert ended.result is not None, ended.error
    return next(one.num_cached_tokens for one in said if hasattr(one, "num_cached_tokens"))


def test_what_was_read_of_a_prompt_serves_its_tenant_and_version_and_nobody_else(served):
    versions = [served.base.save(f"cache{n}", n) for n in range(2)]
    assert cached(served, tenant="a") == 0
    assert cached(served, tenant="a") >= 128
    assert cached(served, tenant="b") == 0
    assert cached(served, tenant="a", adapter_dir=versions[0]) == 0
    assert cached(served, tenant="a", adapter_dir=versions[0]) >= 128
    assert cached(served, tenant="a", adapter_dir=versions[1]) == 0
    assert cached(served, tenant="a") >= 128


def test_a_context_that_is_longer_than_the_cache_is_cut_to_it(served):
    assert served.limits.max_context == served.limits.cache_tokens == served.settings.kv_tokens
    message = "need 8193 positions of the cache|the context"
    with pytest.raises(InvalidRequest, match=message):
        served.request(prompt=PROMPT * 500)


def test_a_long_prompt_is_read_in_steps_of_the_size_that_is_set(served):
    config = served.runner._client.vllm.vllm_config.scheduler_config
    assert config.max_num_batched_tokens == served.settings.prefill_tokens + served.settings.slots < len(LONG)


def test_logits_of_a_prompt_are_looked_at_in_slices_of_bounded_size():
    from openrl.workers.sampler.vllm_prompts import slices

    rows = []

    def logits_of(hidden):
        rows.append(len(hidden))
        return hidden.repeat(1, 2)

    vocab_size = scoring.LOGITS_BYTES // 4 // 3
    hidden = torch.arange(8, dtype=torch.bfloat16)[:, None]
    found = [(first, logits[:, 0].tolist()) for first, logits in slices(hidden, logits_of, vocab_size)]
    assert found == [(0, [0, 1, 2]), (3, [3, 4, 5]), (6, [6, 7])] and rows == [3, 3, 2]


def test_a_model_that_vllm_cannot_start_on_is_refused_in_one_line(served, tmp_path):
    from openrl.workers.sampler import vllm_runner

    broken = shutil.copytree(served.base.path, tmp_path / "broken")
    for file in broken.glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(InvalidRequest, match=r"vLLM doesn't start on .*broken here: ") as refused:
        vllm_runner.runner(str(broken), tmp_path, served.settings)
    assert "\n" not in str(refused.value)


def test_an_adapter_of_too_large_a_rank_fails_its_request_alone(served):
    large = served.base.save("large", 5, rank=2 * MAX_RANK)
    refused, good = served.run(served.request(adapter_dir=large), served.request(max_tokens=3))
    assert refused.result is None and "large' can't be loaded" in refused.error
    assert good.result is not None


def test_a_version_that_left_memory_is_read_again_under_another_name(served):
    version = served.base.save("again", 6)
    versions = served.runner._versions
    first = served.draw(adapter_dir=version, temperature=0.0)
    before = versions.acquire(version).result()
    versions.release(version)
    versions._drop(version)
    second = served.draw(adapter_dir=version, temperature=0.0)
    after = versions.acquire(version).result()
    versions.release(version)
    assert first.sequences[0].tokens == second.sequences[0].tokens
    assert before.lora_int_id != after.lora_int_id and before.lora_name != after.lora_name


def test_the_likeliest_tokens_are_the_same_where_answers_that_waited_were_merged(served):
    from vllm.logprobs import FlatLogprobs

    from openrl.workers.sampler.vllm_engine import _likeliest

    for drawn in (7, 5, 9):
        whole, merged = FlatLogprobs(), FlatLogprobs()
        values = {7: -0.5, 5: -1.0, 9: -3.0}
        whole.append_fast([drawn, 7, 5], [values[drawn], -0.5, -1.0], iter([0, 1, 2]), [None] * 3)
        merged.extend(whole)
        for found in (whole, merged):
            best = _likeliest(list(zip(found.token_ids, found.logprobs, strict=True)), 2)
            assert (best.tokens.tolist(), best.logprobs.tolist()) == ([[7, 5]], [[-0.5, -1.0]])


def test_a_step_that_waits_ends_when_it_is_woken(served):
    served.runner.add(served.request(max_tokens=400, stop_at_eos=False))
    served.runner.wake()
    served.runner.step()
    assert served.runner.drop(served.runner.requests)[0] >= 0


SCRIPT = """
import sys, time
from pathlib import Path
from openrl.workers.sampler import vllm_runner
from openrl.workers.sampler.settings import SamplerSettings
from openrl.workers.sampler.requests import read
from openrl.tasks.journal import SampleJob
from openrl.tasks.messages import Sample

if __name__ == "__main__":
    settings = SamplerSettings(engine="vllm", slots=4, kv_tokens=4096)
    engine, limits = vllm_runner.runner(sys.argv[1], Path(sys.argv[2]), settings)
    message = Sample(adapter_dir="", prompt=(1, 2, 3), num_samples=1, max_tokens=400, seed=1, stop_at_eos=False)
    engine.add(read(SampleJob(tenant="t", request_id="r", message=message, submitted=0.0), limits))
    engine.step()
    if "idle" in sys.argv:
        engine.drop(engine.requests)
    print("pids", *engine.pids, flush=True)
    while "idle" in sys.argv:
        time.sleep(1)
    while True:
        if not engine.requests:
            engine.add(read(SampleJob(tenant="t", request_id="r", message=message, submitted=0.0), limits))
        engine.step()
"""


REAPER = """
import ctypes, os, subprocess, sys

assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0  # PR_SET_CHILD_SUBREAPER: orphans come here, not to init
sampler = subprocess.Popen(sys.argv[1:])
print("sampler", sampler.pid, flush=True)
status = sampler.wait()
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
sys.exit(100 - status)
"""
"""As a service manager of a user's session is one, or a terminal multiplexer: nothing of ours may end it."""


@pytest.mark.parametrize(("victim", "at_work"), [("the sampler", True), ("vLLM", True), ("vLLM", False)])
def test_the_sampler_and_vllm_end_together_and_nobody_else_with_them(served, tmp_path, victim, at_work):
    script = tmp_path / "sampler.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable, "-c", REAPER,
        sys.executable, str(script), str(served.base.path), str(served.base.data_dir), *([] if at_work else ["idle"]),
    ]  # fmt: skip
    log = (tmp_path / "log").open("w")
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    )  # fmt: skip
    sampler = int(next(line for line in process.stdout if line.startswith("sampler")).split()[1])
    pids = next(line for line in process.stdout if line.startswith("pids")).split()[1:]
    children = [int(pid) for pid in pids]
    os.kill(sampler if victim == "the sampler" else children[0], signal.SIGKILL)
    status = 100 - process.wait(timeout=60)
    assert status == (-signal.SIGKILL if victim == "the sampler" else 1)
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children):
        assert time.monotonic() < deadline, "vLLM's processes outlive the sampler"
        time.sleep(0.05)


def test_devices_that_are_not_there_are_refused_before_vllm_starts(served):
    from openrl.tasks.errors import InvalidRequest
    from openrl.workers.sampler import vllm_runner
    from openrl.workers.sampler.settings import SamplerSettings

    settings = SamplerSettings(engine="vllm", tensor_parallel_size=64)
    with pytest.raises(InvalidRequest, match="OPENRL_SAMPLER_TENSOR_PARALLEL_SIZE is 64"):
        vllm_runner.runner(str(served.base.path), served.base.data_dir, settings)


def test_a_prompt_of_one_token_is_scored_too(served):
    assert served.draw(prompt=PROMPT[:1], prompt_logprobs=True, max_tokens=1).prompt_logprobs == [None]
