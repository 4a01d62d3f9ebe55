"""Exported adapters: promised, linked, streamed to whoever holds a link, and to nobody else."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from werkzeug.test import TestResponse

from openrl.app.factory import create_app
from openrl.app.settings import AppSettings
from openrl.tasks.messages import SaveWeightsExternal, decode
from openrl.tasks.store import Store
from openrl.tasks.tenants import Tenants
from openrl.workers.weights import layout
from tests.app.conftest import Api, Worker

WEIGHTS = bytes(range(256)) * 5
CONFIG = b'{"peft_type": "LORA"}'


def exported(api: Api, worker: Worker, tenant: str = "local", **changes: object) -> str:
    """Export as `e1` in a new run of `tenant`, files included; return the run."""
    run = api.run()
    api.ok(api.post("/save_weights_external", {"model_id": run, "path": "e1", "seq_id": 1}))
    directory = layout.external_dir(tenant, run, "e1", 7)
    worker.step({"save_weights_external": worker.save(tenant, run, "e1", "external", directory=directory, **changes)})
    path = layout.resolve(api.services.store.settings.data_dir, directory)
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_bytes(CONFIG)
    (path / "adapter_model.safetensors").write_bytes(WEIGHTS)
    (path / "manifest.json").write_text("{}")
    return run


def links(api: Api, run: str, **options: object) -> dict:
    return api.ok(api.get(f"/training_runs/{run}/checkpoints/external_weights/e1/external_weights_urls", **options))


def fetch(api: Api, url: str, method: str = "GET", *, whole: bool = True, **headers: str) -> TestResponse:
    """Open a link as a plain HTTP client does, without a key; read all of it unless told not to."""
    parts = urlsplit(url)
    return api.client.open(f"{parts.path}?{parts.query}", method=method, headers=headers, buffered=whole)


def refused(response: TestResponse, status: int, *words: str) -> None:
    assert response.status_code == status, response.text
    assert all(word in response.get_json()["detail"] for word in words), response.text


def test_an_export_is_promised_with_what_the_client_said(api: Api, worker: Worker) -> None:
    run = api.run()
    body = {"model_id": run, "path": "e1", "seq_id": 1, "ttl_seconds": 3600, "type": "save_weights_external"}
    promise = api.ok(api.post("/save_weights_external", body))
    assert promise == {"request_id": f"{run}:1", "model_id": run}
    assert api.ok(api.post("/save_weights_external", body)) == promise
    [_, operation] = worker.step()
    assert decode(operation.kind, operation.body) == SaveWeightsExternal(name="e1", ttl_seconds=3600)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"age_encryption_recipients": ["age1xyz"]}, "age_encryption_recipients"),
        ({"age_encryption_recipients": []}, "age_encryption_recipients"),
        ({"path": "../e1"}, "../e1"),
        ({"path": "a/b"}, "a/b"),
        ({"ttl_seconds": 300}, "ttl_seconds = 300 must be 3600 to 315360000"),
        ({"overwrite": True}, "overwrite"),
        ({"format": "gguf"}, "format"),
    ],
)
def test_a_bad_export_is_refused_by_name_and_uses_up_its_number(
    api: Api, worker: Worker, changes: dict, word: str
) -> None:
    run = api.run()
    body = {"model_id": run, "path": "e1", "seq_id": 1, "type": "save_weights_external"}
    refused(api.post("/save_weights_external", body | changes), 422, word)
    api.ok(api.forward_backward(run, 2))
    api.ok(api.optim_step(run, 3))
    outcomes = [(operation.kind, operation.voids) for operation in worker.step()]
    assert outcomes == [("create_model", False), ("refused", False), ("forward_backward", False), ("optim_step", False)]


def test_the_sdk_reads_the_links_and_each_gives_its_file_without_a_key(
    two: tuple[Api, Api], app: object, worker: Worker
) -> None:
    from tinker.types import ExternalWeightsUrlsResponse

    ada, _ = two
    run = exported(ada, worker, "ada")
    read = ExternalWeightsUrlsResponse.model_validate(links(ada, run))
    assert timedelta(minutes=14) < read.expires - datetime.now(UTC) <= timedelta(minutes=15)
    assert sorted(read.urls) == ["adapter_config.json", "adapter_model.safetensors"]
    for name, content in (("adapter_config.json", CONFIG), ("adapter_model.safetensors", WEIGHTS)):
        assert read.urls[name].startswith("http://localhost/api/v1/exports/ada/")
        answer = fetch(ada, read.urls[name])
        assert (answer.status_code, answer.data, answer.content_length) == (200, content, len(content))
        assert answer.headers["Content-Disposition"] == f"attachment; filename={name}"
        assert answer.headers["Cache-Control"] == "private, no-store"
        head = fetch(ada, read.urls[name], "HEAD")
        assert (head.status_code, head.data, head.content_length) == (200, b"", len(content))
        refused(fetch(ada, read.urls[name], "DELETE"), 401)


def test_links_begin_with_what_the_client_reached_or_with_the_public_address(
    api: Api, store: Store, settings: AppSettings, worker: Worker
) -> None:
    # Another name than this machine's own is answered only with a key.
    api = replace(api, key=Tenants(store).create_key("ada"))
    run = exported(api, worker, "ada")
    url = links(api, run, base_url="http://box.example:81")["urls"]["adapter_config.json"]
    assert url.startswith("http://box.example:81/api/v1/exports/ada/runs/")
    behind = create_app(replace(settings, public_url="https://rl.example/openrl/"), store=store)
    there = replace(api, client=behind.test_client(), services=behind.extensions["openrl"])
    url = links(there, run)["urls"]["adapter_config.json"]
    assert url.startswith("https://rl.example/openrl/api/v1/exports/ada/runs/")
    there.services.close()


def test_a_broken_download_goes_on_where_it_was(api: Api, worker: Worker) -> None:
    url = links(api, exported(api, worker))["urls"]["adapter_model.safetensors"]
    whole = fetch(api, url)
    assert whole.headers["Accept-Ranges"] == "bytes"
    part = fetch(api, url, Range="bytes=1000-", **{"If-Range": whole.headers["ETag"]})
    assert (part.status_code, part.data) == (206, WEIGHTS[1000:])
    assert part.headers["Content-Range"] == f"bytes 1000-{len(WEIGHTS) - 1}/{len(WEIGHTS)}"
    assert fetch(api, url, Range="bytes=-4").data == WEIGHTS[-4:]
    assert fetch(api, url, Range="bytes=3-5").data == WEIGHTS[3:6]
    assert fetch(api, url, Range="bytes=99999-").status_code == 416
    other = fetch(api, url, Range="bytes=1000-", **{"If-Range": '"another version"'})
    assert (other.status_code, other.data) == (200, WEIGHTS)


def test_a_file_larger_than_memory_is_streamed(api: Api, worker: Worker) -> None:
    run = exported(api, worker)
    file = layout.resolve(
        api.services.store.settings.data_dir, layout.external_dir("local", run, "e1", 7) + "/adapter_model.safetensors"
    )
    size = 1 << 40
    with file.open("wb") as sparse:
        sparse.seek(size - 4)
        sparse.write(b"last")
    url = links(api, run)["urls"]["adapter_model.safetensors"]
    with fetch(api, url, whole=False) as whole:
        assert whole.content_length == size
        first = next(iter(whole.response))
        assert 0 < len(first) <= 1 << 20
    with fetch(api, url, Range=f"bytes={size - 6}-") as end:
        assert (end.status_code, end.data) == (206, b"\0\0last")


def test_a_link_that_was_altered_opens_nothing(two: tuple[Api, Api], worker: Worker) -> None:
    ada, bob = two
    run, other = exported(ada, worker, "ada"), exported(bob, worker, "bob")
    url = links(ada, run)["urls"]["adapter_config.json"]
    theirs = links(bob, other)["urls"]["adapter_config.json"]
    expires, signature = (parse_qs(urlsplit(url).query)[name][0] for name in ("expires", "signature"))
    bare = url.partition("?")[0]
    for altered in (
        url.replace("adapter_config.json", "adapter_model.safetensors"),
        url.replace("adapter_config.json", "manifest.json"),
        url.replace("adapter_config.json", "../e1.7/adapter_config.json"),
        url.replace("/ada/", "/bob/"),
        theirs.partition("?")[0] + "?" + urlsplit(url).query,
        f"{bare}?expires={int(expires) + 1}&signature={signature}",
        f"{bare}?expires=0{expires}&signature={signature}",
        f"{bare}?signature={signature}",
        f"{bare}?expires={expires}&signature={signature[:-1]}",
        f"{bare}?expires={expires}&signature={signature.upper()}",
        f"{bare}?expires={expires}&signature=%C3%A9%ED%A0%80",
    ):
        refused(fetch(ada, altered), 403, "altered", "external_weights_urls")
    refused(fetch(ada, bare), 401, "signature")
    refused(fetch(ada, f"{url}&x=1"), 422, "x")
    assert fetch(ada, url).status_code == 200


def test_an_expired_link_is_gone_and_says_where_a_new_one_comes_from(api: Api, worker: Worker) -> None:
    run = exported(api, worker)
    file = f"runs/{run.replace(':', '_')}/external_weights/e1.7/adapter_config.json"
    past = str(int(time.time()) - 1)
    signature = api.services.signer.sign("GET", "local", file, past)
    path = f"/exports/local/{file}?expires={past}&signature={signature}"
    refused(api.get(path), 410, "expired", "external_weights_urls")


def test_links_end_with_their_checkpoint(api: Api, worker: Worker) -> None:
    soon = time.time() + 60
    run = exported(api, worker, expires_at=soon)
    assert links(api, run)["expires"] == datetime.fromtimestamp(int(soon), UTC).isoformat()
    gone = exported(api, worker, expires_at=time.time() - 1)
    where = f"/training_runs/{gone}/checkpoints/external_weights/e1/external_weights_urls"
    refused(api.get(where), 404, "external_weights/e1")


def test_a_signature_is_no_way_out_of_the_tenants_own_files(api: Api, worker: Worker, tmp_path: Path) -> None:
    run = exported(api, worker)
    home = layout.resolve(api.services.store.settings.data_dir, layout.tenant_dir("local"))
    (tmp_path / "secret").write_text("x")
    (home / "link").symlink_to(tmp_path / "secret")
    other = home.parent / "other" / "file"
    other.parent.mkdir()
    other.write_text("x")
    expires = str(int(time.time()) + 60)
    for file in ("link", "../other/file", f"runs/{run}", "none", "runs", "../../../secret"):
        signature = api.services.signer.sign("GET", "local", file, expires)
        with pytest.raises(LookupError):
            layout.tenant_file(api.services.store.settings.data_dir, "local", file)
        path = f"/exports/local/{file}?expires={expires}&signature={signature}"
        assert api.get(path).status_code in (403, 404), file
    signature = api.services.signer.sign("GET", "local", "link", expires)
    refused(api.get(f"/exports/local/link?expires={expires}&signature={signature}"), 404, "link")


def test_a_deleted_export_is_off_the_lists_and_off_the_disk_and_its_links_open_nothing(
    api: Api, worker: Worker
) -> None:
    run = exported(api, worker)
    url = links(api, run)["urls"]["adapter_config.json"]
    listed = api.ok(api.get(f"/training_runs/{run}/checkpoints"))["checkpoints"]
    assert [(c["checkpoint_id"], c["checkpoint_type"]) for c in listed] == [("external_weights/e1", "external")]
    where = f"/training_runs/{run}/checkpoints/external_weights/e1"
    assert api.client.delete(f"/api/v1{where}").status_code == 200
    refused(fetch(api, url), 404, "deleted")
    assert api.ok(api.get(f"/training_runs/{run}/checkpoints"))["checkpoints"] == []
    refused(api.client.delete(f"/api/v1{where}"), 404, "external_weights/e1")
    refused(api.get(f"{where}/external_weights_urls"), 404, "external_weights/e1")


def test_a_training_checkpoint_that_is_deleted_keeps_its_files_for_the_runs_that_load_it(
    api: Api, worker: Worker
) -> None:
    run = api.run()
    api.ok(api.post("/save_weights", {"model_id": run, "path": "ck", "seq_id": 1}))
    worker.step({"save_weights": worker.save("local", run, "ck", directory="tenants/local/kept")})
    kept = layout.resolve(api.services.store.settings.data_dir, "tenants/local/kept")
    kept.mkdir(parents=True)
    assert api.client.delete(f"/api/v1/training_runs/{run}/checkpoints/weights/ck").status_code == 200
    refused(api.post("/weights_info", {"tinker_path": f"tinker://{run}/weights/ck"}), 404)
    assert kept.is_dir()


def test_a_checkpoint_is_kept_for_as_long_as_it_was_said_last(api: Api, worker: Worker) -> None:
    run = exported(api, worker)
    where = f"/api/v1/training_runs/{run}/checkpoints/external_weights/e1/ttl"

    def expires_at() -> datetime | None:
        [listed] = api.ok(api.get(f"/training_runs/{run}/checkpoints"))["checkpoints"]
        return listed["expires_at"] and datetime.fromisoformat(listed["expires_at"])

    assert expires_at() is None
    assert api.client.put(where, json={"ttl_seconds": 7200}).status_code == 200
    left = expires_at() - datetime.now(UTC)
    assert timedelta(minutes=119) < left <= timedelta(minutes=120)
    assert api.client.put(where, json={"ttl_seconds": None}).status_code == 200
    assert expires_at() is None
    for bad, word in (({}, "ttl_seconds"), ({"ttl_seconds": 3599}, "3600"), ({"ttl": 7200}, "ttl")):
        refused(api.client.put(where, json=bad), 422, word)
    assert expires_at() is None
    refused(api.client.put(where.replace("/e1/", "/e2/"), json={"ttl_seconds": 7200}), 404, "e2")


def test_nothing_of_a_tenants_exports_exists_for_another(two: tuple[Api, Api], worker: Worker) -> None:
    ada, bob = two
    run = exported(ada, worker, "ada")
    where = f"/training_runs/{run}/checkpoints/external_weights/e1"
    headers = {"X-API-Key": bob.key}
    for attempt in (
        bob.get(f"{where}/external_weights_urls"),
        bob.client.delete(f"/api/v1{where}", headers=headers),
        bob.client.put(f"/api/v1{where}/ttl", json={"ttl_seconds": None}, headers=headers),
        bob.post("/save_weights_external", {"model_id": run, "path": "e2", "seq_id": 2}),
    ):
        refused(attempt, 404)
    assert fetch(ada, links(ada, run)["urls"]["adapter_config.json"]).data == CONFIG
