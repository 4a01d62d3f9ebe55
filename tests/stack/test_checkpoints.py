"""Checkpoints through the unmodified SDK: copied, published, unloaded, packed; the weights stay what they were."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import numpy as np
import pytest
import tinker
from safetensors.numpy import load as load_tensors
from tinker import types

from tests.stack.conftest import MODEL, Service
from tests.stack.test_export import logprobs, rest, step

pytestmark = [pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"), pytest.mark.timeout(180)]

PROMPT = types.ModelInput.from_ints(list(b"jinxed wizards"))
GREEDY = types.SamplingParams(max_tokens=8, temperature=0.0)


Client = Callable[..., tinker.ServiceClient]


@pytest.fixture
def client() -> Iterator[Client]:
    """Make clients of a service, which must be up at the end of the test: there their sessions end."""
    with ExitStack() as opened:

        def of(service: Service, key: str = "tml-local") -> tinker.ServiceClient:
            made = tinker.ServiceClient(api_key=key, base_url=service.base_url, project_id="archive")
            return opened.enter_context(made)

        yield of


def drawn(sampler: tinker.SamplingClient) -> list[int]:
    return sampler.sample(PROMPT, 1, GREEDY).result().sequences[0].tokens


@pytest.mark.full
def test_a_copy_trains_and_samples_like_its_source_and_outlives_it(service: Service, client: Client) -> None:
    sdk, lists = client(service), rest(service)
    training = sdk.create_lora_training_client(MODEL, rank=4, seed=3).result()
    step(training, b"how razorback-jumping frogs can level")
    state = training.save_state("ck", ttl_seconds=3600).result().path
    weights = training.save_weights_for_sampler("ck").result().path
    before, tokens = logprobs(training), drawn(sdk.create_sampling_client(model_path=weights).result())
    copied_state, copied_weights = (sdk.copy_weights(path).result() for path in (state, weights))
    for path in (state, weights):
        lists.delete_checkpoint_from_tinker_path(path).result()
        with pytest.raises(tinker.NotFoundError):
            lists.get_weights_info_by_tinker_path(path).result()
    again = sdk.create_training_client_from_state_with_optimizer(copied_state).result()
    assert all(np.array_equal(one, other) for one, other in zip(logprobs(again), before, strict=True))
    assert step(again, b"jinxed wizards")["step"] == 2
    assert drawn(sdk.create_sampling_client(model_path=copied_weights).result()) == tokens
    run = lists.get_training_run_by_tinker_path(copied_state).result()
    assert run.last_checkpoint is not None and run.last_checkpoint.expires_at is None
    runs = lists.list_training_runs(project_id="archive").result().training_runs
    assert run.training_run_id in [each.training_run_id for each in runs]


def test_an_unloaded_run_goes_on_and_its_checkpoint_is_packed_for_old_clients(service: Service, client: Client) -> None:
    training = client(service).create_lora_training_client(MODEL, rank=2, seed=1).result()
    step(training, b"jinxed wizards")
    before, http = logprobs(training), service.http()
    promise = http.post("/unload_model", json={"model_id": training.model_id, "type": "unload_model"}).json()
    answer = http.post("/retrieve_future", json={"request_id": promise["request_id"]})
    assert answer.json() == {"type": "unload_model", "model_id": training.model_id}
    assert all(np.array_equal(one, other) for one, other in zip(logprobs(training), before, strict=True))
    path = training.save_state("packed").result().path
    where = f"/training_runs/{training.model_id}/checkpoints/weights/packed/archive"
    link = http.get(where, headers={"Accept": "application/gzip"})
    assert link.status_code == 302
    packed = http.get(link.headers["Location"])
    assert int(packed.headers["Content-Length"]) == len(packed.content)
    with tarfile.open(fileobj=io.BytesIO(packed.content), mode="r:gz") as tar:
        assert tar.getnames() == ["adapter_config.json", "adapter_model.safetensors", "checkpoint_complete"]
        file = tar.extractfile("adapter_model.safetensors")
        assert file is not None and load_tensors(file.read())
    lists = rest(service)
    for publish, public in (
        (lists.publish_checkpoint_from_tinker_path, True), (lists.unpublish_checkpoint_from_tinker_path, False),
    ):  # fmt: skip
        publish(path).result()
        [listed] = lists.list_checkpoints(training.model_id).result().checkpoints
        assert listed.public is public


@pytest.mark.full
def test_a_published_checkpoint_is_loaded_and_sampled_by_another_tenant_until_it_is_unpublished(
    own_service: Service, client: Client
) -> None:
    own_service.start()

    def key(tenant: str) -> str:
        command = [sys.executable, "-m", "openrl.tasks.cli", "keys", "create", "--tenant", tenant]
        command += ["--data-dir", str(own_service.data_dir)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    owner, reader = key("ada"), key("bob")
    ada, bob = client(own_service, owner), client(own_service, reader)
    training = ada.create_lora_training_client(
        MODEL, rank=4, seed=3, user_metadata={"renderer_name": "role_colon"}
    ).result()
    step(training, b"how razorback-jumping frogs")
    state, weights = training.save_state("ck").result().path, training.save_weights_for_sampler("ck").result().path
    hers, his = (tinker.RestClient(api_key=each, base_url=own_service.base_url) for each in (owner, reader))
    with pytest.raises(tinker.NotFoundError):
        bob.create_sampling_client(model_path=weights).result()
    for path in (state, weights):
        hers.publish_checkpoint_from_tinker_path(path).result()
    sampler = bob.create_sampling_client(model_path=weights).result()
    tokens = drawn(sampler)
    assert tokens == drawn(ada.create_sampling_client(model_path=weights).result())
    mine = bob.create_training_client_from_state(state).result()
    assert all(np.array_equal(one, other) for one, other in zip(logprobs(mine), logprobs(training), strict=True))
    assert his.get_training_run_by_tinker_path(state).result().user_metadata == {"renderer_name": "role_colon"}
    for path in (state, weights):
        hers.unpublish_checkpoint_from_tinker_path(path).result()
        hers.delete_checkpoint_from_tinker_path(path).result()
        with pytest.raises(tinker.NotFoundError):
            his.get_weights_info_by_tinker_path(path).result()
    assert drawn(sampler) == tokens
    step(mine, b"jinxed wizards")
