"""Messages keep their content and their canonical bytes across the queue."""

import json
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest

from openrl.tasks import messages
from openrl.tasks.errors import Undecodable

DATUM = messages.Datum(
    tokens=np.array([1, 2], np.int32),
    inputs={"target_tokens": np.array([2, 3]), "weights": np.array([0.5, -1.0], np.float32)},
)
EXAMPLES = [
    messages.CreateModel(base_model="b", rank=8, seed=-(1 << 63), user_metadata={"b": [1, {"a": None}], "a": "x"}),
    messages.ForwardBackward(data=(DATUM, DATUM), loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.9}),
    messages.Forward(data=(DATUM,), loss_fn="cross_entropy"),
    messages.OptimStep(learning_rate=1e-3),
    messages.SaveWeights(name="one", ttl_seconds=3600, user_metadata={"k": "v"}),
    messages.SaveWeightsForSampler(sampler_id="s:sample:0"),
    messages.SaveWeightsExternal(name="peft", ttl_seconds=3600),
    messages.LoadWeights(checkpoint_path="tinker://r/weights/one", checkpoint_dir="d", with_optimizer=True),
    messages.Sample(
        adapter_dir="",
        prompt=(1, 2, 3),
        num_samples=2,
        seed=(1 << 63) - 1,
        stop_tokens=(0,),
        stop_strings=("\n",),
        target_ids=(5,),
        target_shape=(2, 9),
        target_crow=(0, 0, 1),
        target_columns=(8,),
        prompt_logprobs_last_n=1,
    ),
]


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.kind)
def test_a_message_comes_back_as_it_was(message):
    again = messages.decode(message.kind, message.to_bytes())
    assert again == message and type(again) is type(message)
    assert again.to_bytes() == message.to_bytes()


def test_every_kind_has_an_example_and_its_own_name():
    assert [message.kind for message in EXAMPLES] == list(messages.MESSAGES)


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: message.kind)
def test_a_message_is_frozen(message):
    with pytest.raises(FrozenInstanceError):
        setattr(message, fields(message)[0].name, "other")


def test_lists_come_back_as_tuples_and_metadata_as_it_was():
    sample = messages.decode("sample", EXAMPLES[-1].to_bytes())
    assert sample.prompt == (1, 2, 3) and sample.stop_strings == ("\n",)
    create = messages.decode("create_model", EXAMPLES[0].to_bytes())
    assert create.user_metadata == {"a": "x", "b": [1, {"a": None}]}


def test_the_order_of_metadata_leaves_no_mark_on_the_bytes():
    one = messages.SaveWeights(name="n", user_metadata={"a": "1", "b": "2"})
    other = messages.SaveWeights(name="n", user_metadata={"b": "2", "a": "1"})
    assert one.to_bytes() == other.to_bytes()


def test_seeds_and_seq_ids_beyond_2_to_the_53_stay_exact():
    sample = messages.Sample(adapter_dir="", prompt=(1,), num_samples=1, seed=432543029000000001)
    assert json.loads(sample.to_bytes())["seed"] == 432543029000000001
    assert messages.Sample.from_bytes(sample.to_bytes()).seed == 432543029000000001


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("optim_step", b"{"),
        ("optim_step", b"[1]"),
        ("optim_step", b'{"momentum": 1}'),
        ("save_weights", b"{}"),
        ("forward", b"\xff"),
    ],
)
def test_bytes_of_another_version_are_undecodable(kind, body):
    with pytest.raises(Undecodable):
        messages.decode(kind, body)


def test_datums_compare_by_content():
    other = messages.Datum(tokens=DATUM.tokens.copy(), inputs={n: a.copy() for n, a in DATUM.inputs.items()})
    assert other == DATUM
    assert messages.Datum(tokens=DATUM.tokens, inputs={}) != DATUM
    changed = DATUM.inputs | {"weights": np.array([0.5, 1.0], np.float32)}
    assert messages.Datum(tokens=DATUM.tokens, inputs=changed) != DATUM
