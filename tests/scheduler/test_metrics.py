"""What Prometheus gets: pools and workers as they are, and no tenant's name."""

from __future__ import annotations

import urllib.request
from pathlib import Path

from prometheus_client import start_http_server
from prometheus_client.parser import text_string_to_metric_families

from openrl.scheduler import metrics
from openrl.tasks import keys
from openrl.tasks.ownership import Lease
from openrl.tasks.registry import Registry
from openrl.tasks.settings import StoreSettings
from openrl.tasks.store import Store
from tests.app.conftest import MODEL


def scraped(store: Store) -> dict[tuple[str, ...], float]:
    """Return each figure by its name and its labels, as Prometheus reads them over HTTP."""
    server, thread = start_http_server(0, "127.0.0.1", registry=metrics.registry(store))
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value for sample in samples}


def test_pools_and_workers_are_told_and_tenants_are_not(store: Store):
    Registry(store).add_model(MODEL)
    store.redis.hset(keys.depth("train", MODEL.slug), mapping={"alice": 3, "bob": 4})
    with Lease(store, "w1", "trainer", MODEL.slug):
        found = scraped(store)
    assert found["openrl_store_up",] == 1
    assert found["openrl_unfinished", "trainer", MODEL.slug] == 7
    assert found["openrl_unfinished", "sampler", MODEL.slug] == 0
    assert found["openrl_oldest_seconds", "trainer", MODEL.slug] == 0
    assert found["openrl_workers", "trainer", MODEL.slug, "starting"] == 1
    assert not {"alice", "bob"} & {label for name in found for label in name}


def test_a_store_that_is_away_is_told_too(tmp_path: Path):
    away = Store.connect(StoreSettings(redis_url=f"unix://{tmp_path}/none", data_dir=tmp_path))
    assert scraped(away) == {("openrl_store_up",): 0.0}
