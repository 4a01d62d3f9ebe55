"""What every public method of the SDK's four clients must do against a running service: one probe a method.

A probe calls its method through `call`, once as it is and once more as `<method>_async` where there is that too, and
asserts something of the result that only a service that did it can make true.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import math
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any

import tinker
from tinker import types

CLIENTS = (tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient, tinker.RestClient)
TEXT = b"the quick brown fox jumps over the lazy dog"
PROMPT = types.ModelInput.from_ints(list(TEXT[:12]))
ADAM = types.AdamParams(learning_rate=1e-3)
WAIT_S = 90.0
"""No probe waits longer; an SDK that repeats what can't succeed would for minutes."""

Call = Callable[..., Any]


@dataclass
class Lab:
    """A service, the clients of one user of it, and things of theirs, made when a probe first needs them."""

    base_url: str
    api_key: str
    model: str
    tenant: str
    names: Iterator[int] = field(default_factory=itertools.count)
    copies: list[tinker.SamplingClient] = field(default_factory=list)
    """Of its clients, made by handle: each has a heartbeat of its own."""

    def name(self) -> str:
        return f"probe-{next(self.names)}"

    @cached_property
    def service(self) -> tinker.ServiceClient:
        return tinker.ServiceClient(
            api_key=self.api_key, base_url=self.base_url, user_metadata={"of": "probes"}, display_name="Probes",
            project_id="probes",
        )  # fmt: skip

    def close(self) -> None:
        """End the user's session, and all that speaks of it."""
        for copy in self.copies:
            copy.holder.close()
        self.service.close("success").result(WAIT_S)

    @cached_property
    def rest(self) -> tinker.RestClient:
        return tinker.RestClient(api_key=self.api_key, base_url=self.base_url)

    @cached_property
    def training(self) -> tinker.TrainingClient:
        return self.service.create_lora_training_client(self.model, rank=4, seed=1).result(WAIT_S)

    @cached_property
    def sampling(self) -> tinker.SamplingClient:
        return self.service.create_sampling_client(base_model=self.model).result(WAIT_S)

    @property
    def session(self) -> str:
        return str(self.training.model_id.partition(":")[0])

    def state(self) -> str:
        """Return the address of a new training checkpoint."""
        return str(self.training.save_state(self.name()).result(WAIT_S).path)

    @cached_property
    def kept_state(self) -> str:
        return self.state()

    @cached_property
    def sampler_path(self) -> str:
        return str(self.training.save_weights_for_sampler(self.name()).result(WAIT_S).path)

    def checkpoint(self, path: str) -> types.Checkpoint | None:
        """Return what the list of checkpoints says of one, None where it isn't on it."""
        found = self.rest.list_checkpoints(self.training.model_id).result(WAIT_S).checkpoints
        return next((one for one in found if one.tinker_path == path), None)


def datum(text: bytes = TEXT) -> types.Datum:
    ids = list(text)
    return types.Datum(
        model_input=types.ModelInput.from_ints(ids[:-1]),
        loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * (len(ids) - 1)},
    )


def loss_of(output: types.ForwardBackwardOutput) -> float:
    assert len(output.loss_fn_outputs[0]["logprobs"].data) == len(TEXT) - 1
    return float(output.metrics["loss:sum"])


def drawn(client: tinker.SamplingClient, **params: Any) -> list[int]:
    asked = types.SamplingParams(max_tokens=4, temperature=0.0, stop=[], **params)
    return list(client.sample(PROMPT, 1, asked).result(WAIT_S).sequences[0].tokens)


def settled(result: Any) -> Any:
    """Return what a call came to: a future's result, or what awaiting it gives, as often as there is something."""
    if inspect.iscoroutine(result):
        return asyncio.run(_awaited(result))
    return result.result(WAIT_S) if hasattr(result, "result") else result


async def _awaited(result: Any) -> Any:
    while inspect.isawaitable(result):
        result = await asyncio.wait_for(_once(result), WAIT_S)
    return result


async def _once(result: Any) -> Any:
    return await result


def methods(client: type) -> list[str]:
    """Return the public methods and properties of one client of the installed SDK."""
    return sorted(name for name, _ in inspect.getmembers(client) if not name.startswith("_"))


def probed(method: str) -> str:
    """Return the method whose probe covers this one."""
    client, _, name = method.partition(".")
    base = name.removesuffix("_async")
    return f"{client}.{base}" if base in methods(getattr(tinker, client)) else method


PROBES: dict[str, Callable[[Lab, Call], None]] = {}


def probe(method: str) -> Callable[[Callable[[Lab, Call], None]], Callable[[Lab, Call], None]]:
    def decorate(check: Callable[[Lab, Call], None]) -> Callable[[Lab, Call], None]:
        assert method not in PROBES
        PROBES[method] = check
        return check

    return decorate


# ServiceClient -----------------------------------------------------------------------------------


@probe("ServiceClient.close")
def close(lab: Lab, _call: Call) -> None:
    """the session is finished, for the reason given, and takes no more work"""
    client = tinker.ServiceClient(api_key=lab.api_key, base_url=lab.base_url)
    session = client.create_sampling_client(base_model=lab.model).result(WAIT_S)._sampling_session_id.partition(":")[0]
    settled(client.close("errored", detail="as a probe"))
    found = lab.rest.search_sessions(types.SessionSearchRequest(session_id=session)).result(WAIT_S).sessions[0]
    assert found.status is not None and "client_finished" in found.status.model_dump_json()


@probe("ServiceClient.copy_weights")
def service_copy_weights(lab: Lab, call: Call) -> None:
    """a copy in the client's project, which outlives its source"""
    source = lab.state()
    copy = call(source, ttl_seconds=7200)
    settled(lab.rest.delete_checkpoint_from_tinker_path(source))
    session = copy.removeprefix("tinker://").partition(":")[0]
    asked = types.SessionSearchRequest(project_ids=["probes"])
    assert session in [one.session_id for one in lab.rest.search_sessions(asked).result(WAIT_S).sessions]
    assert lab.rest.get_weights_info_by_tinker_path(copy).result(WAIT_S).lora_rank == 4


@probe("ServiceClient.create_custom_loss")
def create_custom_loss(lab: Lab, call: Call) -> None:
    """the loss runs in the client, with the metrics that it names"""

    def halved(logprobs: Any, weights: Any) -> Any:
        loss = -(logprobs * weights).sum() / 2
        return loss, {"custom/halved:sum": loss}

    handle = call(halved, input_ranks={"logprobs": 1, "weights": 1})
    whole = loss_of(lab.training.forward([datum()], "cross_entropy").result(WAIT_S))
    found = lab.training.forward_backward_custom([datum()], handle).result(WAIT_S)
    assert math.isclose(found.metrics["custom/halved:sum"], whole / 2, rel_tol=1e-4)
    lab.training.optim_step(ADAM).result(WAIT_S)


@probe("ServiceClient.create_lora_training_client")
def create_lora_training_client(lab: Lab, call: Call) -> None:
    """the run has the rank and the metadata that were asked for"""
    client = call(lab.model, rank=2, seed=5, train_unembed=False, user_metadata={"step": "one"})
    assert client.get_info().lora_rank == 2
    assert lab.rest.get_training_run(client.model_id).result(WAIT_S).user_metadata == {"step": "one"}


@probe("ServiceClient.create_rest_client")
def create_rest_client(lab: Lab, call: Call) -> None:
    """the client lists the user's sessions"""
    assert lab.session in call().list_sessions(limit=100).result(WAIT_S).sessions


@probe("ServiceClient.create_sampling_client")
def create_sampling_client(lab: Lab, call: Call) -> None:
    """of a base model and of saved weights: the same prompt is continued by each with its own"""
    for client in (call(base_model=lab.model), call(model_path=lab.sampler_path)):
        assert client.get_base_model() == lab.model and len(drawn(client)) == 4


@probe("ServiceClient.create_training_client_from_state")
def from_state(lab: Lab, call: Call) -> None:
    """the new run computes the checkpoint's losses, and its optimizer starts anew"""
    check_resumed(lab, call, first_step=1)


@probe("ServiceClient.create_training_client_from_state_with_optimizer")
def from_state_with_optimizer(lab: Lab, call: Call) -> None:
    """the new run computes the checkpoint's losses, and its optimizer goes on"""
    check_resumed(lab, call, first_step=2)


def check_resumed(lab: Lab, call: Call, first_step: int) -> None:
    origin = lab.service.create_lora_training_client(lab.model, rank=2, seed=2).result(WAIT_S)
    check_step(origin, 1)
    path = origin.save_state(lab.name()).result(WAIT_S).path
    resumed = call(path, user_metadata={"resumed": "yes"})
    losses = [loss_of(each.forward([datum()], "cross_entropy").result(WAIT_S)) for each in (origin, resumed)]
    assert losses[0] == losses[1] and resumed.model_id != origin.model_id
    check_step(resumed, first_step)


def check_step(client: tinker.TrainingClient, number: int) -> None:
    client.forward_backward([datum()], "cross_entropy")
    assert client.optim_step(ADAM).result(WAIT_S).metrics["step"] == number


@probe("ServiceClient.get_console_url")
def service_console_url(lab: Lab, call: Call) -> None:
    """an address with the session's id, made by the SDK (there is no console here)"""
    assert lab.session in call()


@probe("ServiceClient.get_server_capabilities")
def service_capabilities(lab: Lab, call: Call) -> None:
    """the base model, with its context"""
    served = {one.model_name: one for one in call().supported_models}
    assert served[lab.model].max_context_length > 0 and served[lab.model].trainable


@probe("ServiceClient.get_telemetry")
@probe("TrainingClient.get_telemetry")
@probe("SamplingClient.get_telemetry")
@probe("RestClient.get_telemetry")
def get_telemetry(_lab: Lab, call: Call) -> None:
    """what the SDK reports, or None where TINKER_TELEMETRY=0; the service drops it unread"""
    assert call() is None or hasattr(call(), "log")


@probe("ServiceClient.holder")
def holder(lab: Lab, _call: Call) -> None:
    """the connection of the session"""
    assert lab.service.holder.get_session_id() == lab.session


# TrainingClient ----------------------------------------------------------------------------------


@probe("TrainingClient.create_sampling_client")
def training_sampling_client(lab: Lab, call: Call) -> None:
    """of the run's saved weights"""
    assert len(drawn(call(lab.sampler_path))) == 4


@probe("TrainingClient.forward")
def forward(lab: Lab, call: Call) -> None:
    """a loss and log-probabilities, and no gradient: the same again is the same"""
    assert loss_of(call([datum()], "cross_entropy")) == loss_of(call([datum()], "cross_entropy")) > 0


@probe("TrainingClient.forward_backward")
def forward_backward(lab: Lab, call: Call) -> None:
    """the loss of `forward`, and a gradient that a step takes down"""
    before = loss_of(lab.training.forward([datum()], "cross_entropy").result(WAIT_S))
    assert math.isclose(loss_of(call([datum()], "cross_entropy")), before, rel_tol=1e-5)
    assert lab.training.optim_step(ADAM).result(WAIT_S).metrics["grad_norm"] > 0
    assert loss_of(lab.training.forward([datum()], "cross_entropy").result(WAIT_S)) < before


@probe("TrainingClient.forward_backward_custom")
def forward_backward_custom(lab: Lab, call: Call) -> None:
    """a loss of the client's own, whose gradient a step takes down"""

    def squared(_data: list[types.Datum], logprobs: list[Any]) -> Any:
        loss = sum((each**2).sum() for each in logprobs)
        return loss, {"squared:sum": float(loss)}

    before = call([datum()], squared).metrics["squared:sum"]
    lab.training.optim_step(ADAM).result(WAIT_S)
    after = call([datum()], squared).metrics["squared:sum"]
    lab.training.optim_step(ADAM).result(WAIT_S)
    assert 0 < after < before


@probe("TrainingClient.get_console_url")
def training_console_url(lab: Lab, call: Call) -> None:
    """an address with the session's id, made by the SDK (there is no console here)"""
    assert lab.session in call()


@probe("TrainingClient.get_info")
def get_info(lab: Lab, call: Call) -> None:
    """what the run really is"""
    info = call()
    assert (info.model_id, info.is_lora, info.lora_rank) == (lab.training.model_id, True, 4)
    assert info.model_data.model_name == lab.model


@probe("TrainingClient.get_tokenizer")
@probe("SamplingClient.get_tokenizer")
def get_tokenizer(_lab: Lab, call: Call) -> None:
    """the base model's own: what it encodes, it decodes (from the hub, or a directory of the model's name)"""
    tokenizer = call()
    assert tokenizer.decode(tokenizer.encode("open", add_special_tokens=False)) == "open"


@probe("TrainingClient.load_state")
def load_state(lab: Lab, call: Call) -> None:
    """the run computes the checkpoint's loss again"""
    check_loaded(lab, call)


@probe("TrainingClient.load_state_with_optimizer")
def load_state_with_optimizer(lab: Lab, call: Call) -> None:
    """the run computes the checkpoint's loss again"""
    check_loaded(lab, call)


def check_loaded(lab: Lab, call: Call) -> None:
    then = loss_of(lab.training.forward([datum()], "cross_entropy").result(WAIT_S))
    path = lab.state()
    lab.training.forward_backward([datum()], "cross_entropy")
    lab.training.optim_step(types.AdamParams(learning_rate=1e-2)).result(WAIT_S)
    assert loss_of(lab.training.forward([datum()], "cross_entropy").result(WAIT_S)) != then
    assert call(path).path == path
    assert loss_of(lab.training.forward([datum()], "cross_entropy").result(WAIT_S)) == then


@probe("TrainingClient.optim_step")
def optim_step(lab: Lab, call: Call) -> None:
    """AdamW, with the norm of the gradient that it took"""
    lab.training.forward_backward([datum()], "cross_entropy")
    metrics = call(types.AdamParams(learning_rate=1e-4, grad_clip_norm=1e-6)).metrics
    assert metrics["grad_norm"] > 1e-6 and metrics["clipped"] == 1


@probe("TrainingClient.save_state")
def save_state(lab: Lab, call: Call) -> None:
    """a checkpoint under its address, with end and metadata; the name is free again with overwrite"""
    name = lab.name()
    path = call(name, ttl_seconds=7200, user_metadata={"of": "probe"}).path
    assert path == f"tinker://{lab.training.model_id}/weights/{name}"
    found = lab.checkpoint(path)
    assert found is not None and found.expires_at is not None and found.user_metadata == {"of": "probe"}
    assert call(name, overwrite=True).path == path


@probe("TrainingClient.save_weights_and_get_sampling_client")
def save_and_sample(lab: Lab, call: Call) -> None:
    """a sampler of the weights of this moment, which stay through further training"""
    client = call()
    then = drawn(client)
    lab.training.forward_backward([datum()], "cross_entropy")
    lab.training.optim_step(types.AdamParams(learning_rate=1e-2)).result(WAIT_S)
    assert drawn(client) == then


@probe("TrainingClient.save_weights_external")
def save_weights_external(lab: Lab, call: Call) -> None:
    """an adapter in PEFT's form, of the run's rank"""
    path = call(lab.name()).path
    urls = lab.rest.get_external_weights_urls(path).result(WAIT_S).urls
    with urllib.request.urlopen(urls["adapter_config.json"], timeout=WAIT_S) as answer:
        assert json.load(answer)["r"] == 4


@probe("TrainingClient.save_weights_for_sampler")
def save_weights_for_sampler(lab: Lab, call: Call) -> None:
    """weights under their address, which can be sampled"""
    name = lab.name()
    path = call(name, ttl_seconds=7200).path
    assert path == f"tinker://{lab.training.model_id}/sampler_weights/{name}"
    assert len(drawn(lab.service.create_sampling_client(model_path=path).result(WAIT_S))) == 4


# SamplingClient ----------------------------------------------------------------------------------


@probe("SamplingClient.compute_logprobs")
def compute_logprobs(_lab: Lab, call: Call) -> None:
    """a log-probability of each token but the first, or of the last n"""
    found = call(PROMPT)
    assert found[0] is None and all(each < 0 for each in found[1:]) and len(found) == 12
    last = call(PROMPT, prompt_logprobs_last_n=3)
    assert last[:-3] == [None] * 9 and all(
        abs(one - other) < 1e-4 for one, other in zip(last[-3:], found[-3:], strict=True)
    )


@probe("SamplingClient.create")
def create(lab: Lab, _call: Call) -> None:
    """a sampler of the session of another client"""
    client = settled(tinker.SamplingClient.create(lab.service.holder, base_model=lab.model))
    assert len(drawn(client)) == 4


@probe("SamplingClient.from_sampler_handle")
@probe("SamplingClient.get_sampler_handle")
def sampler_handle(lab: Lab, _call: Call) -> None:
    """the copy of a client, by its handle, draws as it does, under numbers of its own"""
    copy = tinker.SamplingClient.from_sampler_handle(lab.sampling.get_sampler_handle(), api_key=lab.api_key)
    lab.copies.append(copy)
    assert drawn(copy) == drawn(lab.sampling)


@probe("SamplingClient.get_base_model")
def get_base_model(lab: Lab, call: Call) -> None:
    """the base model's name"""
    assert call() == lab.model


@probe("SamplingClient.on_queue_state_change")
def on_queue_state_change(_lab: Lab, call: Call) -> None:
    """what the SDK does with the service's `queue_state`: it logs it"""
    from tinker.lib.api_future_impl import QueueState

    assert call(QueueState.ACTIVE, None) is None


@probe("SamplingClient.sample")
def sample(lab: Lab, call: Call) -> None:
    """continuations, all different, with log-probabilities and candidates; the same seed gives the same"""
    params = types.SamplingParams(max_tokens=8, temperature=9.0, seed=3, stop=[])
    asked = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2, "topk_sample_logprobs": 2}
    first, second = (call(PROMPT, 2, params, **asked) for _ in range(2))
    tokens = [list(one.tokens) for one in first.sequences]
    assert tokens[0] != tokens[1] and tokens == [list(one.tokens) for one in second.sequences]
    assert all(len(one.logprobs) == 8 and one.stop_reason == "length" for one in first.sequences)
    assert len(first.prompt_logprobs) == 12 and len(first.topk_prompt_logprobs[5]) == 2


# RestClient --------------------------------------------------------------------------------------


@probe("RestClient.assign_session_project")
def assign_session_project(lab: Lab, call: Call) -> None:
    """the session is found in its project"""
    call(lab.session, "probes")
    asked = types.SessionSearchRequest(project_ids=["probes"])
    assert lab.session in [one.session_id for one in lab.rest.search_sessions(asked).result(WAIT_S).sessions]


@probe("RestClient.copy_weights")
def rest_copy_weights(lab: Lab, call: Call) -> None:
    """a copy in the project, from which a run can start"""
    copy = call(lab.kept_state, "probes")
    assert copy != lab.kept_state
    assert lab.service.create_training_client_from_state(copy).result(WAIT_S).get_info().lora_rank == 4


@probe("RestClient.delete_checkpoint")
def delete_checkpoint(lab: Lab, call: Call) -> None:
    """it is off the list"""
    path = lab.state()
    call(lab.training.model_id, "weights/" + path.rpartition("/")[2])
    assert lab.checkpoint(path) is None


@probe("RestClient.delete_checkpoint_from_tinker_path")
def delete_by_path(lab: Lab, call: Call) -> None:
    """it is off the list"""
    path = lab.state()
    call(path)
    assert lab.checkpoint(path) is None


@probe("RestClient.export_session_trace")
def export_session_trace(lab: Lab, call: Call) -> None:
    """a link to a trace that names the run"""
    lab.training.get_info()
    with urllib.request.urlopen(call(lab.session), timeout=WAIT_S) as answer:
        events = json.load(answer)["traceEvents"]
    assert lab.training.model_id in {event["args"].get("name") for event in events if event["ph"] == "M"}


@probe("RestClient.get_audit_log")
def get_audit_log(lab: Lab, call: Call) -> None:
    """what was done to checkpoints today (for keys with the scope admin)"""
    path = lab.state()
    settled(lab.rest.delete_checkpoint_from_tinker_path(path))
    found = [entry.model_dump_json() for entry in call("checkpoints").entries]
    assert any("checkpoint_deleted" in entry and path in entry for entry in found), found


@probe("RestClient.get_billing_usage")
def get_billing_usage(lab: Lab, call: Call) -> None:
    """tokens trained in this session, in this hour (for keys with the scope admin)"""
    lab.training.forward([datum()], "cross_entropy").result(WAIT_S)
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    found = call(hour, hour + timedelta(hours=2))
    trained = [event for event in found.data if event.session_id == lab.session]
    assert trained and any(getattr(event.event_info, "token_count", 0) > 0 for event in trained)
    assert found.sessions[lab.session].user_metadata == {"of": "probes"}


@probe("RestClient.get_current_checkpoint_storage_usage")
def get_storage_usage(lab: Lab, call: Call) -> None:
    """bytes of checkpoints that are there (for keys with the scope admin)"""
    assert lab.kept_state
    assert sum(item.size_bytes for item in call().data) > 0


@probe("RestClient.get_external_weights_urls")
def get_external_weights_urls(lab: Lab, call: Call) -> None:
    """links that end, to PEFT's two files"""
    found = call(lab.training.save_weights_external(lab.name()).result(WAIT_S).path)
    assert set(found.urls) == {"adapter_config.json", "adapter_model.safetensors"}
    assert found.expires > datetime.now(UTC)


@probe("RestClient.get_sampler")
def get_sampler(lab: Lab, call: Call) -> None:
    """its base model"""
    found = call(lab.sampling._sampling_session_id)
    assert (found.base_model, found.model_path) == (lab.model, None)


@probe("RestClient.get_server_capabilities")
def rest_capabilities(lab: Lab, call: Call) -> None:
    """the base model, with its context"""
    assert lab.model in [one.model_name for one in call().supported_models]


@probe("RestClient.get_session")
def get_session(lab: Lab, call: Call) -> None:
    """its runs and samplers, and what it was opened with"""
    found = call(lab.session)
    assert lab.training.model_id in found.training_run_ids
    assert found.user_metadata == {"of": "probes"} and found.display_name == "Probes"


@probe("RestClient.get_training_run")
def get_training_run(lab: Lab, call: Call) -> None:
    """the run, and its newest checkpoint"""
    path = lab.state()
    found = call(lab.training.model_id)
    assert (found.base_model, found.lora_rank, found.corrupted) == (lab.model, 4, False)
    assert found.last_checkpoint.tinker_path == path


@probe("RestClient.get_training_run_by_tinker_path")
def get_run_by_path(lab: Lab, call: Call) -> None:
    """the run of a checkpoint"""
    assert call(lab.kept_state).training_run_id == lab.training.model_id


@probe("RestClient.get_weights_info_by_tinker_path")
def get_weights_info(lab: Lab, call: Call) -> None:
    """what a checkpoint can be loaded into"""
    found = call(lab.kept_state)
    assert (found.base_model, found.is_lora, found.lora_rank) == (lab.model, True, 4)


@probe("RestClient.list_checkpoints")
def list_checkpoints(lab: Lab, call: Call) -> None:
    """the run's, with sizes"""
    assert lab.kept_state
    found = {one.tinker_path: one for one in call(lab.training.model_id).checkpoints}
    assert lab.kept_state in found and all(one.size_bytes > 0 for one in found.values())


@probe("RestClient.list_sessions")
def list_sessions(lab: Lab, call: Call) -> None:
    """the user's, by pages"""
    assert lab.session in call(limit=100).sessions and len(call(limit=1).sessions) == 1


@probe("RestClient.list_training_runs")
def list_training_runs(lab: Lab, call: Call) -> None:
    """the user's, by pages, newest first"""
    newest = lab.service.create_lora_training_client(lab.model, rank=1).result(WAIT_S).model_id
    found = call(limit=1)
    assert [run.training_run_id for run in found.training_runs] == [newest]
    assert found.cursor.total_count > 1


@probe("RestClient.list_user_checkpoints")
def list_user_checkpoints(lab: Lab, call: Call) -> None:
    """those of all runs, newest first"""
    path = lab.state()
    assert call(limit=1).checkpoints[0].tinker_path == path


@probe("RestClient.publish_checkpoint_from_tinker_path")
def publish(lab: Lab, call: Call) -> None:
    """it is public: every tenant may load it"""
    path = lab.state()
    call(path)
    found = lab.checkpoint(path)
    assert found is not None and found.public


@probe("RestClient.search_sessions")
def search_sessions(lab: Lab, call: Call) -> None:
    """sessions by id and by a word of their names"""
    for asked in ({"session_id": lab.session}, {"display_name": "probes"}):
        assert lab.session in [one.session_id for one in call(types.SessionSearchRequest(**asked)).sessions]


@probe("RestClient.set_checkpoint_ttl_from_tinker_path")
def set_ttl(lab: Lab, call: Call) -> None:
    """it ends when it was said, or not at all"""
    path = lab.state()
    for ttl_s in (7200, None):
        call(path, ttl_s)
        found = lab.checkpoint(path)
        assert found is not None and (found.expires_at is None) == (ttl_s is None)


@probe("RestClient.unpublish_checkpoint_from_tinker_path")
def unpublish(lab: Lab, call: Call) -> None:
    """it is no longer public"""
    path = lab.state()
    settled(lab.rest.publish_checkpoint_from_tinker_path(path))
    call(path)
    found = lab.checkpoint(path)
    assert found is not None and not found.public


@probe("RestClient.whoami")
def whoami(lab: Lab, call: Call) -> None:
    """the tenant, from a short-lived token (with OPENRL_PJWT_AUTH_ENABLED=true; else the SDK says that it can't)"""
    assert lab.tenant in call().org_urn


# What is refused ---------------------------------------------------------------------------------


def stable_reinforce(lab: Lab) -> Any:
    return lab.training.forward_backward([datum()], "stable_reinforce")


def inflight(lab: Lab) -> Any:
    return lab.training.save_weights_and_get_sampling_client(kind="inflight")


def dimuon(lab: Lab) -> Any:
    return lab.service.create_lora_training_client(lab.model, optimizer=types.DimuonOptimizerConfig())


def encrypted(lab: Lab) -> Any:
    return lab.training.save_weights_external(lab.name(), age_encryption_recipients=["age1" + "q" * 58])


def image(lab: Lab) -> Any:
    pixel = types.ImageChunk(data=b"\x89PNG", format="png", expected_tokens=1)
    return lab.sampling.sample(types.ModelInput(chunks=[pixel]), 1, types.SamplingParams(max_tokens=1))


REFUSALS: dict[str, tuple[Callable[[Lab], Any], str, str]] = {
    'loss_fn="stable_reinforce"': (stable_reinforce, "use importance_sampling", "its formula isn't public"),
    'kind="inflight"': (inflight, "snapshot", "a sampler here keeps its weights for ever"),
    'optimizer of type "dimuon"': (dimuon, "adamw", "its update isn't public"),
    "age_encryption_recipients": (encrypted, "isn't served", "exports lie in the clear: encrypt what you downloaded"),
    "an image in a prompt": (image, "encoded_text", "no base model here takes images yet"),
}
"""What an argument may not be: the call, words of the refusal, and why."""
