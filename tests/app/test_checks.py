"""Bad input is refused by name, with the value and what would be right; good input passes."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from openrl.app import checks
from openrl.tasks.errors import InvalidRequest
from openrl.tasks.losses import LOSSES
from openrl.tasks.messages import CreateModel, Datum, ForwardBackward, OptimStep, Sample
from openrl.tasks.registry import BaseModel


@dataclass(frozen=True)
class TinyModel:
    vocab_size: int = 10
    max_context: int = 8


MODEL = TinyModel()
NAN, INF = float("nan"), float("inf")


def datum(tokens=(1, 2, 3), **inputs) -> Datum:
    return Datum(tokens=np.array(tokens, np.int32), inputs=inputs)


def ids(*values) -> np.ndarray:
    return np.array(values, np.int64)


def reals(*values) -> np.ndarray:
    return np.array(values, np.float32)


def sft(**changes) -> Datum:
    return datum(**({"target_tokens": ids(2, 3, 4), "weights": reals(0, 1, -1)} | changes))


def policy(**changes) -> Datum:
    inputs = {"target_tokens": ids(2, 3, 4), "logprobs": reals(0, -1, -1), "advantages": reals(0, 1, 1)}
    return datum(**(inputs | changes))


def call(*data, loss_fn="cross_entropy", **config) -> ForwardBackward:
    return ForwardBackward(data=data, loss_fn=loss_fn, loss_fn_config=config)


def refusal(check, *args, **kwargs) -> str:
    with pytest.raises(InvalidRequest) as caught:
        check(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# forward_backward --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "good",
    [
        call(sft()),
        call(datum(target_tokens=ids(0, 9, 1))),
        call(datum(tokens=[1] * 8, target_tokens=ids(*[1] * 8)), sft()),
        call(datum(target_tokens=np.zeros((3, 2), np.int64), weights=np.zeros((3, 2), np.float32)), sft()),
        call(policy(), loss_fn="importance_sampling"),
        call(policy(), loss_fn="ppo"),
        call(policy(), loss_fn="ppo", clip_low_threshold=1.0, clip_high_threshold=1.0),
        call(policy(logprobs=reals(-100, -1, -1)), loss_fn="ppo", clip_low_threshold=0.01, clip_high_threshold=50.0),
        call(policy(), loss_fn="cispo", clip_low_threshold=0.0, clip_high_threshold=5.0),
        call(policy(), loss_fn="dro"),
        call(policy(), loss_fn="dro", beta=0.0),
        call(policy(sequence_ratio_mask=reals(0, 1, 1)), loss_fn="gspo", clip_high_threshold=1.0004),
        call(policy(sequence_ratio_mask=reals(0, 0, 0), advantages=reals(0, 0, 0)), loss_fn="gspo"),
    ],
)
def test_good_calls_pass(good):
    checks.check_forward_backward(good, MODEL)


@pytest.mark.parametrize("loss_fn", ["pp0", "", "PPO", "x" * 10_000])
def test_a_loss_that_is_not_served_is_refused_naming_those_that_are(loss_fn):
    text = refusal(checks.check_forward_backward, call(sft(), loss_fn=loss_fn), MODEL)
    assert text.endswith(f"is not served; served are {', '.join(LOSSES)}") and len(text) < 200


@pytest.mark.parametrize(
    ("loss_fn", "instead"),
    [
        ("stable_reinforce", "use importance_sampling, ppo, cispo or gspo"),
        ("custom", "use the SDK's forward_backward_custom"),
    ],
)
def test_a_loss_of_tinkers_that_is_not_served_is_refused_saying_what_to_use(loss_fn, instead):
    text = refusal(checks.check_forward_backward, call(policy(), loss_fn=loss_fn), MODEL)
    assert text.startswith(f"loss_fn '{loss_fn}' is not served; ") and instead in text


@pytest.mark.parametrize("loss_fn", ["ppo", "cispo", "gspo"])
@pytest.mark.parametrize("name", ["clip_low_threshold", "clip_high_threshold"])
def test_clip_bounds_for_each_datum_are_refused_saying_where_they_go(loss_fn, name):
    bad = policy(**{"sequence_ratio_mask": reals(1, 1, 1)} if loss_fn == "gspo" else {}, **{name: reals(1, 1, 1)})
    text = refusal(checks.check_forward_backward, call(bad, loss_fn=loss_fn), MODEL)
    assert text == (
        f"data[0].loss_fn_inputs['{name}'] is a setting of {loss_fn}, not an input: "
        f"send loss_fn_config['{name}'], one number for the whole call"
    )


def test_a_sequence_of_gspo_without_a_token_to_make_its_ratio_of_is_refused():
    good, empty = policy(sequence_ratio_mask=reals(0, 1, 1)), policy(sequence_ratio_mask=reals(0, 0, 0))
    text = refusal(checks.check_forward_backward, call(good, empty, loss_fn="gspo"), MODEL)
    assert text.startswith("data[1].loss_fn_inputs['sequence_ratio_mask'] is 0 everywhere; mark the sampled tokens")


@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize(("loss_fn", "name"), [(loss, name) for loss in LOSSES for name in LOSSES[loss].inputs])
def test_a_number_of_any_tensor_of_any_loss_that_is_not_finite_is_refused(loss_fn, name, value):
    whole = policy(sequence_ratio_mask=reals(1, 1, 1), weights=reals(1, 1, 1))
    inputs = {key: array for key, array in whole.inputs.items() if key in LOSSES[loss_fn].inputs}
    checks.check_forward_backward(call(replace(whole, inputs=inputs), loss_fn=loss_fn), MODEL)
    bad = replace(whole, inputs=inputs | {name: reals(0, 1, value)})
    text = refusal(checks.check_forward_backward, call(bad, loss_fn=loss_fn), MODEL)
    assert text.startswith(f"data[0].loss_fn_inputs['{name}'] ")
    assert ("it must be int64" if name == "target_tokens" else f"holds {value} at position 2") in text


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (call(), "data is empty; send at least one datum"),
        (call(sft(), datum(tokens=[])), "data[1].model_input is empty"),
        (call(datum(tokens=[1] * 9)), "data[0].model_input has 9 tokens; the model's context holds 8"),
        (call(sft(), datum()), "data[1].loss_fn_inputs['target_tokens'] is missing; cross_entropy needs it"),
        (
            call(sft(), sft(mask=reals(1, 1, 1))),
            "data[1].loss_fn_inputs['mask'] is no input of cross_entropy; it takes",
        ),
        (call(policy()), "data[0].loss_fn_inputs['logprobs'] is no input of cross_entropy"),
        (call(sft(weights=reals(1, 1))), "data[0].loss_fn_inputs['weights'] has length 2; it must be 3"),
        (call(sft(target_tokens=ids(1, 2, 3, 4))), "['target_tokens'] has length 4; it must be 3"),
        (call(sft(target_tokens=reals(1, 2, 3))), "['target_tokens'] is float32; it must be int64"),
        (call(sft(weights=ids(0, 1, 1 << 30))), "['weights'] is int64; it must be float32"),
        (call(sft(target_tokens=ids(1, 10, 3))), "data[0].loss_fn_inputs['target_tokens'] holds 10 at position 1"),
        (
            call(sft(), sft(target_tokens=ids(1, 2, -1))),
            "data[1].loss_fn_inputs['target_tokens'] holds -1 at position 2",
        ),
        (
            call(sft(), datum(tokens=[1, 2, 10], target_tokens=ids(1, 2, 3))),
            "data[1].model_input holds 10 at position 2",
        ),
        (call(datum(tokens=[-5], target_tokens=ids(1))), "it must be from 0 to 9, an id of the vocabulary"),
        (
            call(sft(), sft(weights=reals(0, NAN, 1))),
            "data[1].loss_fn_inputs['weights'] holds nan at position 1; it must be",
        ),
        (call(sft(weights=reals(0, 1, -INF))), "holds -inf at position 2; it must be finite"),
        (call(sft(weights=np.ones((3, 1), np.float32))), "has shape [3, 1]; it must be [3], as target_tokens"),
        (
            call(datum(target_tokens=np.ones((3, 2), np.int64))),
            "['weights'] is missing; targets of shape [N, K] need it",
        ),
        (call(datum(target_tokens=np.ones((3, 0), np.int64))), "has shape [3, 0]; K must be at least 1"),
        (
            call(datum(target_tokens=np.array([[1, 2], [3, 4], [5, 99]]), weights=np.ones((3, 2), np.float32))),
            "holds 99 at position 2, 1",
        ),
        (call(sft(), temperature=1.0), "loss_fn_config['temperature'] is no setting of cross_entropy; allowed: none"),
        (call(sft(), clip_low_threshold=0.8), "is no setting of cross_entropy"),
    ],
)
def test_a_bad_call_is_refused_by_field_and_value(bad, reason):
    assert reason in refusal(checks.check_forward_backward, bad, MODEL)


@pytest.mark.parametrize(
    ("loss_fn", "name"), [(loss, name) for loss in LOSSES if loss != "cross_entropy" for name in LOSSES[loss].inputs]
)
def test_policy_losses_need_all_their_inputs_in_one_dimension(loss_fn, name):
    whole = policy(**{"sequence_ratio_mask": reals(0, 1, 1)} if loss_fn == "gspo" else {})
    without = Datum(tokens=whole.tokens, inputs={key: array for key, array in whole.inputs.items() if key != name})
    text = refusal(checks.check_forward_backward, call(whole, without, loss_fn=loss_fn), MODEL)
    assert text == f"data[1].loss_fn_inputs['{name}'] is missing; {loss_fn} needs it"
    wide = replace(whole, inputs={**whole.inputs, name: np.ones((3, 2), whole.inputs[name].dtype)})
    assert "has shape [3, 2]; it must be [N]" in refusal(
        checks.check_forward_backward, call(wide, loss_fn=loss_fn), MODEL
    )


@pytest.mark.parametrize(
    ("loss_fn", "config", "reason"),
    [
        (
            "ppo",
            {"clip_low_threshold": -0.1},
            "loss_fn_config['clip_low_threshold'] is -0.1; it must be at least 0 and",
        ),
        ("cispo", {"clip_low_threshold": 1.1}, "is 1.1; it must be at least 0 and at most 1"),
        ("gspo", {"clip_high_threshold": 0.9}, "loss_fn_config['clip_high_threshold'] is 0.9; it must be at least 1"),
        ("ppo", {"clip_high_threshold": INF}, "is inf; it must be"),
        ("ppo", {"clip_low_threshold": NAN}, "is nan; it must be"),
        ("dro", {"beta": -0.05}, "loss_fn_config['beta'] is -0.05; it must be at least 0 and at most 1e+06"),
        ("dro", {"beta": NAN}, "is nan; it must be"),
        ("ppo", {"epsilon": 0.2}, "is no setting of ppo; allowed: clip_low_threshold, clip_high_threshold"),
        ("ppo", {"beta": 0.2}, "loss_fn_config['beta'] is no setting of ppo"),
        ("dro", {"clip_high_threshold": 1.2}, "is no setting of dro; allowed: beta"),
        ("importance_sampling", {"kl_coeff": 0.1}, "is no setting of importance_sampling; allowed: none"),
    ],
)
def test_settings_are_known_and_held_to_their_range(loss_fn, config, reason):
    whole = policy(**{"sequence_ratio_mask": reals(0, 1, 1)} if loss_fn == "gspo" else {})
    assert reason in refusal(checks.check_forward_backward, call(whole, loss_fn=loss_fn, **config), MODEL)


def test_settings_that_are_absent_take_their_defaults():
    for loss_fn in ("ppo", "cispo", "gspo"):
        assert LOSSES[loss_fn].settings({}) == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
        assert LOSSES[loss_fn].settings({"clip_low_threshold": 0.5})["clip_high_threshold"] == 1.2
    assert LOSSES["dro"].settings({}) == {"beta": 0.05}
    assert LOSSES["cross_entropy"].settings({}) == LOSSES["importance_sampling"].settings({}) == {}


def test_a_large_batch_is_checked_as_whole_arrays():
    tokens = np.ones(4000, np.int32)
    inputs = {"target_tokens": np.ones(4000, np.int64), "weights": np.ones(4000, np.float32)}
    good = [Datum(tokens=tokens, inputs=inputs)] * 1000
    model = TinyModel(max_context=4096)
    checks.check_forward_backward(call(*good), model)
    late = inputs["weights"].copy()
    late[3999] = NAN
    bad = Datum(tokens=tokens, inputs=inputs | {"weights": late})
    text = refusal(checks.check_forward_backward, call(*good, bad), model)
    assert text == "data[1000].loss_fn_inputs['weights'] holds nan at position 3999; it must be finite"


# Runs, steps and names ---------------------------------------------------------------------------


BASE = BaseModel(
    name="b", slug="b", path="/b", vocab_size=270000, max_context=64, arch="llama", tokenizer_id="b", hidden_size=8,
    num_layers=1, tied_embeddings=True, sampler_rank=16, sampler_head=False,
)  # fmt: skip


def test_a_run_whose_adapters_the_samplers_cannot_serve_is_refused():
    good = CreateModel(base_model="b", rank=16, seed=None, train_unembed=False)
    checks.check_sampler(good, BASE)
    text = refusal(checks.check_sampler, replace(good, rank=17), BASE)
    assert text.startswith("lora_config.rank is 17; the samplers of b serve ranks up to 16")
    text = refusal(checks.check_sampler, replace(good, train_unembed=True), BASE)
    assert text.startswith("lora_config.train_unembed is true; the samplers of b serve no adapters")
    assert "a model of type llama with 270000 tokens" in text
    checks.check_sampler(replace(good, rank=0, train_unembed=True, fine_tuning="full"), BASE)
    checks.check_sampler(replace(good, rank=512, train_unembed=True), replace(BASE, sampler_rank=0, sampler_head=True))


def test_a_good_run_passes():
    checks.check_create(CreateModel(base_model="b", rank=1, seed=None), MODEL)
    checks.check_create(CreateModel(base_model="b", rank=64, seed=-(1 << 63), train_mlp=False), MODEL, max_rank=64)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rank": 0}, "lora_config.rank is 0; it must be a whole number from 1 to 64"),
        ({"rank": -3}, "lora_config.rank is -3"),
        ({"rank": 65}, "lora_config.rank is 65; it must be a whole number from 1 to 64"),
        ({"rank": True}, "lora_config.rank is True"),
        ({"rank": 8.0}, "lora_config.rank is 8.0"),
        ({"seed": 1 << 63}, "lora_config.seed is 9223372036854775808"),
        ({"train_attn": False, "train_mlp": False, "train_unembed": False}, "lora_config trains nothing"),
        ({"user_metadata": {"score": NAN}}, "user_metadata can't be kept as JSON"),
    ],
)
def test_a_bad_run_is_refused(changes, reason):
    message = replace(CreateModel(base_model="b", rank=8, seed=1), **changes)
    assert reason in refusal(checks.check_create, message, MODEL, max_rank=64)


def test_good_steps_pass():
    checks.check_optim_step(OptimStep())
    checks.check_optim_step(OptimStep(learning_rate=0, beta1=0.0, beta2=0.0, weight_decay=0.1, grad_clip_norm=1e9))


@pytest.mark.parametrize("value", [NAN, INF, -INF, 10**400, "1", None, True])
@pytest.mark.parametrize("name", ["learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm"])
def test_parameters_of_a_step_must_be_finite_numbers(name, value):
    text = refusal(checks.check_optim_step, OptimStep(**{name: value}))
    assert text.startswith(f"adam_params.{name} is") and text.endswith("it must be a finite number")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", -1e-9),
        ("beta1", 1.0),
        ("beta1", -0.1),
        ("beta2", 1.0),
        ("eps", 0.0),
        ("eps", -1e-8),
        ("weight_decay", -0.1),
        ("grad_clip_norm", -1.0),
    ],
)
def test_parameters_of_a_step_are_held_to_their_range(name, value):
    assert refusal(checks.check_optim_step, OptimStep(**{name: value})).startswith(f"adam_params.{name} is {value}; ")


@pytest.mark.parametrize("name", ["a", "step-000010", "final", "v1.2_x", "0", "A" * 128])
def test_good_names_pass(name):
    checks.check_name(name)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "/a", "a\\b", "a..b", ".hidden", "-x", "x" * 129, "x" * 300]
    + ["good" + tail for tail in ("/", "/..", "\n", "\0", " ", ":", "\u00e9")],
)
def test_names_that_could_leave_their_directory_are_refused(name):
    text = refusal(checks.check_name, name)
    assert text.startswith("path ") and checks.NAME_RULE in text and len(text) < 200


# Sampling ----------------------------------------------------------------------------------------


def sample(**changes) -> Sample:
    return replace(Sample(adapter_dir="", prompt=(1, 2, 3), num_samples=1, max_tokens=5), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_tokens": None},
        {"prompt": (1,) * 7, "max_tokens": 1},
        {"temperature": 0.0, "top_k": 1, "top_p": 0.01, "seed": -1, "num_samples": 64},
        {"temperature": 0, "top_p": 1, "top_k": 100_000},
        {"stop_tokens": (0, 9), "stop_strings": ("x",), "stop_at_eos": False},
        {"topk_prompt_logprobs": 10, "topk_sample_logprobs": 10, "prompt_alt_tokens_k": 10},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 2},
        {"target_shape": (2, 2), "target_ids": (-1, 9, 0, -1)},
        {"target_shape": (2, 1 << 40), "target_ids": (9,), "target_crow": (0, 0, 1), "target_columns": (7,)},
    ],
)
def test_good_samples_pass(changes):
    checks.check_sample(sample(**changes), MODEL, max_samples=64)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": ()}, "prompt is empty"),
        ({"prompt": (1, 10)}, "prompt holds 10 at position 1; it must be from 0 to 9"),
        ({"prompt": (1, -2, 3)}, "prompt holds -2 at position 1"),
        ({"prompt": (1, 1 << 80)}, "prompt holds 1208925819614629174706176"),
        ({"prompt": (1, 2.5)}, "prompt must hold whole numbers only"),
        ({"prompt": (1, True)}, "prompt must hold whole numbers only"),
        ({"num_samples": 0}, "num_samples is 0; it must be a whole number from 1 to 64"),
        ({"num_samples": 65}, "num_samples is 65"),
        ({"max_tokens": 0}, "sampling_params.max_tokens is 0; it must be a whole number from 1"),
        ({"max_tokens": 6}, "sampling_params.max_tokens is 6; a prompt of 3 tokens leaves room for 5, as the model's"),
        ({"prompt": (1,) * 8, "max_tokens": None}, "max_tokens is absent; a prompt of 8 tokens leaves room for 0"),
        ({"seed": 1 << 63}, "sampling_params.seed is"),
        ({"temperature": -0.1}, "sampling_params.temperature is -0.1; it must be 0 (greedy) or more"),
        ({"temperature": NAN}, "sampling_params.temperature is nan"),
        ({"temperature": INF}, "sampling_params.temperature is inf"),
        ({"top_p": 0.0}, "sampling_params.top_p is 0.0; it must be more than 0 and at most 1"),
        ({"top_p": 1.01}, "sampling_params.top_p is 1.01"),
        ({"top_p": NAN}, "sampling_params.top_p is nan"),
        ({"top_k": 0}, "sampling_params.top_k is 0; it must be -1 (no limit) or a whole number from 1"),
        ({"top_k": -2}, "sampling_params.top_k is -2"),
        ({"stop_tokens": (1, 10)}, "sampling_params.stop holds 10 at position 1"),
        ({"stop_tokens": (1,) * 65}, "sampling_params.stop has 65 entries; at most 64"),
        ({"stop_strings": ("a", "")}, "sampling_params.stop holds an empty text"),
        ({"topk_prompt_logprobs": 11}, "topk_prompt_logprobs is 11; it must be a whole number from 0 to 10"),
        ({"topk_sample_logprobs": -1}, "topk_sample_logprobs is -1"),
        ({"prompt_alt_tokens_k": 11}, "prompt_alt_tokens_k is 11; it must be a whole number from 0 to 10"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 3}, "it must be a whole number from 1 to 2"),
        ({"prompt_logprobs_last_n": 1}, "set prompt_logprobs too"),
        ({"target_shape": (1, 2), "target_ids": (1, 1)}, "has shape [1, 2]; it must be [2, K]"),
        ({"target_shape": (2, 1), "target_ids": (1, 10)}, "target_prompt_logprobs holds 10; it must be from 0 to 9"),
        ({"target_shape": (2, 1), "target_ids": (-1, -1)}, "target_prompt_logprobs names no id"),
    ],
)
def test_a_bad_sample_is_refused(changes, reason):
    assert reason in refusal(checks.check_sample, sample(**changes), MODEL, max_samples=64)


def test_what_one_request_may_draw_is_bounded_and_the_refusal_names_all_three_numbers():
    large = TinyModel(vocab_size=2000, max_context=10_000)
    checks.check_sample(sample(num_samples=1024, max_tokens=4096), large)
    checks.check_sample(sample(num_samples=4, max_tokens=1023, topk_sample_logprobs=1024), large)
    wanted = {"num_samples": 1024, "max_tokens": 8000, "topk_sample_logprobs": 1024}
    text = refusal(checks.check_sample, sample(**wanted), large)
    assert "num_samples is 1024" in text and "max_tokens 8000" in text and "topk_sample_logprobs 1024" in text
    assert "is 8396800000 and must be at most 4194304" in text
    text = refusal(checks.check_sample, sample(num_samples=1024, max_tokens=None), large)
    assert "max_tokens 9997 (absent: all that the context leaves)" in text


@pytest.mark.parametrize("field", ["topk_prompt_logprobs", "prompt_alt_tokens_k"])
def test_the_numbers_over_a_whole_prompt_are_bounded(field):
    large = TinyModel(vocab_size=2000, max_context=2000)
    prompt = (1,) * 1025
    assert f"{field} asks for 1049600" in refusal(checks.check_sample, sample(prompt=prompt, **{field: 1024}), large)
    checks.check_sample(sample(prompt=prompt, **{field: 1000}), large)


@pytest.mark.parametrize(
    ("value", "parsed"),
    [
        (None, ((), (), True)),
        ([], ((), (), False)),
        ("\n\n", ((), ("\n\n",), True)),
        (["a", "b"], ((), ("a", "b"), True)),
        ([5, 6], ((5, 6), (), True)),
        ([5, "a"], ((5,), ("a",), True)),
    ],
)
def test_stop_is_read_in_all_its_forms(value, parsed):
    assert checks.parse_stop(value) == parsed


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (5, "must be a text or a list of texts or token ids, not 5"),
        ({"a": 1}, "must be a text or a list"),
        ("", "stop[0] is ''; it must be a token id or a text that isn't empty"),
        (["a", ""], "stop[1] is ''"),
        ([1.5], "stop[0] is 1.5"),
        ([True], "stop[0] is True"),
        ([None], "stop[0] is None"),
        ([1] * 65, "has 65 entries; at most 64 are allowed"),
    ],
)
def test_a_bad_stop_is_refused(value, reason):
    assert reason in refusal(checks.parse_stop, value)
