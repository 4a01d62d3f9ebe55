"""The entropy among a forward's metrics: that of the dense softmax, over the positions that count."""

import numpy as np
import pytest
import torch

from openrl.workers.model.attention import hidden_states, packed, positions
from openrl.workers.model.logprobs import head_logits, target_logprobs
from openrl.workers.model.lora import Segment, routing
from openrl.workers.trainer.device import Device
from tests.trainer.bench import Bench, forward_backward
from tests.trainer.test_device import bits, result


@pytest.fixture
def telling(loaded, tmp_path) -> Bench:
    bench = Bench(loaded, tmp_path)
    bench.device = Device(loaded, bench.checkpoints, token_budget=96, tells_entropy=True)
    return bench


def dense(loaded, run, data) -> float:
    """The sum over the positions that count, from all logits at once."""
    total = 0.0
    for datum in data:
        tokens = torch.from_numpy(datum.tokens.astype(np.int64))
        segments = [Segment(0, len(tokens), run.weights())]
        with torch.no_grad(), packed([len(tokens)]), routing(segments):
            hidden_TD = hidden_states(loaded, tokens, positions([len(tokens)]))
        entropies = torch.distributions.Categorical(logits=head_logits(loaded, hidden_TD, segments).double()).entropy()
        weights = torch.from_numpy(datum.inputs.get("advantages", datum.inputs.get("weights")))
        counted = weights != 0 if weights.ndim == 1 else (weights != 0).any(1)
        total += float(entropies[counted].sum())
    return total


@pytest.mark.parametrize(("loss_fn", "width"), [("cross_entropy", None), ("cross_entropy", 3), ("ppo", None)])
@pytest.mark.parametrize("forward", [True, False])
def test_it_is_the_dense_one_beside_another_run_and_changes_nothing_else(telling, bench, loss_fn, width, forward):
    message = forward_backward(loss_fn, [9, 30, 70], seed=3, width=width, forward=forward)
    for datum in message.data:
        name = "advantages" if loss_fn == "ppo" else "weights"
        datum.inputs[name][: len(datum.tokens) // 2] = 0
    run, other = telling.run(0, seed=1), telling.run(1, seed=2, rank=7)
    outcome, _ = telling.all((run, message), (other, forward_backward(lengths=[12], seed=4)))
    arrays, metrics = result(outcome)
    assert metrics.pop("entropy:sum") == pytest.approx(dense(telling.loaded, run, message.data), rel=1e-5)
    plain, neighbour = bench.run(0, seed=1), bench.run(1, seed=2, rank=7)
    outcome, _ = bench.all((plain, message), (neighbour, forward_backward(lengths=[12], seed=4)))
    expected, without = result(outcome)
    assert metrics == without and "entropy:sum" not in without
    assert bits(run) == bits(plain)
    for left, right in zip(arrays, expected, strict=True):
        assert left.tobytes() == right.tobytes()


def test_certainty_has_no_entropy_and_indifference_the_most(loaded):
    entropies_T = torch.empty(2)
    hidden_TD = torch.tensor([[0.0, 0.0], [300.0, 0.0]])
    head_VD = torch.tensor([[1.0, 0.0]] + [[-1.0, 0.0]] * 7)
    target_logprobs(hidden_TD, head_VD, torch.tensor([0, 0]), entropies_T=entropies_T, chunk_bytes=32)
    torch.testing.assert_close(entropies_T, torch.tensor([np.log(8.0), 0.0], dtype=torch.float32))
