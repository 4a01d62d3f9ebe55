"""Losses through the unmodified SDK: what the service exports after a step equals stock PEFT and torch's AdamW."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tinker
import torch
from tinker import types

from tests.plain import LOSSES, Plain, exported, furthest
from tests.stack.conftest import MODEL, Service
from tests.trainer.bench import computed

pytestmark = [pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"), pytest.mark.timeout(180)]

BOUND = 1e-5
AS_GRADIENT = {"learning_rate": 2e5, "eps": 1e6, "grad_clip_norm": 1.0}
"""With an eps this large a first step is -0.2 times the gradient at norm 1: the export shows the gradient itself."""
STEP = {"learning_rate": 1e-2, "eps": 10.0, "weight_decay": 0.1}
"""A large eps again: see tests/trainer/test_equality.py."""


@dataclass(frozen=True)
class Example:
    """One sequence and its loss inputs, as both sides read them."""

    tokens: np.ndarray
    inputs: Mapping[str, np.ndarray]

    def datum(self) -> types.Datum:
        """What a user of the SDK would write; 2-D torch tensors become sparse on the wire where that is smaller."""
        chunks = [types.EncodedTextChunk(tokens=part.tolist()) for part in np.array_split(self.tokens, 2) if len(part)]
        inputs = {name: torch.tensor(array) if array.ndim == 2 else array for name, array in self.inputs.items()}
        return types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)


def examples(
    loss_fn: str, lengths: tuple[int, ...] = (3, 26, 12, 40), *, seed: int = 0, width: int = 0
) -> list[Example]:
    draw = np.random.default_rng(seed)
    found = []
    for length in lengths:
        shape = (length, width) if width else (length,)
        kept = draw.random(shape) < (0.2 if width else 1.1)
        inputs = {"target_tokens": draw.integers(0, 256, shape) * kept}
        if loss_fn == "cross_entropy":
            inputs["weights"] = (draw.normal(size=shape) * (draw.random(shape) < 0.7)).astype(np.float32)
        else:
            inputs["logprobs"] = (draw.normal(size=shape) * 0.3 - 6).astype(np.float32)
            inputs["advantages"] = (draw.normal(size=shape) * (np.arange(length) > 1)).astype(np.float32)
        if loss_fn == "gspo":
            inputs["sequence_ratio_mask"] = (np.arange(length) > 1).astype(np.float32)
        found.append(Example(draw.integers(0, 256, length).astype(np.int32), inputs))
    return found


@pytest.fixture
def api(service: Service) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(api_key="tml-local", base_url=service.base_url) as client:
        yield client


class Run:
    """A fresh run, and what it exports."""

    def __init__(self, api: tinker.ServiceClient, service: Service, *, seed: int = 7) -> None:
        self.training = api.create_lora_training_client(base_model=MODEL, rank=4, seed=seed).result()
        self._home = service.data_dir / "tenants"

    def forward_backward(self, data: list[Example], loss_fn: str, **config: float) -> types.APIFuture:
        return self.training.forward_backward([one.datum() for one in data], loss_fn, config or None)

    def step(self, **hyper: float) -> types.APIFuture:
        return self.training.optim_step(types.AdamParams(**hyper))

    def export(self, name: str) -> Path:
        """Where the weights of this moment lie, in PEFT's files."""
        self.training.save_weights_for_sampler(name).result()
        run = self.training.model_id.replace(":", "_")
        [directory] = self._home.glob(f"*/runs/{run}/sampler_weights/{name}.*")
        return directory

    def plain(self, model_dir: Path) -> Plain:
        return Plain(model_dir, self.export("start"))

    def assert_equal(self, plain: Plain, name: str) -> None:
        error, tensor = furthest(exported(self.export(name)), plain.weights())
        assert error < BOUND, tensor


@pytest.mark.parametrize(
    ("loss_fn", "width", "config"),
    [(loss_fn, 0, {}) for loss_fn in LOSSES]
    + [("cross_entropy", 5, {}), ("ppo", 0, {"clip_low_threshold": 0.6, "clip_high_threshold": 1.1})],
)
def test_the_gradient_and_two_steps_are_those_of_the_plain_way(
    api: tinker.ServiceClient, service: Service, model_dir: Path, loss_fn: str, width: int, config: dict[str, float]
) -> None:
    run, data = Run(api, service), examples(loss_fn, width=width)
    if width:
        sparse = [tensor.sparse_crow_indices is not None for tensor in data[0].datum().loss_fn_inputs.values()]
        assert sparse[0] and not sparse[1]
    plain = run.plain(model_dir)
    for name, hyper in (("gradient", AS_GRADIENT), ("step", STEP)):
        result = run.forward_backward(data, loss_fn, **config).result()
        total, logprobs = plain.forward_backward(data, loss_fn, **config)
        assert result.metrics["loss:sum"] == pytest.approx(total, rel=BOUND)
        for output, expected in zip(result.loss_fn_outputs, logprobs, strict=True):
            np.testing.assert_allclose(output["logprobs"].to_numpy(), expected, rtol=1e-5, atol=1e-5)
        metrics = run.step(**hyper).result().metrics
        assert metrics["grad_norm"] == pytest.approx(plain.gradient_norm(), rel=BOUND)
        plain.step(**hyper)
        run.assert_equal(plain, name)


def test_a_pipeline_that_nobody_awaits_ends_where_an_awaited_one_does(
    api: tinker.ServiceClient, service: Service, model_dir: Path
) -> None:
    data = examples("ppo")
    awaited, pipelined = Run(api, service), Run(api, service)
    plain = awaited.plain(model_dir)
    futures = []
    for hyper in (AS_GRADIENT, STEP, STEP):
        futures += [pipelined.forward_backward(data, "ppo"), pipelined.step(**hyper)]
        awaited.forward_backward(data, "ppo").result()
        awaited.step(**hyper).result()
        plain.forward_backward(data, "ppo")
        plain.step(**hyper)
    pipelined.assert_equal(plain, "end")
    awaited.assert_equal(plain, "end")
    assert all(future.result() for future in futures)


def test_a_call_that_the_sdk_cuts_trains_as_the_calls_it_is_cut_into(
    api: tinker.ServiceClient, service: Service
) -> None:
    lengths = tuple(np.random.default_rng(1).integers(1, 4, 1040).tolist())
    data = examples("importance_sampling", lengths)
    whole, split = Run(api, service), Run(api, service)
    future = whole.forward_backward(data, "importance_sampling")
    whole.step(**AS_GRADIENT).result()
    parts = [split.forward_backward(data[start : start + 347], "importance_sampling") for start in range(0, 1040, 347)]
    split.step(**AS_GRADIENT).result()
    error, tensor = furthest(exported(whole.export("end")), exported(split.export("end")))
    assert error < BOUND, tensor
    metrics = [part.result().metrics for part in parts]
    assert len(future.result().loss_fn_outputs) == len(data)
    for name, value in computed(future.result().metrics).items():
        combine = {"sum": sum, "min": min, "max": max}[name.rpartition(":")[2]]
        assert combine(part[name] for part in metrics) == pytest.approx(value, rel=1e-5, abs=1e-5), name


def square(_data: object, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """sum(lp^2): its weights have another value at every token."""
    total = torch.cat(logprobs).square().sum()
    return total, {"square:sum": total.item()}


def preference(_data: object, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """DPO over two pairs, against a reference of constants: weights of both signs, and sequences that interact."""
    margin = torch.stack([(logprobs[n].sum() + 30) - (logprobs[n + 1].sum() + 20) for n in (0, 2)])
    return -torch.nn.functional.logsigmoid(0.05 * margin).sum(), {"margin:sum": margin.sum().item()}


@pytest.mark.parametrize("loss", [square, preference])
def test_a_custom_loss_has_the_gradient_that_autograd_finds(
    api: tinker.ServiceClient, service: Service, model_dir: Path, loss
) -> None:
    run = Run(api, service)
    plain = run.plain(model_dir)
    data = [Example(one.tokens, {"target_tokens": one.inputs["target_tokens"]}) for one in examples("cross_entropy")]
    for name, hyper in (("gradient", AS_GRADIENT), ("step", STEP)):
        future = run.training.forward_backward_custom([one.datum() for one in data], loss)
        metrics = future.result().metrics
        total, own = loss(data, [plain.logprobs(one.tokens, one.inputs["target_tokens"]) for one in data])
        total.backward()
        assert metrics["loss:sum"] == pytest.approx(total.item(), rel=BOUND)
        assert own == {key: pytest.approx(metrics[key], rel=BOUND) for key in own}
        norm = run.step(**hyper).result().metrics["grad_norm"]
        assert norm == pytest.approx(plain.gradient_norm(), rel=BOUND)
        plain.step(**hyper)
        run.assert_equal(plain, name)


@pytest.mark.parametrize(
    ("loss_fn", "change", "words"),
    [
        ("stable_reinforce", {}, "use importance_sampling, ppo, cispo or gspo"),
        ("ppo", {"clip_low_threshold": np.ones(4, np.float32)}, r"send loss_fn_config\['clip_low_threshold'\]"),
        ("gspo", {}, r"data\[0\].loss_fn_inputs\['sequence_ratio_mask'\] is missing"),
        ("dro", {"logprobs": np.array([0, 1, np.nan, 0], np.float32)}, r"\['logprobs'\] holds nan at position 2"),
    ],
)
def test_what_is_not_served_is_refused_with_what_to_do(
    api: tinker.ServiceClient, service: Service, loss_fn: str, change: dict[str, np.ndarray], words: str
) -> None:
    [whole] = examples("ppo", (4,))
    with pytest.raises(tinker.TinkerError, match=words):
        Run(api, service).forward_backward([Example(whole.tokens, {**whole.inputs, **change})], loss_fn).result()


def test_an_old_logprob_of_minus_100_fails_by_name_and_the_run_goes_on(
    api: tinker.ServiceClient, service: Service
) -> None:
    run, [good] = Run(api, service), examples("importance_sampling", (6,))
    sampled = good.inputs["logprobs"].copy()
    sampled[3] = -100
    with pytest.raises(tinker.RequestFailedError, match=r"data\[0\], position 3.*logprobs -100.0"):
        run.forward_backward(
            [Example(good.tokens, {**good.inputs, "logprobs": sampled})], "importance_sampling"
        ).result()
    with pytest.raises(tinker.RequestFailedError, match="void"):
        run.step().result()
    run.forward_backward([good], "importance_sampling")
    assert run.step().result().metrics["update_norm"] > 0
