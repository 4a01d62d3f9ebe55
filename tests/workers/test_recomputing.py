"""Layers computed again in backward: the same bits, less memory, and only where memory asks for it."""

from pathlib import Path

import pytest
import torch

from openrl.tasks.messages import OptimStep
from openrl.workers.model import loading
from openrl.workers.model.attention import packed, positions
from openrl.workers.model.layer import Layer
from openrl.workers.model.layers import Stock, way_through
from openrl.workers.model.lora import Segment, routing
from openrl.workers.model.recomputing import Recomputing, kept_bytes_per_token, left_bytes, recomputed
from openrl.workers.trainer.device import Device
from tests.tiny import make_tiny_model
from tests.trainer.bench import Bench, forward_backward
from tests.trainer.test_device import bits, result

MESSAGES = (("cross_entropy", [5, 60]), ("ppo", [40]), ("gspo", [3, 30, 9]))


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def loaded(request, tmp_path_factory) -> loading.LoadedModel:
    torch.set_num_threads(1)
    path = make_tiny_model(tmp_path_factory.mktemp("models") / request.param, model_type=request.param)
    return loading.load(path, device="cpu", dtype=torch.float32)


def trained(loaded, data_dir: Path, recomputing: Recomputing):
    bench = Bench(loaded, data_dir)
    bench.device = Device(loaded, bench.checkpoints, token_budget=96, recomputing=recomputing)
    runs = [bench.run(n, rank=2**n, seed=n) for n in range(len(MESSAGES))]
    answers = []
    for seed in range(2):
        pairs = zip(runs, MESSAGES, strict=True)
        outcomes = bench.all(*((run, forward_backward(*message, seed=seed)) for run, message in pairs))
        answers += [result(outcome) for outcome in outcomes]
        gradients = [bits(run) for run in runs]
        steps = [bench.one(run, OptimStep(learning_rate=0.01)).result for run in runs]
    return str(answers), gradients, steps, [bits(run) for run in runs]


def test_results_gradients_and_weights_of_mixed_runs_are_the_same_bits_with_it_and_without(loaded, tmp_path):
    assert trained(loaded, tmp_path, Recomputing(loaded, "on")) == trained(loaded, tmp_path, Recomputing(loaded, "off"))


class Kept:
    """Bytes that a graph keeps, each storage once, beside those that were there before."""

    def __init__(self, loaded) -> None:
        self.known = {tensor.untyped_storage().data_ptr() for tensor in loaded.model.parameters()}
        self.storages: dict[int, torch.UntypedStorage] = {}

    def __enter__(self):
        self.hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self.hooks.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.hooks.__exit__(*error)

    def _pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.known:
            self.storages[storage.data_ptr()] = storage
        return tensor

    def add(self, node) -> None:
        """Count what nodes of ours keep beside autograd, from this one back."""
        while node is not None:
            self._look_into(vars(node).get("kept") if hasattr(node, "__dict__") else None)
            node = next((before for before, _ in node.next_functions if before is not None), None)

    def _look_into(self, value) -> None:
        if isinstance(value, torch.Tensor):
            self._pack(value)
        elif isinstance(value, tuple | list):
            for one in value:
                self._look_into(one)
        elif type(value).__module__.startswith("openrl."):
            self._look_into(list(vars(value).values()))

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())


def kept(loaded, bench, num_tokens: int, way, *, wanted: bool) -> int:
    adapter = bench.run(0, rank=1, train_unembed=False).weights()
    tokens, lengths = torch.arange(num_tokens) % 256, [num_tokens]
    with Kept(loaded) as seen, packed(lengths), routing([Segment(0, num_tokens, adapter)]), recomputed(wanted):
        hidden_TD = way(loaded).hidden_states(tokens, positions(lengths))
    assert hidden_TD.requires_grad
    seen.add(hidden_TD.grad_fn)
    return seen.num_bytes


@pytest.mark.parametrize("way", [way_through, Stock])
def test_what_is_kept_is_about_what_the_decision_counts_on_and_far_less_with_it(loaded, tmp_path, way):
    bench = Bench(loaded, tmp_path)
    without = kept(loaded, bench, 256, way, wanted=False)
    assert 0.5 < without / (256 * kept_bytes_per_token(loaded)) < 1.5
    assert kept(loaded, bench, 256, way, wanted=True) < 0.25 * without


@pytest.mark.parametrize(("mode", "left", "expected"), [
    ("auto", 100, True), ("auto", 1 << 40, False), ("on", 1 << 40, True), ("off", 100, False),
])  # fmt: skip
def test_it_is_chosen_by_the_setting_and_by_the_memory_that_is_left(
    loaded, tmp_path, monkeypatch, mode, left, expected
):
    bench = Bench(loaded, tmp_path)
    computed: list[int] = []
    forward = Layer.forward
    monkeypatch.setattr(
        Layer, "forward", lambda one, x, *rest, **more: computed.append(len(x)) or forward(one, x, *rest, **more)
    )
    bench.device = Device(
        loaded, bench.checkpoints, token_budget=96, recomputing=Recomputing(loaded, mode, left=lambda: left)
    )
    result(bench.one(bench.run(0), forward_backward(lengths=[9])))
    assert computed == [9] * loaded.num_layers * (2 if expected else 1)
    computed.clear()
    result(bench.one(bench.run(1), forward_backward(lengths=[9], forward=True)))
    assert computed == [9] * loaded.num_layers, "a forward without gradients has nothing to compute again"


def test_the_memory_that_is_left_is_some_and_no_more_than_the_machine_has():
    total = int(Path("/proc/meminfo").read_text().split()[1]) << 10
    assert 1 << 20 < left_bytes(torch.device("cpu")) <= total
