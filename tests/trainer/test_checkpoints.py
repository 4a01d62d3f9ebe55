"""Saving, loading and creating from checkpoints: the whole state, under immutable versions, or nothing."""

import errno
import json
from dataclasses import replace

import pytest
import torch

from openrl.tasks.messages import CreateModel, LoadWeights, OptimStep, SaveWeights, SaveWeightsForSampler
from openrl.tasks.registry import Checkpoint, Sampler
from openrl.workers.trainer import states
from openrl.workers.trainer.runs import Run
from openrl.workers.trainer.work import Work
from openrl.workers.weights import manifest
from tests.trainer.bench import BASE, forward_backward


def trained(bench, number: int = 0, *, steps: int = 2, **options) -> Run:
    run = bench.run(number, seed=1, **options)
    for step in range(steps):
        bench.one(run, forward_backward(seed=step))
        bench.one(run, OptimStep(learning_rate=0.01))
    return run


def save(bench, run, message=None) -> Checkpoint:
    outcome = bench.one(run, message or SaveWeights(name="final"))
    assert outcome.error is None, outcome.error
    [row] = outcome.rows
    checkpoint = Checkpoint.from_json(row.value)
    assert row.field == checkpoint.checkpoint_id
    assert json.loads(outcome.result)["path"] == checkpoint.uri
    bench.registry.known[checkpoint.checkpoint_id] = checkpoint
    return checkpoint


def next_step(bench, run):
    bench.one(run, forward_backward(seed=99))
    assert bench.one(run, OptimStep(learning_rate=0.01)).error is None
    return [parameter.detach().clone() for parameter in run.weights().parameters()]


def same(left, right) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def create(bench, checkpoint, number: int, *, with_optimizer: bool):
    run = Run(tenant="t", run_id=f"s-{number}:train:0", token=1)
    message = CreateModel(
        base_model=BASE, rank=8, seed=0, checkpoint_path=checkpoint.uri, checkpoint_dir=checkpoint.directory,
        with_optimizer=with_optimizer,
    )  # fmt: skip
    return run, bench.one(run, message)


def test_a_run_created_with_the_optimizer_goes_on_bit_by_bit_and_weights_alone_do_not(bench):
    run = trained(bench, rank=3, train_mlp=False)
    checkpoint = save(bench, run)
    with_optimizer, outcome = create(bench, checkpoint, 1, with_optimizer=True)
    assert json.loads(outcome.result) == {
        "type": "load_weights", "path": checkpoint.uri, "model_id": with_optimizer.run_id,
    }  # fmt: skip
    assert outcome.run_fields == {
        "state": "ready", "rank": "3", "train_attn": "1", "train_mlp": "0", "train_unembed": "1",
    }  # fmt: skip
    weights_only, _ = create(bench, checkpoint, 2, with_optimizer=False)
    assert same(weights_only.weights().parameters(), run.weights().parameters())
    live = next_step(bench, run)
    assert same(next_step(bench, with_optimizer), live)
    assert not same(next_step(bench, weights_only), live)
    assert with_optimizer.moments.step == 3 and weights_only.moments.step == 1


@pytest.mark.parametrize("with_optimizer", [True, False])
def test_loading_into_a_run_replaces_weights_and_moments_and_drops_pending_gradients(bench, with_optimizer):
    run = trained(bench)
    checkpoint = save(bench, run)
    fresh, _ = create(bench, checkpoint, 1, with_optimizer=with_optimizer)
    next_step(bench, run)
    bench.one(run, forward_backward(seed=5))
    message = LoadWeights(
        checkpoint_path=checkpoint.uri, checkpoint_dir=checkpoint.directory, with_optimizer=with_optimizer
    )
    outcome = bench.one(run, message)
    assert json.loads(outcome.result)["path"] == checkpoint.uri
    assert "nothing was accumulated" in bench.one(run, OptimStep()).error
    assert same(next_step(bench, run), next_step(bench, fresh))


def test_only_a_runs_first_operation_takes_on_the_modules_of_a_checkpoint(bench):
    narrow = trained(bench, rank=4, train_mlp=False, train_unembed=False)
    checkpoint = save(bench, narrow)
    message = LoadWeights(checkpoint_path=checkpoint.uri, checkpoint_dir=checkpoint.directory, with_optimizer=True)
    run = bench.run(3, rank=4)
    [refused] = bench.device.execute([Work(run=run, seq_id=2, message=message)])
    assert refused.category == "user" and "on 8 modules" in refused.error, refused.error
    assert len(run.weights().targets) > 8
    [outcome] = bench.device.execute([Work(run=run, seq_id=1, message=message)])
    assert outcome.run_fields == {"rank": "4", "train_attn": "1", "train_mlp": "0", "train_unembed": "0"}
    assert same(next_step(bench, run), next_step(bench, narrow))
    other = bench.run(4, rank=8)
    [refused] = bench.device.execute([Work(run=other, seq_id=1, message=message)])
    assert "has rank 4" in refused.error and other.weights().rank == 8


def test_a_checkpoint_says_what_it_is(bench):
    run = trained(bench, rank=3, train_unembed=False)
    message = SaveWeights(name="mine", ttl_seconds=3600, user_metadata={"note": "x"})
    checkpoint = save(bench, run, message)
    assert (checkpoint.kind, checkpoint.checkpoint_id, checkpoint.step) == ("training", "weights/mine", 2)
    assert (checkpoint.rank, checkpoint.train_unembed, checkpoint.has_optimizer) == (3, False, True)
    assert checkpoint.base_model == BASE and checkpoint.user_metadata == {"note": "x"}
    assert checkpoint.expires_at == checkpoint.created + 3600
    found = manifest.verify(bench.data_dir / checkpoint.directory)
    assert (found.rank, found.alpha, found.step, found.seed) == (3, 32.0, 2, 1)
    assert checkpoint.size_bytes == found.size_bytes > 0


def test_a_name_is_taken_once_unless_it_is_overwritten_and_the_old_version_stays_as_it_was(bench):
    run = trained(bench)
    first = save(bench, run)
    before = (bench.data_dir / first.directory / "adapter_model.safetensors").read_bytes()
    refused = bench.one(run, SaveWeights(name="final"))
    assert refused.category == "user" and "overwrite=True" in refused.error
    next_step(bench, run)
    second = save(bench, run, SaveWeights(name="final", overwrite=True))
    assert second.directory != first.directory
    assert (bench.data_dir / first.directory / "adapter_model.safetensors").read_bytes() == before


def test_a_named_version_for_samplers_holds_the_adapter_alone(bench):
    checkpoint = save(bench, trained(bench), SaveWeightsForSampler(name="v1"))
    assert (checkpoint.kind, checkpoint.checkpoint_id) == ("sampler", "sampler_weights/v1")
    assert not checkpoint.has_optimizer
    files = {path.name for path in (bench.data_dir / checkpoint.directory).iterdir()}
    assert files == {"adapter_config.json", "adapter_model.safetensors", "manifest.json"}


def test_an_ephemeral_version_registers_its_sampler(bench):
    run = trained(bench)
    outcome = bench.one(run, SaveWeightsForSampler(sampler_id="s-0:sample:4"))
    assert json.loads(outcome.result) == {
        "type": "save_weights_for_sampler", "sampling_session_id": "s-0:sample:4",
    }  # fmt: skip
    sampler = Sampler.from_json(outcome.rows[0].value)
    assert (sampler.sampler_id, sampler.session_id, sampler.run_id) == ("s-0:sample:4", "s-0", run.run_id)
    assert (bench.data_dir / sampler.adapter_dir / "adapter_model.safetensors").is_file()


def test_saving_before_the_first_step_works_and_loads_with_an_optimizer_that_starts_anew(bench):
    run = trained(bench, steps=0)
    checkpoint = save(bench, run)
    other, outcome = create(bench, checkpoint, 1, with_optimizer=True)
    assert outcome.error is None
    assert same(next_step(bench, other), next_step(bench, run))


def test_a_checkpoint_of_another_shape_is_refused_naming_both_and_changes_nothing(bench):
    checkpoint = save(bench, trained(bench, rank=3))
    run = trained(bench, 1, rank=5)
    bench.one(run, forward_backward(seed=1))
    before = [tensor.clone() for tensor in [*run.weights().parameters(), *run.gradient]]
    message = LoadWeights(checkpoint_path=checkpoint.uri, checkpoint_dir=checkpoint.directory, with_optimizer=True)
    outcome = bench.one(run, message)
    assert outcome.category == "user" and "rank 3" in outcome.error and "rank 5" in outcome.error
    assert same([*run.weights().parameters(), *run.gradient], before)
    assert bench.one(run, OptimStep()).error is None


def test_a_checkpoint_of_other_base_weights_is_refused_and_an_older_one_that_does_not_say_is_taken(bench):
    run = trained(bench)
    checkpoint = save(bench, run)
    assert checkpoint.base_digest == bench.loaded.digest != ""
    path = bench.data_dir / checkpoint.directory / manifest.FILENAME
    written = path.read_text()
    assert bench.loaded.digest in written
    for base_digest, refusal in (("other", "made on other weights than those served as"), ("", None)):
        path.write_text(written.replace(bench.loaded.digest, base_digest))
        load = LoadWeights(checkpoint_path=checkpoint.uri, checkpoint_dir=checkpoint.directory, with_optimizer=True)
        error = bench.one(run, load).error
        assert refusal in error if refusal else error is None


def test_the_moments_of_a_version_for_samplers_are_not_there_to_load(bench):
    checkpoint = save(bench, trained(bench), SaveWeightsForSampler(name="v1"))
    run, outcome = create(bench, checkpoint, 1, with_optimizer=True)
    assert outcome.category == "user" and "no optimizer state" in outcome.error
    assert outcome.run_fields == {"state": "failed"}
    assert "no optimizer state" in bench.one(run, OptimStep()).error


def test_a_damaged_or_missing_checkpoint_fails_the_load_and_names_what_is_wrong(bench):
    checkpoint = save(bench, trained(bench))
    run = trained(bench, 1)
    before = [parameter.detach().clone() for parameter in run.weights().parameters()]
    message = LoadWeights(checkpoint_path=checkpoint.uri, checkpoint_dir=checkpoint.directory, with_optimizer=True)
    file = bench.data_dir / checkpoint.directory / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert "optimizer.safetensors" in bench.one(run, message).error
    assert "no longer on disk" in bench.one(run, replace(message, checkpoint_dir="tenants/t/runs/none")).error
    assert same(run.weights().parameters(), before)


def test_a_full_disk_fails_the_save_in_few_words_and_leaves_nothing_behind(bench, monkeypatch):
    run = trained(bench)

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(states, "save_tensors", full)
    outcome = bench.one(run, SaveWeights(name="final"))
    assert outcome.category == "server" and outcome.error.startswith(
        "the service's disk is full; ask for it again when the operator has made room ("
    )
    assert outcome.rows == ()
    assert not [path for path in bench.data_dir.rglob("*") if path.is_file()]
    monkeypatch.undo()
    assert bench.one(run, SaveWeights(name="final")).error is None
