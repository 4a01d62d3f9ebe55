"""The engines under test: torch wherever torch is, vLLM where it is and `make test-vllm` asks for it.

One engine of each kind runs a whole module of tests, as a service's does.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import pytest
import torch

from openrl.tasks.journal import SampleJob
from openrl.tasks.messages import Sample
from openrl.workers.sampler.engine import Runner
from openrl.workers.sampler.requests import Finished, Limits, Request, Result, read
from openrl.workers.sampler.settings import SamplerSettings
from tests.contract.bases import Base

PROMPT = tuple(b"the quick brown fox")
SLOTS, MAX_LORAS, MAX_RANK = 8, 4, 8

torch.set_num_threads(1)


class Serving:
    """A base model on one engine."""

    def __init__(self, base: Base, engine: str) -> None:
        self.base = base
        self.engine = engine
        self._numbers = itertools.count()
        self.settings = SamplerSettings(
            engine=engine, slots=SLOTS, kv_tokens=8192, prefill_tokens=64, max_loras=MAX_LORAS, max_lora_rank=MAX_RANK
        )
        self.runner, self.limits = self._start()

    def _start(self) -> tuple[Runner, Limits]:
        if self.engine == "vllm":
            from openrl.workers.sampler import vllm_runner

            return vllm_runner.runner(str(self.base.path), self.base.data_dir, self.settings)
        from openrl.workers.sampler import torch_runner

        return torch_runner.runner(str(self.base.path), self.base.data_dir, self.settings)

    def request(self, *, tenant: str = "local", heard=None, **fields) -> Request:
        given = {"adapter_dir": "", "prompt": PROMPT, "num_samples": 1, "max_tokens": 8, "seed": 1} | fields
        job = SampleJob(tenant=tenant, request_id=f"r{next(self._numbers)}", message=Sample(**given), submitted=0.0)
        request = read(job, self.limits)
        if heard is not None:
            object.__setattr__(request, "heard", heard)
        return request

    def run(self, *requests: Request) -> list[Finished]:
        """Run requests side by side; what they gave, in their order."""
        for one in requests:
            self.runner.add(one)
        ended: dict[str, Finished] = {}
        deadline = time.monotonic() + 120
        while len(ended) < len(requests):
            assert time.monotonic() < deadline, "the engine doesn't end"
            ended |= {one.request.job.request_id: one for one in self.runner.step()}
        assert not self.runner.requests
        return [ended[one.job.request_id] for one in requests]

    def draw(self, **fields) -> Result:
        """Run one request alone."""
        [ended] = self.run(self.request(**fields))
        assert ended.result is not None, ended.error
        return ended.result


ENGINES = ["torch", pytest.param("vllm", marks=pytest.mark.vllm)]


def _serving(tmp_path_factory, engine: str, *, tied: bool) -> Iterator[Serving]:
    served = Serving(Base(tmp_path_factory.mktemp("base"), tied=tied), engine)
    yield served
    if engine == "vllm":
        served.runner.close()


@pytest.fixture(scope="module", params=ENGINES)
def tied(request, tmp_path_factory) -> Iterator[Serving]:
    """A model whose unembedding is its embedding."""
    yield from _serving(tmp_path_factory, request.param, tied=True)


@pytest.fixture(scope="module", params=[pytest.param("torch", marks=pytest.mark.full), ENGINES[1]])
def untied(request, tmp_path_factory) -> Iterator[Serving]:
    """A model with an unembedding of its own."""
    yield from _serving(tmp_path_factory, request.param, tied=False)
