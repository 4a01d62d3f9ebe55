"""The wire against the SDK's own bytes: both ends of the installed SDK, golden bytes, and malformed bodies."""

import base64
import json
import warnings
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from tinker import types
from tinker.proto import request_conv, response_conv, tinker_public_pb2

from openrl.tasks.errors import InvalidRequest, TooLarge, Undecodable
from openrl.tasks.messages import Forward, ForwardBackward
from openrl.tasks.wire import codec, openrl_pb2
from openrl.tasks.wire.tensors import MAX_EXPANDED_ELEMENTS, Expander

GOLDEN_REQUEST = base64.b64decode(
    "CgFtEAEadAoUChIKEAEAAAACAAAAAwAAAAQAAAASOAoNdGFyZ2V0X3Rva2VucxInCiACAAAAAAAAAAMAAAAAAAAABAAAAAAAAAAFAAAAAAAA"
    "ABgCIgEEEiIKB3dlaWdodHMSFwoQAAAAAAAAgD8AAIA/AACAPxgBIgEEIg1jcm9zc19lbnRyb3B5"
)
GOLDEN_OUTPUT = base64.b64decode(
    "Cg9Ub3JjaExvc3NSZXR1cm4SXwoPVG9yY2hMb3NzUmV0dXJuEkoKCGxvZ3Byb2JzEj4KIAAAgL8AAIC/AACAvwAAgL8AAIC/AACAvwAAgL8A"
    "AIC/EhgAAAAAAAAAABAAAAAAAAAAIAAAAAAAAAAYARgCGhMKCGxvc3M6c3VtEQAAAAAAAPg/GhoKD251bV90b2tlbnM6bWVhbhEAAAAAAAAQ"
    "QA=="
)
GOLDEN_SAMPLE = base64.b64decode(
    "Ch4IARIMBQAAAAYAAAAHAAAAGgwAAAC/AAAAvwAAAL8KHggBEgwFAAAABgAAAAcAAAAaDAAAAL8AAAC/AAAAvw=="
)
TARGETS = "data[0].loss_fn_inputs['target_tokens']"


@dataclass
class Body:
    """The SDK's request, on its own types."""

    datums: list
    loss_fn: str = "cross_entropy"
    config: dict | None = None
    model_id: str = "m"
    seq_id: int = 1

    def message(self) -> tinker_public_pb2.ForwardBackwardRequest:
        content = types.ForwardBackwardInput(data=self.datums, loss_fn=self.loss_fn, loss_fn_config=self.config)
        request = types.ForwardBackwardRequest(
            forward_backward_input=content, model_id=self.model_id, seq_id=self.seq_id
        )
        return request_conv.forward_backward_request_to_proto(request)

    def __bytes__(self) -> bytes:
        return self.message().SerializeToString()


@dataclass
class SparseBody:
    """A hand-made request with one sparse `weights`, valid until a test spoils a part."""

    shape: list = field(default_factory=lambda: [2, 3])
    values: list = field(default_factory=lambda: [1.0, 2.0, 3.0])
    rows: list = field(default_factory=lambda: [0, 1, 3])
    columns: list = field(default_factory=lambda: [2, 0, 1])

    def __bytes__(self) -> bytes:
        call = openrl_pb2.ForwardBackwardCall(model_id="m", seq_id=1)
        tensor = call.data.add().loss_fn_inputs["weights"]
        tensor.sparse_csr.values = np.array(self.values, "<f4").tobytes()
        tensor.sparse_csr.crow_indices = np.array(self.rows, "<i8").tobytes()
        tensor.sparse_csr.col_indices = np.array(self.columns, "<i8").tobytes()
        tensor.dtype = openrl_pb2.ELEMENT_FLOAT32
        tensor.shape.extend(self.shape)
        return call.SerializeToString()


def sdk_datum(tokens=(1, 2, 3, 4), **inputs):
    inputs = inputs or {"target_tokens": [2, 3, 4, 5], "weights": [0.0, 1.0, 1.0, 1.0]}
    return types.Datum(model_input=types.ModelInput.from_ints(list(tokens)), loss_fn_inputs=inputs)


def canonical(body) -> bytes:
    return codec.encode_forward_backward(codec.decode_forward_backward(bytes(body)))


def edited(change) -> bytes:
    """Return the golden request with one change made through our own module."""
    call = openrl_pb2.ForwardBackwardCall.FromString(GOLDEN_REQUEST)
    change(call)
    return call.SerializeToString()


def refusal(body: bytes, error: type[Exception] = InvalidRequest) -> str:
    with pytest.raises(error) as caught:
        codec.decode_forward_backward(body)
    return str(caught.value)


def json_body(**changes) -> dict:
    datum = {
        "model_input": {"chunks": [{"tokens": [1, 2, 3, 4]}]},
        "loss_fn_inputs": {
            "target_tokens": {"data": [2, 3, 4, 5], "dtype": "int64", "shape": [4]},
            "weights": {"data": [0, 1, 1, 1.0], "dtype": "float32", "shape": None},
        },
    }
    content = {"data": [datum], "loss_fn": "cross_entropy", "loss_fn_config": None} | changes
    return {"forward_backward_input": content, "model_id": "m", "seq_id": 1}


# Golden bytes ------------------------------------------------------------------------------------


def test_the_golden_request_decodes_exactly():
    request = codec.decode_forward_backward(GOLDEN_REQUEST)
    assert (request.model_id, request.seq_id, request.loss_fn) == ("m", 1, "cross_entropy")
    assert request.loss_fn_config == {} and not request.forward_only
    (datum,) = request.data
    assert datum.tokens.dtype == np.int32 and datum.tokens.tolist() == [1, 2, 3, 4]
    assert datum.inputs["target_tokens"].dtype == np.int64 and datum.inputs["target_tokens"].tolist() == [2, 3, 4, 5]
    assert datum.inputs["weights"].dtype == np.float32 and datum.inputs["weights"].tolist() == [0, 1, 1, 1]


def test_the_canonical_bytes_are_the_golden_ones_without_the_ids():
    assert canonical(GOLDEN_REQUEST) == GOLDEN_REQUEST.removeprefix(b"\x0a\x01m\x10\x01")


def test_the_golden_output_is_what_we_encode():
    logprobs = [np.full(4, -1.0, np.float32)] * 2
    assert codec.encode_forward_backward_output(logprobs, {"num_tokens:mean": 4.0, "loss:sum": 1.5}) == GOLDEN_OUTPUT


def test_the_golden_sample_is_what_we_encode():
    sequence = codec.SampledSequence(tokens=[5, 6, 7], logprobs=[-0.5] * 3, stop_reason="length")
    assert codec.encode_sample_response([sequence] * 2, None, None) == GOLDEN_SAMPLE


# The installed SDK at both ends ------------------------------------------------------------------


def test_a_request_of_the_sdk_decodes_with_sparse_targets_chunks_and_settings():
    import torch

    targets = torch.zeros(6, 4, dtype=torch.int64)
    weights = torch.zeros(6, 4)
    targets[1, 2], targets[5, 0], weights[5, 0] = 7, 9, -0.5
    chunks = [types.EncodedTextChunk(tokens=[1, 2]), types.EncodedTextChunk(tokens=[3, 4, 5, 6])]
    datum = types.Datum(
        model_input=types.ModelInput(chunks=chunks), loss_fn_inputs={"target_tokens": targets, "weights": weights}
    )
    body = Body([datum, sdk_datum()], config={"clip_low_threshold": 0.7}, seq_id=9)
    assert body.message().data[0].loss_fn_inputs["weights"].HasField("sparse_csr")
    request = codec.decode_forward_backward(bytes(body))
    assert request.seq_id == 9 and request.loss_fn_config == {"clip_low_threshold": 0.7}
    assert request.data[0].tokens.tolist() == [1, 2, 3, 4, 5, 6]
    assert np.array_equal(request.data[0].inputs["target_tokens"], targets.numpy())
    assert np.array_equal(request.data[0].inputs["weights"], weights.numpy())
    assert request.data[0].inputs["weights"].dtype == np.float32


def test_the_sdk_reads_our_output_with_1d_and_ragged_2d_logprobs():
    logprobs = [
        np.array([-1.0, -2.0], np.float32),
        np.arange(6, dtype=np.float32).reshape(3, 2),
        np.arange(9, dtype=np.float32).reshape(3, 3),
        np.arange(6, dtype=np.float32).reshape(2, 3),
        np.array([-3.0], np.float32),
    ]
    output = response_conv.deserialize_forward_backward_output(
        codec.encode_forward_backward_output(logprobs, {"loss:sum": float("nan")})
    )
    assert output.loss_fn_output_type == "TorchLossReturn" and np.isnan(output.metrics["loss:sum"])
    assert len(output.loss_fn_outputs) == 5
    for got, sent in zip(output.loss_fn_outputs, logprobs, strict=True):
        assert np.array_equal(got["logprobs"].to_numpy(), sent)


def candidates(*rows) -> codec.Candidates:
    return codec.Candidates(*np.moveaxis(np.array(rows, np.float64), -1, 0))


def test_the_sdk_reads_our_samples_with_prompt_and_topk_logprobs():
    topk = [[(3, -0.5), (0, -1.5)], [(4, -0.25), (3, -2.5)]]
    sequence = codec.SampledSequence(tokens=[3, 4], logprobs=[-0.5, -0.25], stop_reason="stop", topk=candidates(*topk))
    prompt_topk = [None, [(9, -2.0), (8, -3.0), (7, -4.0)]]
    parts = [codec.Candidates.none(1, 3), candidates(prompt_topk[1])]
    body = codec.encode_sample_response([sequence], [None, -2.0], codec.Candidates.joined(parts))
    response = response_conv.deserialize_sample_response(body)
    (got,) = response.sequences
    assert (got.tokens, got.logprobs, got.stop_reason, got.topk_logprobs) == ([3, 4], [-0.5, -0.25], "stop", topk)
    assert response.prompt_logprobs == [None, -2.0] and response.topk_prompt_logprobs == prompt_topk


def test_the_sdk_reads_named_ids_in_the_layout_it_asked_in():
    import torch

    sequence = codec.SampledSequence(tokens=[1], logprobs=[-1.0], stop_reason="stop")
    asked = torch.full((4, 5), -1)
    asked[1, 3], asked[3, 0] = 7, 9
    for tensor in (types.TensorData.from_torch(asked), types.TensorData.from_torch_sparse(asked, pad_value=-1)):
        sent = {
            "data": tensor.data, "dtype": tensor.dtype, "shape": tensor.shape,
            "sparse_crow_indices": tensor.sparse_crow_indices, "sparse_col_indices": tensor.sparse_col_indices,
        }  # fmt: skip
        cells = codec.decode_cells_json(json.loads(json.dumps(sent)), "target_prompt_logprobs")
        values = np.where(cells.values == -1, 0, cells.rows + cells.values / 16)
        body = codec.encode_sample_response([sequence], target_logprobs=replace(cells, values=values))
        got = response_conv.deserialize_sample_response(body).target_prompt_logprobs
        assert (got.dtype, got.shape) == ("float32", [4, 5])
        assert (got.sparse_crow_indices, got.sparse_col_indices) == (
            tensor.sparse_crow_indices,
            tensor.sparse_col_indices,
        )
        wanted = torch.zeros(4, 5)
        wanted[1, 3], wanted[3, 0] = 1 + 7 / 16, 3 + 9 / 16
        assert torch.equal(got.to_torch(), wanted)
        old = codec.sample_response_to_json(body)["target_prompt_logprobs"]
        assert old.get("sparse_crow_indices") == tensor.sparse_crow_indices and old["shape"] == [4, 5]
    assert tensor.sparse_crow_indices is not None


@pytest.mark.parametrize("shape", [(2, 3), (0, 3)])
def test_the_sdk_reads_draws_in_place_of_the_prompts_tokens(shape):
    sequence = codec.SampledSequence(tokens=[1], logprobs=[-1.0], stop_reason="stop")
    drawn = codec.Alternatives(np.arange(np.prod(shape)).reshape(shape), np.full(shape, -0.5, np.float32))
    body = codec.encode_sample_response([sequence], alternatives=drawn)
    got = response_conv.deserialize_sample_response(body).prompt_alt_tokens
    assert np.array_equal(got.tokens.to_numpy(), drawn.tokens) and got.tokens.dtype == "int64"
    assert np.array_equal(got.logprobs.to_numpy(), drawn.logprobs) and got.logprobs.dtype == "float32"
    assert codec.sample_response_to_json(body)["prompt_alt_tokens"]["tokens"]["shape"] == list(shape)


def test_a_prompt_of_one_token_has_no_topk_to_report():
    sequence = codec.SampledSequence(tokens=[1], logprobs=[-1.0], stop_reason="stop")
    response = response_conv.deserialize_sample_response(
        codec.encode_sample_response([sequence], [None], codec.Candidates.none(1, 0))
    )
    assert response.prompt_logprobs == [None] and response.topk_prompt_logprobs is None


# One operation, one encoding ---------------------------------------------------------------------


def test_the_same_operation_has_the_same_bytes_in_any_order_and_format():
    forwards = sdk_datum(target_tokens=[2, 3, 4, 5], weights=[0.0, 1.0, 1.0, 1.0])
    backwards = sdk_datum(weights=[0.0, 1.0, 1.0, 1.0], target_tokens=[2, 3, 4, 5])
    reference = canonical(Body([forwards, backwards]))
    assert canonical(Body([backwards, forwards], model_id="other", seq_id=77)) == reference
    content = json_body()["forward_backward_input"]["data"][0]
    request = codec.decode_forward_backward_json(json_body(data=[content, content]), forward_only=False)
    assert codec.encode_forward_backward(request) == reference


def test_settings_give_the_same_bytes_from_either_map_and_from_json():
    older = edited(lambda call: call.loss_fn_config.update({"b": 2.0, "a": 1.0}))
    both = bytes(Body([sdk_datum()], config={"a": 1.0, "b": 2.0}))
    request = codec.decode_forward_backward_json(json_body(loss_fn_config={"b": 2, "a": 1.0}), forward_only=False)
    assert canonical(older) == canonical(both) == codec.encode_forward_backward(request)


def test_chunks_spans_and_sparse_rows_leave_no_mark_on_the_bytes():
    def reshape(call):
        del call.data[0].model_input[:]
        for tokens in ([1], [], [2, 3, 4]):
            call.data[0].model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
        call.data[0].model_input_spans.add().sampled_tokens.sequence_id = "s"
        call.data[0].loss_fn_input_spans.add().prompt_tokens.length = 4

    assert canonical(edited(reshape)) == canonical(GOLDEN_REQUEST)
    dense = openrl_pb2.ForwardBackwardCall.FromString(bytes(SparseBody()))
    tensor = dense.data[0].loss_fn_inputs["weights"]
    tensor.dense = np.array([[0, 0, 1], [2, 3, 0]], "<f4").tobytes()
    assert canonical(SparseBody()) == canonical(dense.SerializeToString())


def test_canonical_bytes_decode_to_the_same_operation():
    import torch

    datum = sdk_datum(target_tokens=torch.ones(4, 2, dtype=torch.int64), weights=torch.ones(4, 2))
    request = codec.decode_forward_backward(bytes(Body([datum, sdk_datum()], config={"x": 0.1})))
    again = codec.decode_forward_backward(codec.encode_forward_backward(request))
    assert again.data == request.data and again.loss_fn_config == {"x": 0.1}
    assert codec.encode_forward_backward(again) == codec.encode_forward_backward(request)


def test_forward_and_forward_backward_share_bytes_and_differ_by_kind():
    request = codec.decode_forward_backward(GOLDEN_REQUEST)
    content = {"data": request.data, "loss_fn": request.loss_fn}
    assert Forward(**content).to_bytes() == ForwardBackward(**content).to_bytes()


def test_decoded_arrays_are_read_only():
    for body in (GOLDEN_REQUEST, bytes(SparseBody())):
        (datum,) = codec.decode_forward_backward(body).data
        assert not any(array.flags.writeable for array in (datum.tokens, *datum.inputs.values()))
    (datum,) = codec.decode_forward_backward_json(json_body(), forward_only=False).data
    assert not any(array.flags.writeable for array in (datum.tokens, *datum.inputs.values()))


def test_whole_number_weights_become_real_ones_only_where_nothing_is_lost():
    exact = sdk_datum(target_tokens=[2, 3, 4, 5], weights=np.array([0, 1, -(1 << 24), 1 << 24]))
    lossy = sdk_datum(target_tokens=[2, 3, 4, 5], weights=np.array([0, 1, 1, (1 << 24) + 1]))
    request = codec.decode_forward_backward(bytes(Body([exact, lossy])))
    assert request.data[0].inputs["weights"].dtype == np.float32
    assert request.data[0].inputs["weights"].tolist() == [0, 1, -(1 << 24), 1 << 24]
    assert request.data[1].inputs["weights"].dtype == np.int64
    assert request.data[0].inputs["target_tokens"].dtype == np.int64


# Malformed bodies --------------------------------------------------------------------------------


@pytest.mark.parametrize("body", [GOLDEN_REQUEST[:-3], b"\xff", b'{"model_id": "m"}'])
def test_a_body_that_is_no_protobuf_is_undecodable(body):
    refusal(body, Undecodable)


def test_ids_are_found_in_a_broken_body():
    assert codec.peek_forward_backward(GOLDEN_REQUEST[:-3]) == ("m", 1)
    other_order = b"\x30\x01\x10\x05\x0a\x02mm\xff\xff"
    assert codec.peek_forward_backward(other_order) == ("mm", 5)


@pytest.mark.parametrize(
    "body",
    [b"", b"\xff" * 20, b"\x0a\x05m", b"\x0a\x01m\x10\x00", b"\x0a\x02\xff\xff\x10\x01", b"\x10\x00" * 1_000_000],
)
def test_no_ids_are_made_up_where_there_are_none(body):
    assert codec.peek_forward_backward(body) is None


def test_unknown_fields_are_refused_by_number_at_every_level():
    field_99 = b"\x98\x06\x01"
    assert "the request has the unknown protobuf field number 99" in refusal(GOLDEN_REQUEST + field_99)

    def unknown_in(part):
        return edited(lambda call: part(call).MergeFromString(field_99))

    assert "data[0] has the unknown" in refusal(unknown_in(lambda call: call.data[0]))
    assert "data[0].model_input[0] has" in refusal(unknown_in(lambda call: call.data[0].model_input[0]))
    assert "model_input[0] has" in refusal(unknown_in(lambda call: call.data[0].model_input[0].encoded_text))
    assert f"{TARGETS} has" in refusal(unknown_in(lambda call: call.data[0].loss_fn_inputs["target_tokens"]))
    assert "loss_fn_config['x'] has" in refusal(unknown_in(lambda call: call.loss_fn_config_v2["x"]))


@pytest.mark.parametrize("kind", ["image", "dmel"])
def test_a_chunk_that_is_no_text_is_refused_by_its_kind(kind):
    text = refusal(edited(lambda call: getattr(call.data[0].model_input.add(), kind).SetInParent()))
    assert text == f"data[0].model_input[1] is a chunk of '{kind}'; only 'encoded_text' is supported"


def test_an_image_of_the_sdk_is_refused():
    image = types.ImageChunk(data=b"png", format="png")
    datum = types.Datum(model_input=types.ModelInput(chunks=[image]), loss_fn_inputs={"target_tokens": [1]})
    assert "'image'" in refusal(bytes(Body([datum])))


def test_a_chunk_without_content_is_refused():
    assert "no kind" in refusal(edited(lambda call: call.data[0].model_input.add()))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensor: setattr(tensor, "dense", b"\0" * 9), "has 9 bytes; int64 needs a multiple of 8"),
        (lambda tensor: setattr(tensor, "dense", b"\0" * 8), "has 1 values; its shape [4] needs 4"),
        (lambda tensor: setattr(tensor, "dtype", 3), "has dtype 3; it must be 1 (float32) or 2 (int64)"),
        (lambda tensor: setattr(tensor, "dtype", 77), "has dtype 77"),
        (lambda tensor: tensor.ClearField("dtype"), "has dtype 0"),
        (lambda tensor: tensor.ClearField("encoding"), "has neither dense nor sparse_csr values"),
        (lambda tensor: tensor.shape.append(-1), "has shape [4, -1]; it must be [N] or [N, K]"),
        (lambda tensor: tensor.shape.extend([1, 1]), "has shape [4, 1, 1]; it must be [N] or [N, K]"),
        (lambda tensor: tensor.shape.append(1 << 62), f"its shape [4, {1 << 62}] needs {1 << 64}"),
    ],
)
def test_a_malformed_tensor_is_refused_by_datum_and_name(change, reason):
    text = refusal(edited(lambda call: change(call.data[0].loss_fn_inputs["target_tokens"])))
    assert text.startswith(TARGETS) and reason in text


def test_tokens_of_a_wrong_length_are_refused():
    def cut(call):
        call.data[0].model_input[0].encoded_text.tokens = b"\0" * 6

    assert "data[0].model_input[0].tokens has 6 bytes; int32 needs a multiple of 4" in refusal(edited(cut))


@pytest.mark.parametrize(
    ("spoiled", "reason"),
    [
        (SparseBody(columns=[3, 0, 1]), "has column index 3; it must be from 0 to 2"),
        (SparseBody(columns=[-1, 0, 1]), "has column index -1"),
        (SparseBody(columns=[2, 1, 1]), "in increasing order, each once"),
        (SparseBody(columns=[2, 1, 0]), "in increasing order, each once"),
        (SparseBody(columns=[2, 0]), "has 3 values and 2 column indices"),
        (SparseBody(rows=[0, 3]), "has 2 row pointers; 2 rows need 3"),
        (SparseBody(rows=[]), "has 0 row pointers"),
        (SparseBody(rows=[1, 1, 3]), "don't grow from 0 to its 3 values"),
        (SparseBody(rows=[0, 4, 3]), "don't grow from 0 to its 3 values"),
        (SparseBody(rows=[0, 1, 2]), "don't grow from 0 to its 3 values"),
        (SparseBody(shape=[6]), "needs a shape [N, K], not [6]"),
        (SparseBody(shape=[]), "needs a shape [N, K], not []"),
        (SparseBody(shape=[-2, 3]), "it must be [N] or [N, K]"),
        (SparseBody(shape=[2, 0]), "has column index 2"),
    ],
)
def test_malformed_sparse_rows_are_refused_before_they_are_expanded(spoiled, reason):
    text = refusal(bytes(spoiled))
    assert text.startswith("data[0].loss_fn_inputs['weights']") and reason in text


@pytest.mark.parametrize("width", [MAX_EXPANDED_ELEMENTS, 1 << 40, (1 << 63) - 1])
def test_a_few_bytes_cannot_claim_a_huge_shape(width):
    assert f"has shape [2, {width}]" in refusal(bytes(SparseBody(shape=[2, width])), TooLarge)


def test_all_sparse_tensors_of_a_request_share_one_cap():
    expander = Expander(room=9)
    empty = np.empty(0, np.float32), np.zeros(3, np.int64), np.empty(0, np.int64)
    assert expander.expand(*empty, [2, 3], "first").shape == (2, 3)
    with pytest.raises(TooLarge, match="second has shape"):
        expander.expand(*empty, [2, 3], "second")


def test_more_parts_than_any_sdk_sends_are_refused_unread():
    assert "9000 datums" in refusal(edited(lambda call: [call.data.add() for _ in range(8999)]), TooLarge)
    chunks = edited(lambda call: [call.data[0].model_input.add() for _ in range(70_000)])
    assert "70001 chunks" in refusal(chunks, TooLarge)


# Settings of the loss ----------------------------------------------------------------------------


def test_the_newer_map_wins_where_it_is_not_empty():
    def both(call):
        call.loss_fn_config["older"] = 1.0
        call.loss_fn_config_v2["newer"].number = 2.0

    assert codec.decode_forward_backward(edited(both)).loss_fn_config == {"newer": 2.0}


def test_a_text_where_a_number_is_wanted_is_refused_by_name():
    text = refusal(bytes(Body([sdk_datum()], config={"kl_coeff": "much"})))
    assert text == "loss_fn_config['kl_coeff'] must be a number, not 'much'"
    assert "must be a number" in refusal(edited(lambda call: call.loss_fn_config_v2["x"].SetInParent()))


# JSON --------------------------------------------------------------------------------------------


def test_json_and_protobuf_decode_to_the_same_values():
    binary = codec.decode_forward_backward(GOLDEN_REQUEST)
    text = codec.decode_forward_backward_json(json_body(), forward_only=False)
    assert (text.model_id, text.seq_id, text.data) == (binary.model_id, binary.seq_id, binary.data)


def test_the_older_forward_route_has_its_own_key():
    body = json_body()
    body["forward_input"] = body.pop("forward_backward_input")
    assert codec.decode_forward_backward_json(body, forward_only=True).forward_only
    with pytest.raises(InvalidRequest, match="unknown key 'forward_input'"):
        codec.decode_forward_backward_json(body, forward_only=False)


def test_sparse_json_expands_like_sparse_protobuf():
    body = json_body()
    body["forward_backward_input"]["data"][0]["loss_fn_inputs"] = {
        "weights": {
            "data": [1, 2, 3],
            "dtype": "float32",
            "shape": [2, 3],
            "sparse_crow_indices": [0, 1, 3],
            "sparse_col_indices": [2, 0, 1],
        }
    }
    (datum,) = codec.decode_forward_backward_json(body, forward_only=False).data
    (other,) = codec.decode_forward_backward(bytes(SparseBody())).data
    assert np.array_equal(datum.inputs["weights"], other.inputs["weights"])


@pytest.mark.parametrize(
    ("path", "value", "reason"),
    [
        ((), [], "the request must be an object"),
        (("extra",), 1, "the request has the unknown key 'extra'"),
        (("seq_id",), "1", "seq_id must be a whole number"),
        (("seq_id",), True, "seq_id must be a whole number"),
        (("forward_backward_input",), None, "forward_backward_input must be an object"),
        (("forward_backward_input", "loss"), "x", "forward_backward_input has the unknown key 'loss'"),
        (("forward_backward_input", "data"), {}, "data must be a list"),
        (("forward_backward_input", "loss_fn"), 3, "loss_fn must be a text"),
        (("forward_backward_input", "loss_fn_config"), {"a": "b"}, "loss_fn_config['a'] must be a number"),
        (("forward_backward_input", "loss_fn_config"), {"a": True}, "loss_fn_config['a'] must be a number"),
        (("forward_backward_input", "loss_fn_config"), {"a": 10**400}, "loss_fn_config['a'] is too large"),
        (("datum", "mask"), [1], "data[0] has the unknown key 'mask'"),
        (("datum", "model_input"), {"chunks": [{"tokens": ["a"]}]}, "chunks[0].tokens must hold int32 numbers only"),
        (("datum", "model_input"), {"chunks": [{"tokens": [1.5]}]}, "it holds float"),
        (("datum", "model_input"), {"chunks": [{"tokens": [True]}]}, "it holds bool"),
        (("datum", "model_input"), {"chunks": [{"tokens": [[1]]}]}, "it holds list"),
        (("datum", "model_input"), {"chunks": [{"tokens": [1 << 31]}]}, "a number that int32 can't hold"),
        (("datum", "model_input"), {"chunks": [{"tokens": [1 << 70]}]}, "a number that int32 can't hold"),
        (("datum", "model_input"), {"chunks": [{"type": "image", "data": ""}]}, "chunks[0] is a chunk of 'image'"),
        (("datum", "model_input"), {"chunks": [{"type": "image_asset_pointer"}]}, "only 'encoded_text' is supported"),
        (("datum", "model_input"), {"chunks": [[1]]}, "chunks[0] must be an object"),
        (("weights", "dtype"), "float64", "has dtype 'float64'; it must be 'float32' or 'int64'"),
        (("weights", "data"), [1, 2, 3, None], "it holds NoneType"),
        (("weights", "data"), [1, 2, 3, 10**400], "a number that float32 can't hold"),
        (("weights", "shape"), [2], "has 4 values; its shape [2] needs 2"),
        (("weights", "shape"), [-4], "it must be [N] or [N, K]"),
        (("weights", "sparse_crow_indices"), [0], "sparse_col_indices must be a list of numbers"),
        (("weights", "layout"), "csr", "has the unknown key 'layout'"),
    ],
)
def test_malformed_json_is_refused_by_name(path, value, reason):
    body = json_body()
    datum = body["forward_backward_input"]["data"][0]
    places = {"datum": datum, "weights": datum["loss_fn_inputs"]["weights"]}
    if not path:
        body = value
    else:
        place = places.get(path[0], body)
        inner = [part for part in path[:-1] if part not in places]
        for part in inner:
            place = place[part]
        place[path[-1]] = value
    with pytest.raises(InvalidRequest) as caught:
        codec.decode_forward_backward_json(body, forward_only=False)
    assert reason in str(caught.value)


def test_a_float_beyond_float32_becomes_infinity_without_a_warning():
    body = json_body()
    body["forward_backward_input"]["data"][0]["loss_fn_inputs"]["weights"]["data"] = [0, 1, 1, 1e300]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (datum,) = codec.decode_forward_backward_json(body, forward_only=False).data
    assert datum.inputs["weights"].tolist() == [0, 1, 1, float("inf")]


def test_a_prompt_of_several_chunks_is_one_list_of_tokens():
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}, {"tokens": [3], "type": None}]}
    assert codec.decode_prompt_json(prompt) == (1, 2, 3)
    assert codec.decode_prompt_json({"chunks": []}) == ()
    with pytest.raises(InvalidRequest, match=r"prompt.chunks\[0\] is a chunk of 'dmel'"):
        codec.decode_prompt_json({"chunks": [{"type": "dmel", "dmel": ""}]})


def test_results_turn_into_json_without_nan_or_infinity():
    logprobs = [np.array([-1.0, np.nan], np.float32), np.array([[-1.0, -np.inf]], np.float32)]
    metrics = {"loss:sum": 1.5, "kl:mean": float("nan"), "ratio:max": float("inf")}
    output = codec.output_to_json(codec.encode_forward_backward_output(logprobs, metrics))
    assert json.loads(json.dumps(output, allow_nan=False)) == {
        "loss_fn_output_type": "TorchLossReturn",
        "loss_fn_outputs": [
            {"logprobs": {"data": [-1.0, None], "dtype": "float32", "shape": [2]}},
            {"logprobs": {"data": [-1.0, None], "dtype": "float32", "shape": [1, 2]}},
        ],
        "metrics": {"loss:sum": 1.5},
    }


def test_samples_turn_into_the_older_json():
    sequence = codec.SampledSequence(
        tokens=[3], logprobs=[-0.5], stop_reason="stop", topk=candidates([(3, -0.5), (0, -1.5)])
    )
    prompt_topk = codec.Candidates.joined([codec.Candidates.none(1, 1), candidates([(9, -2.0)])])
    body = codec.encode_sample_response([sequence], [None, -2.0], prompt_topk)
    assert json.loads(json.dumps(codec.sample_response_to_json(body), allow_nan=False)) == {
        "type": "sample",
        "sequences": [
            {"stop_reason": "stop", "tokens": [3], "logprobs": [-0.5], "topk_logprobs": [[[3, -0.5], [0, -1.5]]]}
        ],
        "prompt_logprobs": [None, -2.0],
        "topk_prompt_logprobs": [None, [[9, -2.0]]],
    }
    plain = codec.SampledSequence(tokens=[3], logprobs=[-0.5], stop_reason="length")
    assert codec.sample_response_to_json(codec.encode_sample_response([plain])).keys() == {"type", "sequences"}


def test_a_metric_the_sdk_cannot_reduce_is_our_own_mistake():
    with pytest.raises(AssertionError):
        codec.encode_forward_backward_output([], {"loss": 1.0})
