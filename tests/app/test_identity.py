"""Tokens in place of keys, and what a key may know and do about itself."""

from __future__ import annotations

import dataclasses
import time

import jwt
import pytest
from flask import Flask

from openrl.app.factory import create_app
from openrl.app.settings import AppSettings
from openrl.app.tokens import Tokens
from openrl.tasks import audit
from openrl.tasks.signing import Signer
from openrl.tasks.store import Store
from openrl.tasks.tenants import READ, Tenants
from tests.app.conftest import Api


@pytest.fixture
def ada(api: Api, store: Store) -> Api:
    key = Tenants(store).create_key("ada", "ada@example.org", note="laptop", scopes=[READ])
    return dataclasses.replace(api, key=key)


def exchanged(api: Api) -> Api:
    token = api.ok(api.post("/auth/token"))["jwt"]
    return dataclasses.replace(api, key=token)


def claims(token: str) -> dict:
    return dict(jwt.decode(token, options={"verify_signature": False}))


def refused(api: Api, *words: str) -> None:
    answer = api.get("/sessions")
    assert (answer.status_code, answer.get_json()["error"]["code"]) == (401, "invalid_token"), answer.text
    assert answer.headers["WWW-Authenticate"] == 'Bearer error="invalid_token"'
    assert all(word in answer.get_json()["detail"] for word in words), answer.text


def test_a_token_stands_for_its_key_with_its_scopes_and_for_a_short_time(ada: Api, store: Store) -> None:
    token = exchanged(ada)
    assert token.key.startswith("eyJ") and ada.key[4:] not in token.key
    said = claims(token.key)
    (key,) = Tenants(store).list_keys()
    assert said["sub"] == f"openrl:key:{key.key_id}"
    assert (said["org_id"], said["email"], said["exp"] - said["iat"]) == ("ada", "ada@example.org", 900)
    token.ok(token.get("/sessions"))
    assert token.post("/create_session", {}).status_code == 403
    assert token.ok(token.get("/auth/apikey/me"))["key_id"] == key.number


def test_a_token_counts_at_once_where_another_clock_is_behind(ada: Api, store: Store) -> None:
    later = claims(exchanged(ada).key)
    later["iat"] += 60
    token = jwt.encode(later, Signer(store).sign("token secret"), algorithm="HS256")
    ada.ok(dataclasses.replace(ada, key=token).get("/sessions"))


def test_revoking_the_key_ends_its_tokens_at_once(ada: Api, store: Store) -> None:
    token = exchanged(ada)
    Tenants(store).revoke_key(Tenants(store).list_keys()[0].key_id)
    refused(token)


def test_a_token_does_not_outlive_its_key_nor_the_token_that_it_was_given_for(api: Api, store: Store) -> None:
    ends = time.time() + 300
    mine = dataclasses.replace(api, key=Tenants(store).create_key("ada", expires=ends))
    assert claims(exchanged(mine).key)["exp"] == int(ends)
    settings = dataclasses.replace(AppSettings(), auth_token_ttl_s=120)
    short = Tokens(Signer(store), ttl_s=120)
    key = Tenants(store).list_keys()[0]
    first = short.give("ada", key)
    again = exchanged(dataclasses.replace(mine, key=first))
    assert claims(again.key)["exp"] == claims(first)["exp"]
    assert settings.auth_token_ttl_s == 120


def test_an_expired_token_says_so_and_a_forged_one_learns_nothing(ada: Api, store: Store, monkeypatch) -> None:
    (key,) = Tenants(store).list_keys()
    with monkeypatch.context() as past:
        now = time.time()
        past.setattr("openrl.app.tokens.time.time", lambda: now - 1000)
        old = Tokens(Signer(store), ttl_s=900).give("ada", key)
    refused(dataclasses.replace(ada, key=old), "has expired")
    genuine = exchanged(ada).key
    head, body, signature = genuine.split(".")
    said = claims(genuine)
    for forged in (
        jwt.encode(said, "another secret, long enough for its algorithm", algorithm="HS256"),
        jwt.encode(said, "", algorithm="none"),
        jwt.encode(said | {"iss": "x"}, Signer(store).sign("token secret"), algorithm="HS256"),
        jwt.encode({"key_id": key.key_id}, Signer(store).sign("token secret"), algorithm="HS256"),
        f"{head}.{body}.{signature[:-2]}",
        f"{head}.{body}",
        "eyJ",
        "eyJ" + "x" * 9000,
        "eyJ\u00e9.x.y",
    ):
        answer = dataclasses.replace(ada, key=forged).get("/sessions")
        assert answer.status_code == 401 and "expired" not in answer.text, forged
        assert key.key_id not in answer.text


def test_while_there_are_no_keys_a_token_is_this_machines_own_and_ends_with_the_first_key(
    api: Api, store: Store
) -> None:
    token = exchanged(api)
    assert claims(token.key)["org_id"] == "local"
    token.ok(token.get("/sessions"))
    assert token.get("/sessions", headers={"Host": "evil.example"}).status_code == 403
    me = token.ok(token.get("/auth/apikey/me"))
    assert (me["key_id"], me["name"]) == (0, "local") and "no API keys" in me["note"]
    assert token.client.delete("/api/v1/auth/apikey/me", headers={"X-API-Key": "tml-x"}).status_code == 404
    Tenants(store).create_key("ada")
    refused(token)


def test_a_key_is_told_what_it_is_and_may_revoke_itself_and_no_other(ada: Api, store: Store) -> None:
    other = dataclasses.replace(ada, key=Tenants(store).create_key("ada"))
    me = ada.ok(ada.get("/auth/apikey/me"))
    details = {"org_details": {"name": "ada"}, "user_details": {"email": "ada@example.org"}}
    number = next(key.number for key in Tenants(store).list_keys() if key.note == "laptop")
    assert me == {
        "key_id": number, "name": "ada@example.org", "note": "laptop", "details": details, "scopes": ["read"],
        "expires": None,
    }  # fmt: skip
    answer = ada.client.delete("/api/v1/auth/apikey/me", headers={"X-API-Key": ada.key})
    assert answer.status_code == 200
    assert ada.get("/sessions").status_code == 401 and other.get("/sessions").status_code == 200
    revoked = audit.entries(store, "ada", since=0, before=time.time() + 1)[-1]
    assert revoked.event == "key_revoked" and revoked.details["actor"] == f"key:{revoked.details['key_id']}"


def test_the_sdk_is_told_to_exchange_its_key_only_where_an_operator_says_so(app: Flask, api: Api, store: Store) -> None:
    assert api.ok(api.post("/client/config"))["pjwt_auth_enabled"] is False
    told = create_app(AppSettings.from_env({"OPENRL_PJWT_AUTH_ENABLED": "true"}), store=store).test_client()
    assert told.post("/api/v1/client/config", json={}).get_json()["pjwt_auth_enabled"] is True
    with pytest.raises(ValueError, match="OPENRL_AUTH_TOKEN_TTL_S"):
        AppSettings.from_env({"OPENRL_AUTH_TOKEN_TTL_S": "60"})
