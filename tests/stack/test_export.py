"""What leaves the service and what comes back: adapters for stock PEFT, and runs after everything was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import tinker
import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from tinker import types
from transformers import AutoModelForCausalLM

from tests.stack.conftest import MODEL, Service

pytestmark = [pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"), pytest.mark.timeout(180)]

TEXTS = (b"how razorback-jumping frogs can level six piqued gymnasts", b"jinxed wizards pluck ivy")
ADAM = types.AdamParams(learning_rate=1e-2, weight_decay=0.1)


def batch(*texts: bytes) -> list[types.Datum]:
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(list(text[:-1])),
            loss_fn_inputs={"target_tokens": list(text[1:]), "weights": [1.0] * (len(text) - 1)},
        )
        for text in texts
    ]


def step(training: tinker.TrainingClient, *texts: bytes) -> dict[str, float]:
    """Take one step and return its metrics."""
    training.forward_backward(batch(*texts), "cross_entropy")
    return training.optim_step(ADAM).result().metrics


def logprobs(training: tinker.TrainingClient) -> list[np.ndarray]:
    outputs = training.forward(batch(*TEXTS), "cross_entropy").result().loss_fn_outputs
    return [np.array(output["logprobs"].data) for output in outputs]


def rest(service: Service) -> tinker.RestClient:
    return tinker.RestClient(api_key="tml-local", base_url=service.base_url)


def exports(service: Service) -> set[str]:
    """Return the paths of all exports that there are."""
    listed = rest(service).list_user_checkpoints().result().checkpoints
    return {each.tinker_path for each in listed if each.checkpoint_type == "external"}


def exported(service: Service, training: tinker.TrainingClient, name: str) -> dict[str, bytes]:
    """Export the run as it is and fetch its files."""
    path = training.save_weights_external(name).result().path
    urls = rest(service).get_external_weights_urls(path).result().urls
    return {file: httpx.get(url, timeout=60).raise_for_status().content for file, url in urls.items()}


def kill_everything(service: Service) -> None:
    """SIGKILL for `openrl up` and all that it started, the store included."""
    assert service.process is not None
    parent = psutil.Process(service.process.pid)
    for process in [parent, *parent.children(recursive=True)]:
        process.kill()
    service.process.wait(10)


def tinker_cli(service: Service, *words: str) -> str:
    """Run the SDK's own command line."""
    env = {**os.environ, "TINKER_BASE_URL": service.base_url, "TINKER_API_KEY": "tml-local"}
    command = [Path(sys.executable).with_name("tinker"), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def in_stock_peft(model_dir: Path, adapter: Path) -> Any:
    """Load an adapter as PEFT's users do, and check that every factor found its place."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what it says of other versions and of tied heads isn't about the files
        base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
        model = get_peft_model(base, LoraConfig.from_pretrained(adapter))
    result = set_peft_model_state_dict(model, load_file(adapter / "adapter_model.safetensors"))
    assert [name for name in result.missing_keys if "lora_" in name] == [] and result.unexpected_keys == []
    return model.eval()


@torch.no_grad()
def stock_logprobs(model: Any, text: bytes) -> np.ndarray:
    tokens = torch.tensor([list(text)])
    values = model(tokens[:, :-1]).logits.log_softmax(-1)
    return values.gather(-1, tokens[:, 1:, None])[0, :, 0].numpy()


@pytest.fixture
def api(service: Service) -> Iterator[tinker.ServiceClient]:
    with tinker.ServiceClient(api_key="tml-local", base_url=service.base_url) as client:
        yield client


@pytest.mark.parametrize("flags", [{}, {"train_unembed": False, "train_mlp": False}])
def test_what_tinker_checkpoint_download_brings_is_the_services_model_in_stock_peft(
    service: Service, api: tinker.ServiceClient, model_dir: Path, tmp_path: Path, flags: dict[str, bool]
) -> None:
    before = exports(service)
    training = api.create_lora_training_client(base_model=MODEL, rank=4, seed=11, **flags).result()
    for _ in range(4):
        step(training, *TEXTS)
    expected = logprobs(training)
    state = training.save_state("trained").result().path
    external = training.save_weights_external("for-peft").result().path
    assert external == f"tinker://{training.model_id}/external_weights/for-peft"

    for path in (external, state):
        said = tinker_cli(service, "checkpoint", "download", path, "--output", str(tmp_path))
        assert "Warning" not in said, said
        directory = tmp_path / path.removeprefix("tinker://").replace("/", "_")
        assert sorted(file.name for file in directory.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        model = in_stock_peft(model_dir, directory)
        for text, ours in zip(TEXTS, expected, strict=True):
            np.testing.assert_allclose(stock_logprobs(model, text), ours, atol=1e-4)
        with model.disable_adapter():
            assert np.abs(stock_logprobs(model, TEXTS[0]) - expected[0]).max() > 0.01
    # The export that the second download made for itself is gone again.
    assert exports(service) == before | {external}


def test_an_export_keeps_the_weights_it_was_made_of_and_its_name(service: Service, api: tinker.ServiceClient) -> None:
    training = api.create_lora_training_client(base_model=MODEL, rank=4, seed=12).result()
    step(training, TEXTS[0])
    first = exported(service, training, "one")
    step(training, TEXTS[0])
    second = exported(service, training, "two")
    assert first["adapter_model.safetensors"] != second["adapter_model.safetensors"]
    assert first["adapter_config.json"] == second["adapter_config.json"]
    with pytest.raises(tinker.RequestFailedError, match="external_weights/one"):
        training.save_weights_external("one").result()
    urls = rest(service).get_external_weights_urls(f"tinker://{training.model_id}/external_weights/one").result().urls
    again = httpx.get(urls["adapter_model.safetensors"], timeout=60, headers={"Range": "bytes=100-"})
    assert again.status_code == 206 and again.content == first["adapter_model.safetensors"][100:]


def test_after_a_kill_of_everything_the_next_step_from_a_checkpoint_is_the_very_same(own_service: Service) -> None:
    service = own_service.start()
    with tinker.ServiceClient(api_key="tml-local", base_url=service.base_url) as api:
        training = api.create_lora_training_client(base_model=MODEL, rank=8, seed=13).result()
        for text in (*TEXTS, TEXTS[0][::-1]):
            step(training, text)
        state = training.save_state("three-steps").result().path
        undisturbed = step(training, *TEXTS)
        expected, files = logprobs(training), exported(service, training, "after")
        link = rest(service).get_external_weights_urls(f"tinker://{training.model_id}/external_weights/after").result()

    kill_everything(service)
    service.start()

    with tinker.ServiceClient(api_key="tml-local", base_url=service.base_url) as api:
        resumed = api.create_training_client_from_state_with_optimizer(state).result()
        assert step(resumed, *TEXTS) == undisturbed
        for before, after in zip(expected, logprobs(resumed), strict=True):
            np.testing.assert_array_equal(after, before)
        assert exported(service, resumed, "after") == files

        weights_only = api.create_training_client_from_state(state).result()
        other = step(weights_only, *TEXTS)
        assert (undisturbed["step"], other["step"]) == (4.0, 1.0)
        assert other["grad_norm"] == undisturbed["grad_norm"] and other["update_norm"] != undisturbed["update_norm"]
        assert exported(service, weights_only, "after") != files
    # A link outlives the process that signed it.
    assert httpx.get(link.urls["adapter_config.json"], timeout=60).content == files["adapter_config.json"]
