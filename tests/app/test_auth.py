import dataclasses

import pytest
from flask import Flask

from openrl.app.factory import create_app
from openrl.app.settings import AppSettings
from openrl.tasks.store import Store
from openrl.tasks.tenants import Tenants
from tests.app.conftest import Api


def routes(app: Flask) -> list[tuple[str, str]]:
    """Every method and path of the API, ids filled in."""
    return [
        (method, rule.rule.replace("<", "").replace(">", ""))
        for rule in app.url_map.iter_rules()
        if rule.rule.startswith("/api/v1")
        for method in sorted((rule.methods or set()) - {"HEAD", "OPTIONS"})
    ]


def test_without_any_key_everybody_on_this_machine_is_the_local_tenant(api: Api) -> None:
    for key in ("", "tml-anything"):
        assert dataclasses.replace(api, key=key).get("/sessions").status_code == 200


def test_from_the_first_key_on_a_request_without_one_is_refused_at_once(api: Api, store: Store) -> None:
    assert api.get("/sessions").status_code == 200
    key = Tenants(store).create_key("ada")
    for wrong in ("", "tml-wrong", key[:-1], key.upper()):
        refused = dataclasses.replace(api, key=wrong).get("/sessions")
        assert refused.status_code == 401
        assert refused.get_json()["error"]["code"] == "unauthorized"
        assert "openrl keys create" in refused.get_json()["detail"]
    assert dataclasses.replace(api, key=key).get("/sessions").status_code == 200


def test_a_revoked_key_ends_at_once_and_opens_nothing(api: Api, store: Store) -> None:
    tenants = Tenants(store)
    key = tenants.create_key("ada")
    assert dataclasses.replace(api, key=key).get("/sessions").status_code == 200
    tenants.revoke_key(tenants.list_keys()[0].key_id)
    for each in (key, ""):
        assert dataclasses.replace(api, key=each).get("/sessions").status_code == 401


def test_every_route_but_the_health_check_wants_a_key(app: Flask, api: Api, store: Store) -> None:
    Tenants(store).create_key("ada")
    assert len(routes(app)) > 20
    for method, path in [*routes(app), ("POST", "/api/v1/no_such_route"), ("GET", "/")]:
        for headers in ({}, {"Content-Type": "application/x-protobuf", "Accept": "application/x-protobuf"}):
            response = api.client.open(path, method=method, headers=headers)
            expected = 200 if path == "/api/v1/healthz" else 401
            assert (response.status_code, response.mimetype) == (expected, "application/json"), (method, path)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8000", "LOCALHOST", "[::1]:8000", "127.0.0.1:1"])
@pytest.mark.parametrize("origin", [None, "http://localhost:3000", "http://127.0.0.1:8000", "http://[::1]"])
def test_without_keys_this_machine_is_served_by_its_own_name(api: Api, host: str, origin: str | None) -> None:
    headers = {"Host": host, **({"Origin": origin} if origin else {})}
    assert api.get("/sessions", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:8000"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "localhost.evil.example"},
        {"Host": "evil@example"},
        {"Host": "127.0.0.1@evil.example"},
        {"Host": "[::1"},
        {"Host": ""},
        {"Host": "10.0.0.1:8000"},
        {"Origin": "https://evil.example"},
        {"Origin": "http://localhost.evil.example"},
        {"Origin": "null"},
        {"Origin": ""},
    ],
)
def test_without_keys_another_name_or_a_foreign_page_is_refused_with_what_opens_the_service(
    api: Api, store: Store, headers: dict[str, str]
) -> None:
    for refused in (api.get("/sessions", headers=headers), api.post("/create_session", {"tags": []}, headers=headers)):
        assert (refused.status_code, refused.get_json()["error"]["code"]) == (403, "not_local")
        assert next(iter(headers)) in refused.get_json()["detail"] and "openrl keys create" in refused.text
    assert api.ok(api.get("/sessions"))["sessions"] == []
    key = Tenants(store).create_key("ada")
    assert dataclasses.replace(api, key=key).get("/sessions", headers=headers).status_code == 200


def test_a_service_open_to_a_network_serves_nobody_without_a_key(store: Store) -> None:
    app = create_app(AppSettings(host="0.0.0.0"), store=store)
    assert app.test_client().get("/api/v1/sessions").status_code == 401


@pytest.mark.filterwarnings("error")
def test_a_key_of_strange_bytes_is_only_wrong(api: Api, store: Store) -> None:
    Tenants(store).create_key("ada")
    assert dataclasses.replace(api, key="tml-\u00ff\u00fe").get("/sessions").status_code == 401
