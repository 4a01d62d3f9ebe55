"""Exports: PEFT's files alone, under a name that is taken once, and nothing of them is done again."""

import json

import torch
from safetensors.torch import load_file

from openrl.tasks.messages import OptimStep, SaveWeights, SaveWeightsExternal
from openrl.tasks.registry import Checkpoint
from openrl.workers.trainer.recovery import REPEATED
from tests.trainer.bench import forward_backward


def test_an_export_is_the_adapter_without_the_optimizer_and_says_so(bench):
    run = bench.run(rank=3, train_mlp=False)
    bench.one(run, forward_backward())
    assert bench.one(run, OptimStep(learning_rate=0.01)).error is None
    outcome = bench.one(run, SaveWeightsExternal(name="e1", ttl_seconds=3600, user_metadata={"a": "b"}))
    [row] = outcome.rows
    checkpoint = Checkpoint.from_json(row.value)
    directory = bench.data_dir / checkpoint.directory
    files = {file.name: file.stat().st_size for file in directory.iterdir()}
    assert files.pop("manifest.json") and set(files) == {"adapter_config.json", "adapter_model.safetensors"}
    assert json.loads(outcome.result) == {
        "type": "save_weights_external", "path": f"tinker://{run.run_id}/external_weights/e1",
        "size_bytes": sum(files.values()),
    }  # fmt: skip
    assert (row.field, checkpoint.kind) == ("external_weights/e1", "external")
    assert (checkpoint.has_optimizer, checkpoint.step, checkpoint.rank) == (False, 1, 3)
    assert checkpoint.expires_at == checkpoint.created + 3600 and checkpoint.user_metadata == {"a": "b"}
    tensors = load_file(directory / "adapter_model.safetensors")
    for name, parameter in run.weights().named_parameters():
        assert torch.equal(tensors[f"base_model.model.{name}.weight"], parameter.detach())


def test_the_name_of_an_export_is_taken_once_and_is_no_other_checkpoints(bench):
    run = bench.run()
    [row] = bench.one(run, SaveWeightsExternal(name="e1")).rows
    bench.registry.known[row.field] = Checkpoint.from_json(row.value)
    refused = bench.one(run, SaveWeightsExternal(name="e1"))
    assert refused.category == "user" and f"tinker://{run.run_id}/external_weights/e1" in refused.error
    assert refused.rows == ()
    assert bench.one(run, SaveWeights(name="e1")).error is None


def test_an_export_changes_nothing_of_its_run_and_is_not_done_again_after_a_crash(bench):
    run = bench.run()
    bench.one(run, forward_backward())
    before = [tensor.clone() for tensor in [*run.weights().parameters(), *run.gradient]]
    assert bench.one(run, SaveWeightsExternal(name="e1")).error is None
    after = [*run.weights().parameters(), *run.gradient]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert SaveWeightsExternal.kind not in REPEATED
