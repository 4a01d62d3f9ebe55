"""Bodies of forward_backward that no SDK would send: refused by name, and the run goes on.

Random bytes, valid messages that were damaged, wire types that don't fit, huge varints, deep nesting, and messages
that are well-formed and claim what isn't there. The long forms (`make test-full`) draw thousands, new ones each time
where CI is not set.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given
from hypothesis import strategies as st

from openrl.tasks.errors import InvalidRequest, TooLarge, Undecodable
from openrl.tasks.wire import codec
from openrl.tasks.wire import openrl_pb2 as pb
from tests.app.conftest import GOLDEN, PROTOBUF, Api, Worker

REFUSED = (InvalidRequest, TooLarge, Undecodable)
COMMON = {"deadline": None, "database": None, "suppress_health_check": list(HealthCheck)}
SHORT = hypothesis.settings(**COMMON, max_examples=60, derandomize=True)
LONG = hypothesis.settings(**COMMON, max_examples=5000, print_blob=True)
INSIDE = ("Traceback", 'File "', "site-packages", "google.protobuf")

# Bytes -------------------------------------------------------------------------------------------


def varint(number: int) -> bytes:
    """Write a number as protobuf does; more than 64 bits make one that can't be right."""
    parts = []
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*parts, number])


def field(number: int, wire_type: int, content: bytes) -> bytes:
    return varint(number << 3 | wire_type) + content


def nested(number: int, inner: bytes) -> bytes:
    return field(number, 2, varint(len(inner)) + inner)


def deep(levels: int, number: int, middle: bytes = b"") -> bytes:
    """Messages in messages, or groups in groups where `middle` is None."""
    for _ in range(levels):
        middle = nested(number, middle)
    return middle


NUMBERS = st.integers(0, 9) | st.sampled_from([15, 16, 2**28, 2**29 - 1, 2**29, 2**61])
VARINTS = st.sampled_from([0, 1, 127, 128, 2**31 - 1, 2**31, 2**32, 2**63, 2**64 - 1, 2**64, 2**200])
CONTENTS = st.one_of(
    VARINTS.map(varint),
    st.binary(max_size=24),
    st.builds(lambda claimed, content: varint(claimed) + content, VARINTS, st.binary(max_size=24)),
    st.builds(deep, st.sampled_from([1, 99, 101, 3000]), st.integers(1, 7)),
)
FIELDS = st.builds(field, NUMBERS, st.integers(0, 7), CONTENTS)


@st.composite
def damaged(draw: st.DrawFn, whole: bytes = GOLDEN) -> bytes:
    """Return a valid message with a few places cut, doubled, overwritten or put in."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.sampled_from(["cut", "double", "flip", "insert"])):
            case "cut":
                del data[at : at + draw(st.integers(1, 40))]
            case "double":
                data[at:at] = data[at : at + draw(st.integers(1, 40))]
            case "flip" if data:
                data[at] ^= draw(st.integers(1, 255))
            case _:
                data[at:at] = draw(st.binary(min_size=1, max_size=8) | FIELDS)
    return bytes(data)


BYTES = st.one_of(
    st.binary(max_size=300),
    damaged(),
    st.lists(FIELDS, max_size=5).map(b"".join),
    st.lists(FIELDS, max_size=3).map(lambda parts: GOLDEN + b"".join(parts)),
    st.lists(FIELDS, max_size=3).map(lambda parts: GOLDEN + nested(3, b"".join(parts))),
)

# Messages ----------------------------------------------------------------------------------------

WHOLES = st.sampled_from([0, 1, 2, 3, 4, 5, -1, -(2**63), 2**63 - 1, 2**62, 2**32, 2**31 - 1, 260])
REALS = st.sampled_from([0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf"), 3.4e38, 1e-45])
RAW = st.binary(max_size=40)


def packed(kind: str, numbers: st.SearchStrategy[Any]) -> st.SearchStrategy[bytes]:
    """Numbers as packed bytes, now and then with a few bytes too many."""
    lists = st.lists(numbers, max_size=8).map(lambda some: struct.pack(f"<{len(some)}{kind}", *some))
    return lists | st.builds(lambda some, more: some + more, lists, st.binary(max_size=3))


@st.composite
def tensors(draw: st.DrawFn) -> pb.Tensor:
    """Return a tensor whose shape, type, rows and columns are of no mind to fit each other."""
    values = draw(packed("q", WHOLES) | packed("f", REALS) | RAW)
    tensor = pb.Tensor(dtype=draw(st.integers(0, 5)), shape=draw(st.lists(WHOLES, max_size=4)))
    if draw(st.booleans()):
        tensor.dense = values
    elif draw(st.booleans()):
        tensor.sparse_csr.values = values
        tensor.sparse_csr.crow_indices = draw(packed("q", WHOLES) | RAW)
        tensor.sparse_csr.col_indices = draw(packed("q", WHOLES) | RAW)
    return tensor


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Return a well-formed message that says what can't be."""
    call = pb.ForwardBackwardCall.FromString(GOLDEN)
    call.loss_fn = draw(st.sampled_from(["cross_entropy", "importance_sampling", "ppo", "gspo", "custom", "", "\0"]))
    call.forward_only = draw(st.booleans())
    for name, number in draw(st.dictionaries(st.sampled_from(["beta", "clip_low_threshold", ""]), REALS)).items():
        call.loss_fn_config[name] = number
    for datum in range(draw(st.integers(0, 2))):
        added = call.data.add() if datum else call.data[0]
        if draw(st.booleans()):
            added.model_input.add().encoded_text.tokens = draw(packed("i", st.integers(-(2**31), 2**31 - 1)) | RAW)
        for name in draw(st.lists(st.sampled_from(["target_tokens", "weights", "logprobs", "advantages", "x", ""]))):
            added.loss_fn_inputs[name].CopyFrom(draw(tensors()))
        if draw(st.booleans()):
            span = added.model_input_spans.add().sampled_tokens
            span.offset, span.length = draw(WHOLES), draw(WHOLES)
    return call.SerializeToString()


# What must hold ----------------------------------------------------------------------------------


def decodes_or_refuses(body: bytes) -> None:
    """Check that the codec gives a value that its own bytes give again, or refuses in a line of ours."""
    codec.peek_forward_backward(body)
    try:
        found = codec.decode_forward_backward(body)
    except REFUSED as refusal:
        assert 0 < len(str(refusal)) < 500
        return
    again = codec.decode_forward_backward(codec.encode_forward_backward(found))
    assert codec.encode_forward_backward(again) == codec.encode_forward_backward(found)
    for datum in found.data:
        assert not datum.tokens.flags.writeable
        assert sum(array.nbytes for array in datum.inputs.values()) <= 1 << 28


overlapping = pb.Tensor(dtype=pb.ELEMENT_INT64, shape=[2, 3])
overlapping.sparse_csr.values = struct.pack("<3q", 1, 2, 3)
overlapping.sparse_csr.crow_indices = struct.pack("<3q", 0, 3, 1)
overlapping.sparse_csr.col_indices = struct.pack("<3q", 0, 0, 1)
OVERLAPPING = pb.ForwardBackwardCall(data=[pb.Example(loss_fn_inputs={"weights": overlapping})]).SerializeToString()


@SHORT
@given(body=BYTES | messages())
@example(body=deep(100_000, 3))
@example(body=field(3, 3, b"") * 100_000)
@example(body=GOLDEN + nested(3, nested(2, b"\xff" * 10)))
@example(body=OVERLAPPING)
def test_the_codec_decodes_or_refuses_whatever_it_is_given(body: bytes) -> None:
    decodes_or_refuses(body)


@pytest.mark.full
@LONG
@given(body=BYTES | messages())
def test_at_length_the_codec_decodes_or_refuses_whatever_it_is_given(body: bytes) -> None:
    decodes_or_refuses(body)


def check_route(api: Api, worker: Worker, examples: Callable[[Any], Any]) -> None:
    """Check that every body is answered as the service promises, and that the run still works after all of them."""
    run = api.run()
    seq = iter(range(1, 1 << 20))

    @given(body=BYTES | messages(), addressed=st.booleans())
    def send(body: bytes, addressed: bool) -> None:
        if addressed:  # the first one is found in a broken body, and in a whole one the last counts
            address = nested(1, run.encode()) + field(2, 0, varint(next(seq)))
            body = address + body + address
        answer = api.send("/forward_backward", body, headers=PROTOBUF)
        assert answer.status_code in (200, 400, 404, 413, 422), (answer.status_code, answer.text)
        assert not [word for word in INSIDE if word in answer.text], answer.text
        assert len(answer.text) < 2000

    examples(send)()
    last = next(seq)
    api.ok(api.forward_backward(run, last))
    done = [operation for _ in range(last) for operation in worker.step()]
    assert [operation.seq_id for operation in done] == list(range(last + 1))
    assert done[-1].kind == "forward_backward"
    np.testing.assert_equal(codec.decode_forward_backward(done[-1].body).data[0].tokens, [1, 2, 3, 4])


def test_a_run_works_after_every_body_that_it_was_sent(api: Api, worker: Worker) -> None:
    check_route(api, worker, SHORT)


@pytest.mark.full
def test_at_length_a_run_works_after_every_body_that_it_was_sent(api: Api, worker: Worker) -> None:
    check_route(api, worker, hypothesis.settings(LONG, max_examples=2000))
