"""forward_backward requests in protobuf: bytes to values, and values to canonical bytes.

Decoding refuses what is malformed and what would be ignored (unknown fields, images). The provenance
spans of a datum are the one thing read over: the cookbook sends them with every loss, and only
stable_reinforce, which isn't served, uses them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from google.protobuf.message import DecodeError, Message
from google.protobuf.unknown_fields import UnknownFieldSet

from openrl.tasks.errors import InvalidRequest, Undecodable, shown
from openrl.tasks.wire import openrl_pb2 as pb
from openrl.tasks.wire.parts import refuse_crowd_of_parts, skipped, varint
from openrl.tasks.wire.tensors import FLOAT32, INT32, INT64, Expander, shaped, unpack
from openrl.tasks.wire.values import (
    MAX_DATUMS,
    Datum,
    ForwardBackwardRequest,
    LossCall,
    by_key,
    joined,
    refuse_crowd,
    setting,
    unsupported_chunk,
)

_ELEMENT_DTYPES: dict[int, np.dtype[Any]] = {pb.ELEMENT_FLOAT32: FLOAT32, pb.ELEMENT_INT64: INT64}
_DTYPE_ELEMENTS: dict[np.dtype[Any], pb.ElementType] = {FLOAT32: pb.ELEMENT_FLOAT32, INT64: pb.ELEMENT_INT64}
_MAX_PARTS = 8 * MAX_DATUMS
"""Chunks of one request, and tensors."""

_MAX_SETTINGS = 64
"""Entries of both maps of settings; no loss has more than a few."""

_NAMED_BYTES = 64 << 10
"""Of that much that isn't known, protobuf's list is made, to name the first; it takes fifty times the bytes."""

_FIELDS_PEEKED = 16
"""Both ids come first in what every SDK writes; a broken body isn't searched any further."""


def decode_forward_backward(body: bytes) -> ForwardBackwardRequest:
    """Read a protobuf body, already decompressed.

    Raises:
        Undecodable: it is no protobuf message of this kind.
        InvalidRequest: a datum, tensor or setting is malformed; the message names it.
    """
    refuse_crowd_of_parts(body)
    call = pb.ForwardBackwardCall()
    try:
        call.ParseFromString(body)
    except DecodeError as error:
        raise Undecodable(f"the body is no forward_backward protobuf message: {error}") from error
    refuse_crowd(len(call.data), MAX_DATUMS, "datums")
    refuse_crowd(sum(len(example.model_input) for example in call.data), _MAX_PARTS, "chunks")
    refuse_crowd(sum(len(example.loss_fn_inputs) for example in call.data), _MAX_PARTS, "loss_fn_inputs")
    refuse_crowd(len(call.loss_fn_config) + len(call.loss_fn_config_v2), _MAX_SETTINGS, "settings")
    _refuse_unknown_fields(call, body)
    expander = Expander()
    return ForwardBackwardRequest(
        model_id=call.model_id,
        seq_id=call.seq_id,
        data=tuple(_datum(example, f"data[{i}]", expander) for i, example in enumerate(call.data)),
        loss_fn=call.loss_fn,
        loss_fn_config=_config(call),
        forward_only=call.forward_only,
    )


def encode_forward_backward(operation: LossCall) -> bytes:
    """Return the canonical protobuf: sorted maps, dense tensors, one chunk a datum, no ids, no spans.

    The same operation gives the same bytes however it came; `decode_forward_backward` reads them.
    """
    call = pb.ForwardBackwardCall(loss_fn=operation.loss_fn)
    for name, number in operation.loss_fn_config.items():
        call.loss_fn_config[name] = number
    for datum in operation.data:
        example = call.data.add()
        example.model_input.add().encoded_text.tokens = datum.tokens.astype(INT32, copy=False).tobytes()
        for name, array in datum.inputs.items():
            tensor = example.loss_fn_inputs[name]
            tensor.dense = array.tobytes()
            tensor.dtype = _DTYPE_ELEMENTS[array.dtype]
            tensor.shape.extend(array.shape)
    return call.SerializeToString(deterministic=True)


def peek_forward_backward(body: bytes) -> tuple[str, int] | None:
    """Find model id and seq id in a body that may be broken further on; None where they can't be found.

    A refused request still consumes its seq id, so that the run doesn't wait for it for ever.
    """
    model_id, seq_id, position = "", 0, 0
    try:
        for _ in range(_FIELDS_PEEKED):
            tag, position = varint(body, position)
            if tag == 1 << 3 | 2:
                length, start = varint(body, position)
                position = start + length
                model_id = body[start:position].decode() if position <= len(body) else ""
            elif tag == 2 << 3 | 0:
                seq_id, position = varint(body, position)
            else:
                position = skipped(tag & 7, body, position)
            if model_id and 0 < seq_id < 1 << 31:
                return model_id, seq_id
    except (IndexError, ValueError):
        return None
    return None


def _datum(example: pb.Example, where: str, expander: Expander) -> Datum:
    return Datum(
        tokens=joined([_chunk(chunk, f"{where}.model_input[{i}]") for i, chunk in enumerate(example.model_input)]),
        inputs={
            name: by_key(name, _tensor(tensor, f"{where}.loss_fn_inputs[{shown(name)}]", expander))
            for name, tensor in example.loss_fn_inputs.items()
        },
    )


def _chunk(chunk: pb.Chunk, where: str) -> np.ndarray:
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        raise unsupported_chunk(kind, where)
    return unpack(chunk.encoded_text.tokens, INT32, f"{where}.tokens")


def _tensor(tensor: pb.Tensor, where: str, expander: Expander) -> np.ndarray:
    dtype = _ELEMENT_DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidRequest(f"{where} has dtype {tensor.dtype}; it must be 1 (float32) or 2 (int64)")
    shape = tuple(tensor.shape)
    match tensor.WhichOneof("encoding"):
        case "dense":
            return shaped(unpack(tensor.dense, dtype, where), shape, where)
        case "sparse_csr":
            csr = tensor.sparse_csr
            return expander.expand(
                unpack(csr.values, dtype, f"{where}.values"),
                unpack(csr.crow_indices, INT64, f"{where}.crow_indices"),
                unpack(csr.col_indices, INT64, f"{where}.col_indices"),
                shape,
                where,
            )
    raise InvalidRequest(f"{where} has neither dense nor sparse_csr values")


def _config(call: pb.ForwardBackwardCall) -> dict[str, float]:
    """Return the settings of the newer map, or of the older one where that is empty (older SDKs)."""
    if not call.loss_fn_config_v2:
        return dict(call.loss_fn_config)
    config = {}
    for name, value in call.loss_fn_config_v2.items():
        given = value.WhichOneof("value")
        config[name] = setting(name, getattr(value, given) if given else None)
    return config


def _refuse_unknown_fields(call: pb.ForwardBackwardCall, body: bytes) -> None:
    """Refuse fields that our `.proto` doesn't have; protobuf itself would keep quiet about them.

    `call` loses them. What an SDK sends is as long without them as it was, and is looked at no further.
    """
    call.DiscardUnknownFields()
    known_bytes = call.ByteSize()
    if known_bytes == len(body):
        return
    whole = pb.ForwardBackwardCall.FromString(body)
    if whole.ByteSize() - known_bytes > _NAMED_BYTES:
        raise InvalidRequest("the request has many unknown protobuf fields; remove them")
    _refuse_unknown(whole, "the request")
    for i, example in enumerate(whole.data):
        _refuse_unknown(example, f"data[{i}]")
        for j, chunk in enumerate(example.model_input):
            _refuse_unknown(chunk, f"data[{i}].model_input[{j}]")
            _refuse_unknown(chunk.encoded_text, f"data[{i}].model_input[{j}]")
        for name, tensor in example.loss_fn_inputs.items():
            _refuse_unknown(tensor, f"data[{i}].loss_fn_inputs[{shown(name)}]")
            _refuse_unknown(tensor.sparse_csr, f"data[{i}].loss_fn_inputs[{shown(name)}]")
    for name, value in whole.loss_fn_config_v2.items():
        _refuse_unknown(value, f"loss_fn_config[{shown(name)}]")


def _refuse_unknown(message: Message, where: str) -> None:
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise InvalidRequest(f"{where} has the unknown protobuf field number {unknown[0].field_number}; remove it")
