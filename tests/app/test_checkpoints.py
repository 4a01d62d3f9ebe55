from datetime import datetime

from openrl.tasks.messages import SaveWeights, SaveWeightsForSampler, decode
from openrl.tasks.operations import Outcome
from tests.app.conftest import Api, Worker


def saved(api: Api, worker: Worker, name: str = "ck1", kind: str = "training", seq: int = 1, **changes) -> str:
    """Save under `name` in a new run; return the run."""
    run = api.run()
    route = "save_weights" if kind == "training" else "save_weights_for_sampler"
    api.ok(api.post(f"/{route}", {"model_id": run, "path": name, "seq_id": seq}))
    worker.step({route: worker.save("local", run, name, kind, **changes)})
    return run


def test_a_save_is_promised_with_what_the_client_said(api: Api, worker: Worker) -> None:
    run = api.run()
    body = {
        "model_id": run,
        "path": "ck1",
        "seq_id": 1,
        "ttl_seconds": 3600,
        "overwrite": True,
        "user_metadata": {"n": 1, "s": "x"},
        "type": "save_weights",
    }
    assert api.ok(api.post("/save_weights", body)) == {"request_id": f"{run}:1", "model_id": run}
    message = decode("save_weights", worker.step()[1].body)
    expected = SaveWeights(name="ck1", overwrite=True, ttl_seconds=3600, user_metadata={"n": "1", "s": "x"})
    assert message == expected


def test_a_repeated_save_is_one_operation(api: Api, worker: Worker) -> None:
    run = api.run()
    body = {"model_id": run, "path": "final", "seq_id": 1, "ttl_seconds": None, "type": "save_weights"}
    assert api.ok(api.post("/save_weights", body)) == api.ok(api.post("/save_weights", body))
    assert [operation.kind for operation in worker.step()] == ["create_model", "save_weights"]


def test_an_ephemeral_save_names_the_sessions_next_sampler(api: Api, worker: Worker) -> None:
    run = api.run()
    session = run.partition(":")[0]
    body = {"model_id": run, "sampling_session_seq_id": 0, "kind": "snapshot", "seq_id": 1}
    api.ok(api.post("/save_weights_for_sampler", body))
    message = decode("save_weights_for_sampler", worker.step()[1].body)
    assert message == SaveWeightsForSampler(sampler_id=f"{session}:sample:0")
    assert api.post("/save_weights_for_sampler", body | {"seq_id": 2}).status_code == 422


def test_a_named_save_for_sampling_keeps_its_name(api: Api, worker: Worker) -> None:
    run = api.run()
    body = {"model_id": run, "path": "final", "kind": "snapshot", "seq_id": 1, "type": "save_weights_for_sampler"}
    api.ok(api.post("/save_weights_for_sampler", body))
    assert decode("save_weights_for_sampler", worker.step()[1].body) == SaveWeightsForSampler(name="final")


def test_weights_info_says_what_a_checkpoint_is(api: Api, worker: Worker) -> None:
    run = saved(api, worker, rank=16, train_mlp=False)
    assert api.ok(api.post("/weights_info", {"tinker_path": f"tinker://{run}/weights/ck1"})) == {
        "base_model": "tiny/random",
        "is_lora": True,
        "lora_rank": 16,
        "train_attn": True,
        "train_mlp": False,
        "train_unembed": True,
        "optimizer_config": {"type": "adamw"},
    }


def test_checkpoints_are_listed_as_the_sdk_reads_them(api: Api, worker: Worker) -> None:
    from tinker.types import CheckpointsListResponse

    run = saved(api, worker, user_metadata={"k": "v"}, expires_at=4_000_000_000.0)
    for path in (f"/training_runs/{run}/checkpoints", "/checkpoints?limit=5"):
        listed = api.ok(api.get(path))
        read = CheckpointsListResponse.model_validate(listed).checkpoints[0]
        assert (read.checkpoint_id, read.checkpoint_type) == ("weights/ck1", "training")
        assert read.tinker_path == f"tinker://{run}/weights/ck1"
        assert read.time == datetime.fromisoformat("2023-11-14T22:13:20+00:00")
        assert read.expires_at is not None and read.expires_at.tzinfo is not None
        assert read.user_metadata == {"k": "v"} and read.size_bytes == 10
    assert listed["cursor"] == {"offset": 0, "limit": 5, "total_count": 1}


def test_runs_are_listed_with_their_newest_checkpoints(api: Api, worker: Worker) -> None:
    from tinker.types import TrainingRunsResponse

    first = saved(api, worker)
    second = saved(api, worker, "s", kind="sampler")
    read = TrainingRunsResponse.model_validate(api.ok(api.get("/training_runs?limit=20&offset=0&access_scope=owned")))
    assert [run.training_run_id for run in read.training_runs] == [second, first]
    newest, oldest = read.training_runs
    assert newest.last_checkpoint is None and newest.last_sampler_checkpoint.checkpoint_id == "sampler_weights/s"
    assert oldest.last_checkpoint.checkpoint_id == "weights/ck1" and oldest.last_sampler_checkpoint is None
    assert (oldest.model_owner, oldest.is_lora, oldest.lora_rank, oldest.corrupted) == ("local", True, 8, False)
    assert read.cursor.total_count == 2


def test_a_run_that_could_not_be_created_says_so(api: Api, worker: Worker) -> None:
    run = api.run()
    worker.step({"create_model": Outcome(error="no", run_fields={"state": "failed"})})
    assert api.ok(api.get(f"/training_runs/{run}"))["corrupted"] is True


def test_metadata_of_a_run_comes_back_as_text(api: Api) -> None:
    run = api.ok(api.create_model(api.session(), user_metadata={"renderer_name": "role_colon", "n": 3}))["model_id"]
    assert api.ok(api.get(f"/training_runs/{run}"))["user_metadata"] == {"renderer_name": "role_colon", "n": "3"}
