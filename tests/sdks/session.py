"""One session of fine-tuning and reinforcement learning, with whichever Tinker SDK this interpreter has.

`python session.py BASE_URL MODEL [PATHS]`: prints what it saw as one line of JSON; `test_sessions` judges it. PATHS is
JSON: the addresses of checkpoints that another SDK has saved. What an SDK doesn't have is left out, nothing else.
"""

from __future__ import annotations

import importlib.metadata
import inspect
import json
import sys
from typing import Any

import numpy as np
import tinker
from tinker import types

TEXT = list(b"the quick brown fox jumps over the lazy dog")
PROMPT = TEXT[:9]
ADAM = types.AdamParams(learning_rate=5e-3)
STEPS = 8
CROWD = 150
"""More datums than the oldest SDK sends at once (128)."""


def datum(tokens: list[int]) -> types.Datum:
    inputs = {"target_tokens": tokens[1:], "weights": [1.0] * (len(tokens) - 1)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def rewarded(sequences: list[Any]) -> list[types.Datum]:
    """The first sequence is better than the others."""
    data = []
    for index, sequence in enumerate(sequences):
        tokens, prefix = PROMPT + list(sequence.tokens), [0.0] * (len(PROMPT) - 1)
        advantage = 1.0 if index == 0 else -1.0 / (len(sequences) - 1)
        inputs = {
            "target_tokens": tokens[1:],
            "logprobs": prefix + [float(each) for each in sequence.logprobs],
            "advantages": prefix + [advantage] * len(sequence.tokens),
        }
        data.append(types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs))
    return data


def floats(values: Any) -> list[float | None]:
    return [None if each is None else float(each) for each in values]


def logprobs(result: Any, index: int = 0) -> list[float | None]:
    return floats(np.asarray(result.loss_fn_outputs[index]["logprobs"].data).ravel())


def step(training: Any, data: list[types.Datum], loss_fn: str = "cross_entropy", **options: Any) -> dict[str, float]:
    """Send both halves of a step before either is read, as loops do; return the metrics of both."""
    forward_backward = training.forward_backward(data, loss_fn, **options)
    optim_step = training.optim_step(ADAM)
    return dict(forward_backward.result().metrics) | dict(optim_step.result().metrics or {})


def params(**changes: Any) -> types.SamplingParams:
    return types.SamplingParams(**{"max_tokens": 12, "temperature": 1.0, "seed": 7} | changes)


def sample(sampling: Any, num_samples: int = 1, *, prompt: list[int] = PROMPT, **changes: Any) -> Any:
    return sampling.sample(types.ModelInput.from_ints(prompt), num_samples, params(**changes)).result()


def drawn(response: Any) -> list[dict[str, Any]]:
    return [
        {"tokens": [int(t) for t in each.tokens], "logprobs": floats(each.logprobs), "stop_reason": each.stop_reason}
        for each in response.sequences
    ]


def train(training: Any) -> dict[str, Any]:
    """Learn a sentence; a call that is sent in pieces; one that is refused, after which the run goes on."""
    seen: dict[str, Any] = {"losses": [step(training, [datum(TEXT)])["loss:sum"] for _ in range(STEPS)]}
    crowd = training.forward([datum(TEXT[i % 30 : i % 30 + 8]) for i in range(CROWD)], "cross_entropy").result()
    seen["crowd"] = {
        "outputs": len(crowd.loss_fn_outputs),
        "loss": crowd.metrics["loss:sum"],
        "negative": -sum(sum(logprobs(crowd, index)) for index in range(CROWD)),  # type: ignore[arg-type]
    }
    try:
        training.forward_backward([datum([*TEXT, 99_999])], "cross_entropy").result()
    except Exception as refusal:
        seen["refusal"] = str(refusal)
    try:
        training.optim_step(ADAM).result()
    except Exception as void:
        seen["void"] = str(void)
    seen["after"] = step(training, [datum(TEXT)])["loss:sum"]
    return seen


def resume(service: Any, training: Any) -> dict[str, Any]:
    """Save, step, and come back to what was saved by every way that there is; each time the same step again."""
    path = training.save_state("middle").result().path
    seen: dict[str, Any] = {"path": path, "went_on": step(training, [datum(TEXT)])}
    for name in ("load_state_with_optimizer", "load_state"):
        getattr(training, name)(path).result()
        seen[name] = step(training, [datum(TEXT)])
    for name in ("create_training_client_from_state_with_optimizer", "create_training_client_from_state"):
        other = getattr(service, name)(path)
        seen[name] = step(getattr(other, "result", lambda other=other: other)(), [datum(TEXT)])
    training.load_state_with_optimizer(path).result()
    return seen


def draw(service: Any, training: Any) -> dict[str, Any]:
    """Sample from saved weights, in all the ways of ending, and score a prompt as the trainer does."""
    path = training.save_weights_for_sampler("final").result().path
    sampling = service.create_sampling_client(model_path=path)
    prompt = types.ModelInput.from_ints(TEXT)
    scored = sampling.sample(
        prompt, 1, params(max_tokens=2), include_prompt_logprobs=True, topk_prompt_logprobs=3
    ).result()
    greedy = sample(sampling, temperature=0.0)
    second = int(greedy.sequences[0].tokens[1])
    return {
        "path": path,
        "once": drawn(sample(sampling, 4)),
        "again": drawn(sample(sampling, 4)),
        "other_seed": drawn(sample(sampling, 4, seed=8)),
        "greedy": drawn(greedy),
        "stop_token": drawn(sample(sampling, temperature=0.0, stop=[second])),
        "stop_text": drawn(sample(sampling, temperature=0.0, stop=[bytes([second]).decode("latin-1")])),
        "no_stop": drawn(sample(sampling, temperature=0.0, stop=[])),
        "prompt_logprobs": floats(scored.prompt_logprobs),
        "best": [
            None if row is None else [[int(i), float(lp)] for i, lp in row] for row in scored.topk_prompt_logprobs
        ],
        "compute_logprobs": floats(sampling.compute_logprobs(prompt).result()),
        "trainer": logprobs(training.forward([datum(TEXT)], "cross_entropy").result()),
    }


def reinforce(training: Any, loss_fn: str, **options: Any) -> dict[str, Any]:
    """One step towards the first of some samples; what each was worth before and after."""
    sampling = training.save_weights_and_get_sampling_client()
    sampling = getattr(sampling, "result", lambda: sampling)()
    sequences = list(sample(sampling, 4, max_tokens=6).sequences)
    data, start = rewarded(sequences), len(PROMPT) - 1
    metrics = step(training, data, loss_fn, **options)
    after = training.forward(data, loss_fn, **options).result()
    return {
        "metrics": metrics,
        "before": [sum(floats(each.logprobs)) for each in sequences],  # type: ignore[arg-type]
        "after": [sum(logprobs(after, index)[start:]) for index in range(len(data))],  # type: ignore[arg-type]
    }


def new_run(service: Any, model: str, **options: Any) -> Any:
    """Create a run; newer SDKs give a future."""
    training = service.create_lora_training_client(base_model=model, **options)
    return getattr(training, "result", lambda: training)()


def narrow(service: Any, model: str) -> dict[str, Any]:
    """A checkpoint of some modules alone, and a run that is created from it."""
    training = new_run(service, model, rank=4, seed=5, train_mlp=False, train_unembed=False)
    step(training, [datum(TEXT)])
    path = training.save_state("narrow").result().path
    other = service.create_training_client_from_state_with_optimizer(path)
    other = getattr(other, "result", lambda: other)()
    return {"went_on": step(training, [datum(TEXT)]), "resumed": step(other, [datum(TEXT)])}


def custom(training: Any) -> dict[str, Any]:
    """A loss of the client's own: the mean square of the log-probabilities."""
    import torch

    def loss(data: Any, found: list[Any]) -> tuple[Any, dict[str, float]]:
        value = torch.stack([(each**2).mean() for each in found]).mean()
        return value, {"square": float(value)}

    squares = []
    for _ in range(4):
        squares.append(training.forward_backward_custom([datum(TEXT)], loss).result().metrics["square"])
        training.optim_step(ADAM).result()
    return {"squares": squares}


def read(rest: Any, training: Any, paths: dict[str, str]) -> dict[str, Any]:
    """What the service says of this session's things."""
    run_id = training.model_id
    run = rest.get_training_run(run_id).result()
    seen: dict[str, Any] = {
        "run": [run.training_run_id, run.base_model, run.lora_rank, run.is_lora],
        "by_path": rest.get_training_run_by_tinker_path(paths["training"]).result().training_run_id,
        "listed": run_id in {each.training_run_id for each in rest.list_training_runs().result().training_runs},
        "checkpoints": sorted(each.checkpoint_id for each in rest.list_checkpoints(run_id).result().checkpoints),
        "all": sorted(each.tinker_path for each in rest.list_user_checkpoints(limit=1000).result().checkpoints),
        "weights_info": rest.get_weights_info_by_tinker_path(paths["training"]).result().lora_rank,
    }
    session_id = run_id.partition(":")[0]
    session = rest.get_session(session_id).result()
    seen["session"] = {"runs": len(session.training_run_ids), "samplers": len(session.sampler_ids)}
    seen["sessions"] = session_id in rest.list_sessions().result().sessions
    seen["sampler"] = rest.get_sampler(session.sampler_ids[0]).result().base_model
    if hasattr(rest, "set_checkpoint_ttl_from_tinker_path"):
        rest.set_checkpoint_ttl_from_tinker_path(paths["training"], 7200).result()
        [kept] = [each for each in rest.list_checkpoints(run_id).result().checkpoints if each.expires_at]
        seen["ttl"] = kept.checkpoint_id
    for name in ("publish", "unpublish"):
        getattr(rest, f"{name}_checkpoint_from_tinker_path")(paths["training"]).result()
        shown = rest.list_checkpoints(run_id).result().checkpoints
        seen[name] = {each.checkpoint_id: each.public for each in shown}["weights/middle"]
    if hasattr(rest, "get_checkpoint_archive_url_from_tinker_path"):
        seen["archive"] = rest.get_checkpoint_archive_url_from_tinker_path(paths["sampler"]).result().url
    rest.delete_checkpoint_from_tinker_path(paths["training"]).result()
    seen["left"] = sorted(each.checkpoint_id for each in rest.list_checkpoints(run_id).result().checkpoints)
    return seen


def shared(service: Any, paths: dict[str, str]) -> dict[str, Any]:
    """What another SDK's checkpoints are worth, and what is drawn from them."""
    training = service.create_training_client_from_state_with_optimizer(paths["training"])
    training = getattr(training, "result", lambda: training)()
    sampling = service.create_sampling_client(model_path=paths["sampler"])
    return {
        "logprobs": logprobs(training.forward([datum(TEXT)], "cross_entropy").result()),
        "scored": floats(sampling.compute_logprobs(types.ModelInput.from_ints(TEXT)).result()),
        "drawn": drawn(sample(sampling, 2)),
    }


def main(base_url: str, model: str, others: dict[str, str] | None) -> dict[str, Any]:
    service = tinker.ServiceClient(api_key="tml-local", base_url=base_url, user_metadata={"exp": "sdks"})
    rest = service.create_rest_client()
    models = {each.model_name for each in service.get_server_capabilities().supported_models}
    training = new_run(service, model, rank=8, seed=3, user_metadata={"renderer_name": "plain"})
    info = training.get_info()
    seen: dict[str, Any] = {
        "sdk": importlib.metadata.version("tinker"), "where": inspect.getfile(tinker), "models": sorted(models),
        "info": [info.model_id, info.model_data.model_name, info.model_data.tokenizer_id],
        "tokenizer": training.get_tokenizer().encode("fox"),
        "train": train(training), "resume": resume(service, training), "draw": draw(service, training),
        "importance_sampling": reinforce(training, "importance_sampling"),
        "ppo": reinforce(training, "ppo", loss_fn_config={"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        "custom": custom(new_run(service, model, rank=4, seed=9)), "narrow": narrow(service, model),
    }  # fmt: skip
    if hasattr(training, "save_weights_external"):
        seen["external"] = training.save_weights_external("shared").result().path
    paths = {"training": seen["resume"]["path"], "sampler": seen["draw"]["path"]}
    seen["kept"] = training.save_state("kept").result().path
    seen["rest"] = read(rest, training, paths)
    if others:
        seen["shared"] = shared(service, others)
    if hasattr(service, "close"):
        service.close("success")
    return seen


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]) if sys.argv[3:] else None)))
