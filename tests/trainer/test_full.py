"""Full fine-tuning: gradients, steps and files as plain torch and stock transformers have them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from openrl.tasks.errors import InvalidRequest
from openrl.tasks.journal import Outcome
from openrl.tasks.messages import (
    CreateModel,
    LoadWeights,
    Message,
    OptimStep,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
)
from openrl.workers.model import coordinates, loading
from openrl.workers.trainer import model_files, optimizer, states
from openrl.workers.trainer.full import FullTuning, read
from openrl.workers.trainer.optimizer import Moments, adamw_step, adamw_step_in_pieces
from openrl.workers.trainer.runs import Run
from openrl.workers.weights import links
from openrl.workers.weights.reader import Reader
from openrl.workers.weights.resident import Resident
from tests import tiny
from tests.plain import LOSSES, Plain, furthest
from tests.trainer.bench import BASE, Bench, forward_backward
from tests.trainer.test_device import bits, result

CLOSE = 1e-5
ADAM = {"learning_rate": 1e-3, "weight_decay": 0.1, "grad_clip_norm": 2.0}


class FullBench(Bench):
    """The device of a full run's pool, its model just loaded."""

    def __init__(self, model_dir: Path, data_dir: Path, **tuning: bool) -> None:
        super().__init__(loading.load(model_dir), data_dir, full=FullTuning(**tuning))
        self.model_dir = model_dir

    def full_run(self, number: int = 0, **options: object) -> Run:
        run = Run(tenant="t", run_id=f"s-{number}:train:0", token=1 << 32)
        self.did(run, CreateModel(base_model=BASE, rank=0, seed=1, fine_tuning="full", **options))
        return run

    def did(self, run: Run, message: Message) -> Outcome:
        """Carry out an operation that succeeds."""
        outcome = self.one(run, message)
        assert outcome.error is None, outcome.error
        return outcome

    def trained(self, run: Run, steps: int = 2, first: int = 0) -> Run:
        for number in range(first, first + steps):
            self.did(run, forward_backward(lengths=[6, 11], seed=number))
            self.did(run, OptimStep(**ADAM))
        return run

    def saved(self, run: Run, name: str = "a") -> dict:
        """Save a training checkpoint; return its row."""
        return json.loads(self.did(run, SaveWeights(name=name)).rows[0].value)


def detached(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture(params=[("llama", True), ("qwen3", False)], ids=["llama, tied", "qwen3, untied"])
def model_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    model_type, tied = request.param
    return tiny.make_tiny_model(tmp_path / "model", model_type=model_type, tied=tied)


@pytest.fixture
def bench(model_dir: Path, tmp_path: Path) -> FullBench:
    return FullBench(model_dir, tmp_path / "data")


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_every_loss_and_its_gradient_is_that_of_plain_torch(bench: FullBench, loss_fn: str) -> None:
    run, plain = bench.full_run(), Plain(bench.model_dir, None)
    message = forward_backward(loss_fn, [5, 9, 30])
    arrays, metrics = result(bench.one(run, message))
    loss, expected = plain.forward_backward(message.data, loss_fn)
    assert metrics["loss:sum"] == pytest.approx(loss, rel=CLOSE)
    for mine, theirs in zip(arrays, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=CLOSE, atol=CLOSE)
    names = [name for name, _ in run.weights().named_parameters()]
    assert furthest(dict(zip(names, run.gradient or [], strict=True)), plain.gradients())[0] < CLOSE


def test_steps_are_those_of_torchs_adamw(bench: FullBench) -> None:
    run, plain = bench.full_run(), Plain(bench.model_dir, None)
    for number in range(3):
        message = forward_backward(lengths=[6, 11], seed=number)
        plain.forward_backward(message.data, "cross_entropy")
        bench.did(run, message)
        norm = plain.gradient_norm()
        metrics = json.loads(bench.did(run, OptimStep(**ADAM)).result)["metrics"]
        plain.step(**ADAM)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=CLOSE)
    assert furthest(dict(run.weights().named_parameters()), plain.weights())[0] < CLOSE
    assert metrics["step"] == run.moments.step == 3


def test_the_model_computes_with_what_the_step_made(bench: FullBench) -> None:
    run, plain = bench.trained(bench.full_run()), Plain(bench.model_dir, None)
    plain.model.load_state_dict(dict(run.weights().named_parameters()), strict=False)
    message = forward_backward(lengths=[7], forward=True, seed=9)
    arrays, _ = result(bench.one(run, message))
    np.testing.assert_allclose(arrays[0], plain.forward(message.data, "cross_entropy")[1][0], rtol=CLOSE, atol=CLOSE)


def test_a_step_in_pieces_is_the_same_step_whatever_the_pieces_and_wherever_moments_lie() -> None:
    def state() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        draw = torch.Generator().manual_seed(3)
        return ([torch.randn(size, generator=draw) for size in ((7, 5), (64,), (3, 40))] for _ in range(2))

    hyper, outcomes = OptimStep(**ADAM), []
    for whole, offloads, piece in ((True, False, 0), (False, False, 1 << 20), (False, True, 32), (False, False, 32)):
        (parameters, gradients), moments = state(), Moments()
        for _ in range(3):
            if whole:
                metrics = adamw_step(parameters, gradients, moments, hyper)
            else:
                metrics = adamw_step_in_pieces(parameters, gradients, moments, hyper, offloads=offloads, piece=piece)
        outcomes.append((torch.cat([one.flatten() for one in parameters]), metrics))
    for parameters, metrics in outcomes[1:]:
        torch.testing.assert_close(parameters, outcomes[0][0], rtol=1e-6, atol=1e-7)
        assert metrics == pytest.approx(outcomes[0][1], rel=1e-5)
    assert torch.equal(outcomes[2][0], outcomes[3][0]) and outcomes[2][1] == outcomes[3][1]


def test_a_step_in_pieces_that_is_not_finite_changes_nothing() -> None:
    parameters, gradients = [torch.ones(8), torch.ones(8)], [torch.ones(8), torch.full((8,), 1e30)]
    moments = Moments()
    with pytest.raises(InvalidRequest, match="is not finite"):
        adamw_step_in_pieces(parameters, gradients, moments, OptimStep())
    assert all(bool((one == 1).all()) for one in parameters) and moments == Moments()


@pytest.mark.parametrize("offloads", [False, True])
def test_a_run_that_was_saved_and_loaded_goes_on_bit_by_bit(model_dir: Path, tmp_path: Path, offloads: bool) -> None:
    bench = FullBench(model_dir, tmp_path / "data", offloads=offloads)
    run = bench.trained(bench.full_run())
    row = bench.saved(run)
    before = bits(run)
    path = {"checkpoint_path": "tinker://s-0:train:0/weights/a", "checkpoint_dir": row["directory"]}

    heir = FullBench(model_dir, tmp_path / "data", offloads=offloads)
    resumed = heir.full_run(1, with_optimizer=True, **path)
    assert bits(resumed) == before
    assert bits(bench.trained(run, first=2)) == bits(heir.trained(resumed, first=2))

    back = heir.one(resumed, LoadWeights(with_optimizer=True, **path))
    assert back.error is None and bits(resumed) == before, "loaded onto the run as well"
    assert bits(heir.trained(resumed, first=2)) == bits(run)


def test_a_checkpoint_is_a_models_directory_for_stock_transformers(bench: FullBench) -> None:
    run = bench.trained(bench.full_run())
    row = bench.saved(run)
    assert (row["kind"], row["fine_tuning"], row["rank"], row["has_optimizer"]) == ("training", "full", 0, True)
    directory = bench.data_dir / row["directory"]
    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert furthest(dict(run.weights().named_parameters()), detached(stock))[0] == 0
    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer("ab")["input_ids"] == AutoTokenizer.from_pretrained(bench.model_dir)("ab")["input_ids"]


def test_a_large_model_is_cut_into_files_that_stock_transformers_joins(bench: FullBench, tmp_path: Path) -> None:
    run, directory = bench.trained(bench.full_run()), tmp_path / "cut"
    directory.mkdir()
    weights = dict(run.weights().named_parameters())
    model_files.write(directory, weights, base=bench.model_dir, shard_bytes=100_000)
    assert len(list(directory.glob("*.safetensors"))) > 2
    stock = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert furthest(weights, detached(stock))[0] == 0
    assert furthest(read(directory, bench.loaded), weights)[0] == 0


def test_an_export_has_the_types_of_the_base_model(tmp_path: Path) -> None:
    model_dir = tiny.make_tiny_model(tmp_path / "model", dtype=torch.bfloat16)
    bench = FullBench(model_dir, tmp_path / "data")
    run = bench.trained(bench.full_run())
    row = json.loads(bench.did(run, SaveWeightsExternal(name="x")).rows[0].value)
    stock = AutoModelForCausalLM.from_pretrained(bench.data_dir / row["directory"])
    assert {one.dtype for one in stock.parameters()} == {torch.bfloat16}
    rounded = {name: one.bfloat16() for name, one in run.weights().named_parameters()}
    assert furthest(detached(stock), rounded)[0] == 0
    assert not row["has_optimizer"]


def test_versions_for_samplers_are_a_chain_that_a_reader_follows(tmp_path: Path) -> None:
    bench = FullBench(tiny.make_tiny_model(tmp_path / "model", dtype=torch.bfloat16), tmp_path / "data")
    run, rows = bench.full_run(), []
    for number in range(3):
        bench.did(run, forward_backward(lengths=[6, 11], seed=number))
        bench.did(run, OptimStep(learning_rate=1e-5))
        outcome = bench.did(run, SaveWeightsForSampler(name=f"v{number}"))
        rows.append(json.loads(outcome.rows[0].value))
        assert outcome.run_fields["last_version"] == rows[-1]["directory"]
    home = (bench.data_dir / rows[0]["directory"]).parent
    found = [links.read(home, Path(row["directory"]).name, digest=row["weights_digest"]) for row in rows]
    assert [link.anchor is None for link in found] == [False, True, True]
    assert [row["size_bytes"] < rows[0]["size_bytes"] / 4 for row in rows] == [False, True, True]
    resident = Resident.blank(found[0].specs)
    name = Path(rows[2]["directory"]).name
    with Reader(home, resident).prepare(name, digest=rows[2]["weights_digest"]) as switch:
        switch.apply()
    expected = {name: one.bfloat16() for name, one in run.weights().named_parameters()}
    assert resident.tensors.keys() == coordinates.views(bench.loaded.model).keys()
    assert furthest(resident.tensors, expected)[0] == 0


def version(bench: FullBench, run: Run, name: str) -> dict[str, torch.Tensor]:
    """Save a version for samplers; return what a reader makes of it, from its anchor."""
    row = json.loads(bench.did(run, SaveWeightsForSampler(name=name)).rows[0].value)
    path, digest = bench.data_dir / row["directory"], row["weights_digest"]
    resident = Resident.blank(links.read(path.parent, path.name, digest=digest).specs)
    with Reader(path.parent, resident).prepare(path.name, digest=digest) as switch:
        switch.apply()
    return resident.tensors


def stepped(bench: FullBench, run: Run, seed: int) -> None:
    """Take a step, as the engine does."""
    bench.did(run, forward_backward(lengths=[6, 11], seed=seed))
    bench.did(run, OptimStep(learning_rate=1e-5))
    bench.device.foresee(run)


@pytest.mark.parametrize("then", ["publish", "step", "load"])
def test_a_version_that_was_encoded_ahead_is_published_only_for_the_weights_that_it_is_of(
    tmp_path: Path, then: str
) -> None:
    bench = FullBench(tiny.make_tiny_model(tmp_path / "model", dtype=torch.bfloat16), tmp_path / "data")
    run = bench.full_run()
    saved = bench.saved(run)
    chain = None
    for number in range(2):
        stepped(bench, run, number)
        version(bench, run, f"v{number}")
        [chain] = bench.checkpoints._versions._chains.values()
        assert chain.staged is None
    stepped(bench, run, 7)
    assert chain is not None and chain.staged is not None
    if then == "step":
        bench.did(run, forward_backward(lengths=[6, 11], seed=8))
        bench.did(run, OptimStep(learning_rate=1e-3))
    elif then == "load":
        load = {"checkpoint_path": "x", "checkpoint_dir": saved["directory"], "with_optimizer": False}
        bench.did(run, LoadWeights(**load))
    staged = chain.staged
    assert (staged is None) is (then == "load"), "it takes no memory beside a load"
    found = version(bench, run, "last")
    assert (staged is not None and chain.publisher._base is staged.weights) is (then == "publish")
    expected = {name: one.bfloat16() for name, one in run.weights().named_parameters()}
    assert furthest(found, expected)[0] == 0 and chain.staged is None


def test_no_version_is_encoded_ahead_of_a_run_that_has_stopped_to_publish(tmp_path: Path) -> None:
    bench = FullBench(tiny.make_tiny_model(tmp_path / "model", dtype=torch.bfloat16), tmp_path / "data")
    run, staged = bench.full_run(), []
    for number in range(6):
        stepped(bench, run, number)
        chains = bench.checkpoints._versions._chains
        staged.append(run in chains and chains[run].staged is not None)
        if number < 2:
            version(bench, run, f"v{number}")
    assert staged == [False, False, True, False, False, False]


def test_a_run_that_a_load_set_back_has_versions_encoded_ahead_again_once_it_publishes_by_rhythm(
    tmp_path: Path,
) -> None:
    bench = FullBench(tiny.make_tiny_model(tmp_path / "model", dtype=torch.bfloat16), tmp_path / "data")
    run = bench.full_run()
    saved = bench.saved(run)
    staged = []
    for number in range(6):
        stepped(bench, run, number)
        [*chains] = bench.checkpoints._versions._chains.values()
        staged += [bool(chains) and chains[0].staged is not None]
        version(bench, run, f"v{number}")
        if number == 2:
            load = {"checkpoint_path": "x", "checkpoint_dir": saved["directory"], "with_optimizer": True}
            bench.did(run, LoadWeights(**load))
    assert staged == [False, False, True, False, False, True]


def test_what_follows_a_version_that_was_not_registered_does_not_lead_on_from_it(bench: FullBench) -> None:
    run = bench.full_run()
    first = bench.did(run, SaveWeightsForSampler(name="a"))
    bench.checkpoints.discard(first)
    second = json.loads(bench.did(run, SaveWeightsForSampler(name="b")).rows[0].value)
    path = bench.data_dir / second["directory"]
    assert links.read(path.parent, path.name, digest=second["weights_digest"]).parent is None


def test_a_checkpoint_of_the_other_kind_is_refused_by_name_and_changes_nothing(
    bench: FullBench, tmp_path: Path
) -> None:
    lora = Bench(loading.load(bench.model_dir), bench.data_dir)
    adapter = lora.run(7)
    lora_dir = json.loads(lora.one(adapter, SaveWeights(name="a")).rows[0].value)["directory"]
    run = bench.trained(bench.full_run())
    before, full_dir = bits(run), bench.saved(run)["directory"]
    for device, onto, directory, words in (
        (bench, run, lora_dir, "is of lora fine-tuning, this run is of full"),
        (lora, adapter, full_dir, "is of full fine-tuning, this run is of lora"),
    ):
        outcome = device.one(onto, LoadWeights(checkpoint_path="x", checkpoint_dir=directory, with_optimizer=False))
        assert outcome.category == "user" and words in (outcome.error or "")
    assert bits(run) == before


def test_a_new_run_starts_from_the_base_whatever_the_model_in_memory_has_become(bench: FullBench) -> None:
    fresh = bits(bench.full_run())
    bench.trained(bench.full_run(1))
    assert bits(bench.full_run(2)) == fresh


def test_a_gradient_that_is_not_finite_is_refused_with_its_name(bench: FullBench) -> None:
    run = bench.full_run()
    weights = dict(run.weights().named_parameters())
    weights["model.norm.weight"].fill_(torch.inf)
    run.trained.install()
    outcome = bench.one(run, forward_backward())
    assert "not finite" in (outcome.error or "") and run.gradient is None
    assert "is void" in (bench.one(run, OptimStep()).error or "")


def test_a_snapshot_holds_all_that_a_run_is(bench: FullBench, tmp_path: Path) -> None:
    run = bench.trained(bench.full_run())
    bench.did(run, forward_backward(seed=8))
    states.write(tmp_path / "snapshot", run, kind=states.SNAPSHOT, base_model=BASE, base_digest=bench.loaded.digest)
    state = states.read(tmp_path / "snapshot", bench.loaded, base_model=BASE, with_optimizer=True, full=FullTuning())
    assert state.manifest.fine_tuning == "full"
    heir = Run(tenant="t", run_id=run.run_id, token=1, gradient=state.gradient)
    heir.adopt(state.trained, state.moments)
    assert bits(heir) == bits(run)


def broken_in_the_second_pass(monkeypatch: pytest.MonkeyPatch, parameters: int) -> None:
    """Break the next step after half of the parameters were written."""
    stepped, calls = optimizer._stepped, []

    def breaks(*args: object) -> torch.Tensor:
        calls.append(1)
        if len(calls) == parameters + parameters // 2:
            raise RuntimeError("out of memory")
        return stepped(*args)

    monkeypatch.setattr(optimizer, "_stepped", breaks)


def test_a_step_that_breaks_while_it_is_written_leaves_a_run_that_says_so(
    bench: FullBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = bench.trained(bench.full_run())
    bench.did(run, forward_backward(lengths=[6, 11], seed=9))
    before = bits(run)
    with monkeypatch.context() as patched:
        broken_in_the_second_pass(patched, len(run.weights().parameters()))
        assert bench.one(run, OptimStep(**ADAM)).category == "server"
    assert run.torn and bits(run) != before


def test_a_step_that_breaks_before_it_is_written_changes_nothing(
    bench: FullBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = bench.trained(bench.full_run())
    before = bits(run)
    bench.did(run, forward_backward(lengths=[6, 11], seed=9))
    with monkeypatch.context() as patched:
        broken_in_the_second_pass(patched, 2)
        assert bench.one(run, OptimStep(**ADAM)).category == "server"
    assert not run.torn and bits(run) == before


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_a_load_is_copied_into_the_tensors_that_are_there(bench: FullBench, with_optimizer: bool) -> None:
    run = bench.trained(bench.full_run())
    row, saved = bench.saved(run), bits(run)
    bench.trained(run, first=5)
    bench.did(run, forward_backward(lengths=[6, 11], seed=9))
    where = [tensor.data_ptr() for group in run.tensors()[:3] for tensor in group]
    load = {"checkpoint_path": "x", "checkpoint_dir": row["directory"], "with_optimizer": with_optimizer}
    bench.did(run, LoadWeights(**load))
    groups = run.tensors()
    here = [tensor.data_ptr() for group in groups[:3] for tensor in group]
    assert here == where[: len(here)] and len(groups[1]) == with_optimizer * len(groups[0]) and not groups[3]
    assert bits(run)[: len(here)] == saved[: len(here)]
    assert run.moments.step == 2 * with_optimizer


def test_what_is_read_of_all_weights_lies_in_host_memory_until_it_is_taken(bench: FullBench, tmp_path: Path) -> None:
    run = bench.trained(bench.full_run())
    bench.did(run, forward_backward(seed=3))
    states.write(tmp_path / "snapshot", run, kind=states.SNAPSHOT, base_model=BASE, base_digest=bench.loaded.digest)
    elsewhere = replace(bench.loaded, device=torch.device("meta"))
    state = states.read(tmp_path / "snapshot", elsewhere, base_model=BASE, with_optimizer=True, full=FullTuning())
    tensors = [*state.trained.parameters(), *state.moments.exp_avg, *state.moments.exp_avg_sq, *state.gradient]
    assert {tensor.device.type for tensor in tensors} == {"cpu"}
