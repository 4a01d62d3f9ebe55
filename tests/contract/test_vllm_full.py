"""Full weights on vLLM: shared memory, its weight-update calls, versions by turns. All but a GPU's arithmetic."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from openrl.tasks.errors import InvalidRequest
from openrl.tasks.journal import SampleJob
from openrl.tasks.messages import Sample
from openrl.workers.sampler.requests import read
from openrl.workers.sampler.settings import SamplerSettings
from openrl.workers.weights import layout
from openrl.workers.weights.publish import Publisher
from tests.contract.bases import Base

pytestmark = pytest.mark.vllm

PROMPT = tuple(b"call me ishmael. some years ago - never mind how long precisely - having little or no money " * 3)
SETTINGS = SamplerSettings(
    engine="vllm", full_engine="vllm", slots=8, kv_tokens=8192, version_turn_s=0.2, version_drain_s=0.2
)


class Versions:
    """Published versions of a run, and transformers with the same weights."""

    def __init__(self, base: Base) -> None:
        self.base = base
        self.stock = AutoModelForCausalLM.from_pretrained(base.path, dtype=torch.float32).eval()
        self.tensors = {name: one.detach().clone() for name, one in self.stock.named_parameters()}
        self.home = layout.sampler_dir("local", "s-1:train:0", "v0", 1).rpartition("/")[0]
        (base.data_dir / self.home).mkdir(parents=True)
        self.publisher = Publisher(base.data_dir / self.home)
        self.kept: dict[str, dict[str, torch.Tensor]] = {}

    def publish(self, name: str) -> str:
        """Change some weights, and publish them."""
        generator = torch.Generator().manual_seed(len(self.kept))
        for tensor in self.tensors.values():
            tensor.mul_(torch.where(torch.rand(tensor.shape, generator=generator) < 0.03, 1.5, 1.0))
        self.publisher.publish(f"{name}.1", self.tensors, step=len(self.kept))
        directory = f"{self.home}/{name}.1"
        self.kept[directory] = {key: tensor.clone() for key, tensor in self.tensors.items()}
        return directory

    @torch.inference_mode()
    def logprobs(self, directory: str, tokens) -> torch.Tensor:
        """What each token but the first is worth under a version."""
        self.stock.load_state_dict(self.kept[directory], strict=False)
        logits_TV = self.stock(input_ids=torch.tensor([list(tokens)])).logits[0, :-1]
        return logits_TV.log_softmax(-1).gather(1, torch.tensor(list(tokens[1:]))[:, None])[:, 0]


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    """A sampler of a full run's versions on the CPU."""
    from openrl.workers.sampler import vllm_runner
    from openrl.workers.sampler.full_weights import Version
    from openrl.workers.sampler.rotation import Rotation
    from openrl.workers.sampler.switching import Switching
    from openrl.workers.sampler.tokenizer import tokenizer_of
    from openrl.workers.sampler.vllm_client import Client
    from openrl.workers.sampler.vllm_engine import VllmEngine
    from openrl.workers.sampler.vllm_weights import VllmWeights

    base = Base(tmp_path_factory.mktemp("base"), tied=True)
    config = json.loads((base.path / "config.json").read_text())
    arguments = vllm_runner.full_arguments(str(base.path), config, SETTINGS)
    client = Client(replace(arguments, worker_extension_cls="tests.contract.unpacked.Unpacked"))
    engine = VllmEngine(
        client,
        vllm_runner.Versions(vllm_runner._no_adapter, max_idle=0),
        tokenizer_of(str(base.path)),
        num_slots=8,
        places=vllm_runner.AdapterPlaces(1),
    )
    switching = Switching(
        engine,
        VllmWeights(client, base.path, base.data_dir),
        Rotation(turn_s=SETTINGS.version_turn_s, drain_s=SETTINGS.version_drain_s),
        Version,
    )
    yield switching, vllm_runner._limits(str(base.path), config, client), Versions(base)
    client.close()


def run(full, asked):
    """Run one request a version, side by side; their results in order."""
    switching, limits, _ = full
    for number, (directory, fields) in enumerate(asked):
        given = {"prompt": PROMPT, "num_samples": 1, "max_tokens": 8, "temperature": 0.0, "stop_at_eos": False}
        message = Sample(adapter_dir=directory, seed=1, **(given | fields))
        job = SampleJob(tenant="local", request_id=f"r{number}", message=message, submitted=0.0)
        switching.add(read(job, limits))
    ended = {}
    while switching.requests:
        ended |= {one.request.job.request_id: one for one in switching.step()}
    return [ended[f"r{number}"] for number in range(len(asked))]


def check(versions: Versions, directory: str, ended) -> None:
    assert ended.result is not None, ended.error
    [one] = ended.result.sequences
    expected_T = versions.logprobs(directory, [*PROMPT, *one.tokens])
    assert ended.result.prompt_logprobs[1:] == pytest.approx(expected_T[: len(PROMPT) - 1].tolist(), abs=2e-4)
    assert one.logprobs == pytest.approx(expected_T[len(PROMPT) - 1 :].tolist(), abs=2e-4)


def test_each_version_is_sampled_with_its_own_weights_in_whatever_order_they_are_asked_for(full):
    versions = full[2]
    first, second, third = (versions.publish(name) for name in ("v0", "v1", "v2"))
    apart = versions.logprobs(first, PROMPT) - versions.logprobs(third, PROMPT)
    assert float(apart.abs().mean()) > 0.05, "the versions differ too little"
    for order in ([first], [second, third], [third, first], [second]):
        asked = [(directory, {"prompt_logprobs": True}) for directory in order]
        for directory, ended in zip(order, run(full, asked), strict=True):
            check(versions, directory, ended)


def test_a_prompt_that_was_read_under_one_version_is_read_anew_under_the_next(full):
    versions = full[2]
    before, after = versions.publish("w0"), versions.publish("w1")
    for directory in (before, after, before):
        [ended] = run(full, [(directory, {})])
        one = ended.result.sequences[0]
        expected_T = versions.logprobs(directory, [*PROMPT, *one.tokens])[len(PROMPT) - 1 :]
        assert one.logprobs == pytest.approx(expected_T.tolist(), abs=2e-4)


def test_a_long_request_goes_on_to_the_same_tokens_after_other_versions_had_their_turns(full):
    versions = full[2]
    mine, other = versions.publish("x0"), versions.publish("x1")
    long = {"max_tokens": 120, "temperature": 1.0, "num_samples": 4}
    [alone] = run(full, [(mine, long)])
    both = run(full, [(mine, long), (other, {"max_tokens": 40})])
    assert [one.tokens for one in both[0].result.sequences] == [one.tokens for one in alone.result.sequences]


def test_a_torn_version_is_refused_and_the_others_stay_right(full):
    versions = full[2]
    good, torn = versions.publish("y0"), versions.publish("y1")
    folder = versions.base.data_dir / torn
    largest = max((path for path in folder.iterdir() if path.suffix != ".json"), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-40])
    refused, served = run(full, [(torn, {}), (good, {"prompt_logprobs": True})])
    assert refused.result is None and "can't be loaded" in refused.error
    check(versions, good, served)


def test_shared_memory_leaves_no_file_behind(full):
    assert not list(Path("/dev/shm").glob("openrl-*"))


def test_without_a_gpu_full_weights_are_refused_before_vllm_starts(full):
    from openrl.workers.sampler import vllm_runner

    if torch.cuda.device_count():
        pytest.skip("there is a GPU")
    base = full[2].base
    with pytest.raises(InvalidRequest, match="only be changed on a GPU"):
        vllm_runner.full_runner(str(base.path), base.data_dir, SETTINGS)


def test_what_was_fetched_for_memory_that_was_given_up_is_not_applied():
    from openrl.workers.sampler.full_weights import Prepared
    from openrl.workers.sampler.vllm_weights import VllmWeights

    class Switch:
        closed = applied = False

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.closed = True

        def apply(self, **options):
            self.applied = True

    weights = object.__new__(VllmWeights)
    weights._resident, switch = object(), Switch()
    with pytest.raises(InvalidRequest, match="fetched again"):
        weights.apply(Prepared(object(), switch))
    assert switch.closed and not switch.applied


def test_a_first_load_that_leaves_a_parameter_of_the_model_as_it_was_is_refused():
    from openrl.workers.sampler.vllm_transfer import HostTransfer, Touched

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.taken, self.left = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)

        def load_weights(self, weights):
            return {name for name, _ in weights}

    transfer = object.__new__(HostTransfer)
    transfer.model, transfer.device = Model(), torch.device("cpu")
    transfer._tensors = {"taken.weight": torch.zeros(1, 1)}
    with pytest.raises(RuntimeError, match="1 parameters that no tensor is for, as left"):
        transfer.receive_weights(Touched(names=["taken.weight"]))
    transfer._tensors["left.weight"] = torch.zeros(1, 1)
    transfer.receive_weights(Touched(names=["taken.weight", "left.weight"]))
    transfer.receive_weights(Touched(names=["taken.weight"]))
