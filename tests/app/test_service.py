import json

from openrl.app.factory import create_app
from openrl.app.settings import AppSettings
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store
from tests.app.conftest import Api


def test_a_client_learns_its_flags_whatever_it_says_of_itself(api: Api) -> None:
    for body in ({"sdk_version": "0.38.0"}, {}, {"sdk_version": "9.9", "something_new": 1}):
        flags = api.ok(api.post("/client/config", body))
        assert flags == {
            "parallel_fwdbwd_chunks": True,
            "proto_compress_fwdbwd": False,
            "custom_loss_server_side": False,
            "sample_max_concurrent_requests": 512,
            "sample_use_retrieve_futures": False,
            "sample_join_sampling_session": True,
            "pjwt_auth_enabled": False,
        }
        dynamic = api.ok(api.post("/client/dynamic_config", body))
        assert dynamic == {
            "refresh_interval_sec": 300,
            "sample_cancel_enabled": True,
            "sample_cancel_max_batch_size": 64,
        }


def test_the_sdk_reads_our_flags_as_its_own(api: Api) -> None:
    from tinker.types import ClientConfigResponse

    read = ClientConfigResponse.model_validate(api.ok(api.post("/client/config", {"sdk_version": "0.38.0"})))
    assert read.sample_max_concurrent_requests == 512 and read.parallel_fwdbwd_chunks


def test_the_health_check_answers_while_the_store_does(api: Api) -> None:
    assert api.ok(api.get("/healthz")) == {"status": "ok"}


def test_without_a_store_answers_are_503_and_say_when_to_come_back(tmp_path) -> None:
    store = Store.connect(StoreSettings(redis_url=f"unix://{tmp_path}/nobody.sock", data_dir=tmp_path))
    app = create_app(AppSettings(), store=store)
    for path in ("/api/v1/healthz", "/api/v1/sessions"):
        refused = app.test_client().get(path)
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) > 0
        assert refused.get_json()["error"]["code"] == "store_unavailable"
        assert str(tmp_path) not in refused.text


def test_capabilities_name_models_and_their_context(api: Api) -> None:
    assert api.ok(api.get("/get_server_capabilities")) == {
        "supported_models": [
            {"model_name": "tiny/random", "max_context_length": 64, "trainable": True, "sampleable": True}
        ]
    }


def test_telemetry_is_accepted_unread(api: Api, caplog) -> None:
    secret = {"events": [{"event": "UNHANDLED_EXCEPTION", "traceback": "X-API-Key: tml-secret"}], "anything": None}
    assert api.ok(api.post("/telemetry", secret)) == {"status": "accepted"}
    assert api.send("/telemetry", b"\xff not json", headers={"Content-Encoding": "zstd"}).status_code == 200
    assert "tml-secret" not in caplog.text


def test_the_description_lists_every_route_and_needs_nothing_from_elsewhere(api: Api) -> None:
    described = api.ok(api.get("/openapi.json"))
    assert {"/api/v1/forward_backward", "/api/v1/asample", "/api/v1/retrieve_future"} <= described["paths"].keys()
    step = described["paths"]["/api/v1/optim_step"]["post"]
    assert "application/json" in step["requestBody"]["content"]
    page = api.get("/docs")
    assert page.mimetype == "text/html" and "/api/v1/optim_step" in page.text
    assert "http://" not in page.text and "https://" not in page.text and "<script" not in page.text


def test_what_flask_refuses_is_json_too(api: Api) -> None:
    for response, status in ((api.get("/nowhere"), 404), (api.get("/optim_step"), 405)):
        assert response.status_code == status
        assert response.get_json()["error"]["message"] == response.get_json()["detail"]


def test_what_nobody_foresaw_is_a_500_without_its_inside(api: Api, app, caplog) -> None:
    app.config["PROPAGATE_EXCEPTIONS"] = False

    @app.get("/api/v1/broken")
    def broken() -> str:
        raise RuntimeError("secret path /data/x")

    answer = api.get("/broken")
    assert answer.status_code == 500 and "secret" not in answer.text
    number = answer.headers["X-Request-Id"]
    assert number and number in answer.text and number in caplog.text and "secret path" in caplog.text


def test_numbers_that_json_lacks_never_leave(app) -> None:
    import pytest

    with pytest.raises(ValueError, match="JSON"):
        app.json.dumps({"x": float("nan")})
    assert json.loads(app.json.dumps({"x": 1.5})) == {"x": 1.5}
