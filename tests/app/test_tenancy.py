"""Two tenants: what one has does not exist for the other, on any route."""

from tests.app.conftest import Api, Worker


def test_nothing_of_a_tenant_exists_for_another(two: tuple[Api, Api], worker: Worker) -> None:
    ada, bob = two
    run = ada.run()
    session = run.partition(":")[0]
    ada.ok(ada.post("/save_weights", {"model_id": run, "path": "ck", "seq_id": 1}))
    ada.ok(ada.post("/save_weights_for_sampler", {"model_id": run, "path": "s", "seq_id": 2}))
    worker.step(
        {
            "save_weights": worker.save("ada", run, "ck"),
            "save_weights_for_sampler": worker.save("ada", run, "s", "sampler"),
        }
    )
    sampling = {"session_id": session, "sampling_session_seq_id": 0, "base_model": "tiny/random"}
    sampler = ada.ok(ada.post("/create_sampling_session", sampling))["sampling_session_id"]
    own = bob.session()
    weights, sampler_weights = f"tinker://{run}/weights/ck", f"tinker://{run}/sampler_weights/s"
    sample = {
        "prompt": {"chunks": [{"tokens": [1]}]},
        "sampling_params": {"max_tokens": 1},
        "sampling_session_id": sampler,
        "seq_id": 0,
    }
    attempts = [
        bob.forward_backward(run, 3),
        bob.forward_backward(run, 3, tokens=[]),
        bob.optim_step(run, 3),
        bob.post("/save_weights", {"model_id": run, "path": "x", "seq_id": 3}),
        bob.post("/save_weights", {"model_id": run, "path": "../x", "seq_id": 3}),
        bob.post("/load_weights", {"model_id": run, "seq_id": 3, "path": weights, "optimizer": False}),
        bob.post("/load_weights", {"session_id": own, "model_seq_id": 0, "path": weights, "optimizer": False}),
        bob.post("/weights_info", {"tinker_path": weights}),
        bob.post("/get_info", {"model_id": run}),
        bob.create_model(session, 7),
        bob.post("/create_sampling_session", sampling | {"sampling_session_seq_id": 5}),
        bob.post(
            "/create_sampling_session",
            {"session_id": own, "sampling_session_seq_id": 0, "model_path": sampler_weights},
        ),
        bob.post("/asample", sample),
        bob.get(f"/samplers/{sampler}"),
        bob.get(f"/training_runs/{run}"),
        bob.get(f"/training_runs/{run}/checkpoints"),
        bob.get(f"/sessions/{session}"),
        bob.post(f"/sessions/{session}/finish", {}),
        bob.post("/session_heartbeat", {"session_id": session}),
        bob.poll(f"{run}:0"),
    ]
    statuses = [attempt.status_code for attempt in attempts]
    # Two of them are refused before anybody looks whether the run exists.
    assert {status for status in statuses if status != 422} == {404} and statuses.count(422) == 1, statuses
    assert bob.ok(bob.get("/training_runs"))["training_runs"] == []
    assert bob.ok(bob.get("/checkpoints"))["checkpoints"] == []
    assert bob.ok(bob.get("/sessions"))["sessions"] == [own]
    ada.ok(ada.post("/session_heartbeat", {"session_id": session}))
    ada.ok(ada.forward_backward(run, 3))
    assert [operation.seq_id for operation in worker.step()] == [3]


def test_two_tenants_may_use_one_idempotency_key(two: tuple[Api, Api]) -> None:
    sessions = {
        api.ok(api.post("/create_session", {"tags": []}, headers={"X-Idempotency-Key": "same"}))["session_id"]
        for api in two
    }
    assert len(sessions) == 2


def test_metadata_over_its_size_is_refused(two: tuple[Api, Api]) -> None:
    answer = two[0].post("/create_session", {"tags": [], "user_metadata": {"x": "y" * 70_000}})
    assert answer.status_code == 422 and "user_metadata" in answer.text and len(answer.text) < 1000
