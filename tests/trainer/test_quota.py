"""A trainer before a tenant's quotas: what can't be stored leaves nothing, what may not be trained yet waits."""

from __future__ import annotations

import time

from openrl.tasks import keys
from openrl.tasks.messages import OptimStep, SaveWeights, SaveWeightsForSampler
from openrl.tasks.quotas import Quotas
from openrl.tasks.usage import Usage
from tests.trainer.bench import forward_backward, told


def directories(service) -> list[str]:
    tenants = service.store.settings.data_dir / "tenants"
    return sorted(path.parent.name for path in tenants.rglob("adapter_model.safetensors"))


def test_a_save_over_the_quota_fails_leaves_no_file_and_the_run_trains_on_with_the_same_weights(service):
    trainer, client, undisturbed = service.trainer(), service.client(), service.client(tenant="other")
    trainer.spin()
    Quotas(service.store).set("t", {"stored_bytes": 1_000})
    before = directories(service)
    client.submit(forward_backward(seed=1))
    client.submit(OptimStep(learning_rate=0.01))
    client.submit(SaveWeights(name="a"))
    client.submit(SaveWeightsForSampler(sampler_id=f"{client.session_id}:sample:0"))
    client.submit(forward_backward(seed=2))
    trainer.spin()
    assert client.states() == "dddffd"
    assert "quota stored_bytes: 1000 are allowed" in client.future(3).error and "openrl quota" in client.future(4).error
    assert (client.future(3).category, client.future(4).category) == ("user", "user")
    assert directories(service) == before
    for message in (forward_backward(seed=1), OptimStep(learning_rate=0.01), forward_backward(seed=2)):
        undisturbed.submit(message)
        trainer.spin()
    assert told(client.future(5).result) == told(undisturbed.future(3).result)
    Quotas(service.store).reset("t")
    client.submit(SaveWeights(name="a"))
    trainer.spin()
    assert client.states() == "dddffdd"
    size = service.registry.checkpoint("t", client.run_id, "weights/a").size_bytes
    assert Quotas(service.store).standing("t").use.stored_bytes == size > 1000


def test_training_beyond_its_tokens_waits_while_another_tenant_trains_on(service):
    trainer, client, other = service.trainer(), service.client(), service.client(tenant="other")
    trainer.spin()
    Quotas(service.store).set("t", {"tokens_per_minute": 1})
    for each in (client, other):
        for seed in (1, 2):
            each.submit(forward_backward(seed=seed))
            trainer.spin()
        each.submit(OptimStep())
    trainer.spin()
    assert (client.states(), other.states()) == ("ddpp", "dddd")
    service.store.redis.hincrbyfloat(keys.account("t"), "tokens_at", -36_000)
    trainer.spin()
    assert client.states() == "dddd"


def test_the_seconds_of_a_pass_are_shared_by_its_runs_as_their_tokens_are(service):
    trainer, clients = service.trainer(), [service.client(tenant=name) for name in ("a", "b")]
    trainer.spin()

    def used(client) -> dict[str, int]:
        rows = Usage(service.store).between(client.tenant, time.time() - 7200, time.time() + 3600)
        return {row.name: row.amount for row in rows}

    before = [used(client)["microseconds"] for client in clients]
    for client in clients:
        client.submit(forward_backward(seed=1))
    began = time.monotonic()
    trainer.spin()
    seconds = time.monotonic() - began
    first, second = (used(client)["microseconds"] - was for client, was in zip(clients, before, strict=True))
    assert used(clients[0])["trained_tokens"] == used(clients[1])["trained_tokens"] > 0
    assert abs(first - second) <= 1 and 0 < first + second <= seconds * 1e6
