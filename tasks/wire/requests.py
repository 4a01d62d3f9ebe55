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

_FIELDS_PEEKED = 16
"""Both ids come first in what every SDK writes; a broken body isn't searched any further."""


def decode_forward_backward(body: bytes) -> ForwardBackwardRequest:
    """Read a protobuf body, already decompressed.

    Raises:
        Undecodable: it is no protobuf message of this kind.
        InvalidRequest: a datum, tensor or setting is malformed; the message names it.
    """
    call = pb.ForwardBackwardCall()
    try:
        call.ParseFromString(body)
    except DecodeError as error:
        raise Undecodable(f"the body is no forward_backward protobuf message: {error}") from error
    _refuse_unknown(call, "the request")
    refuse_crowd(len(call.data), MAX_DATUMS, "datums")
    refuse_crowd(sum(len(example.model_input) for example in call.data), _MAX_PARTS, "chunks")
    refuse_crowd(sum(len(example.loss_fn_inputs) for example in call.data), _MAX_PARTS, "loss_fn_inputs")
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
            tag, position = _varint(body, position)
            if tag == 1 << 3 | 2:
                length, start = _varint(body, position)
                position = start + length
                model_id = body[start:position].decode() if position <= len(body) else ""
            elif tag == 2 << 3 | 0:
                seq_id, position = _varint(body, position)
            else:
                position = _skip(tag & 7, body, position)
            if model_id and 0 < seq_id < 1 << 31:
                return model_id, seq_id
    except (IndexError, ValueError):
        return None
    return None


def _datum(example: pb.Example, where: str, expander: Expander) -> Datum:
    _refuse_unknown(example, where)
    return Datum(
        tokens=joined([_chunk(chunk, f"{where}.model_input[{i}]") for i, chunk in enumerate(example.model_input)]),
        inputs={
            name: by_key(name, _tensor(tensor, f"{where}.loss_fn_inputs[{shown(name)}]", expander))
            for name, tensor in example.loss_fn_inputs.items()
        },
    )


def _chunk(chunk: pb.Chunk, where: str) -> np.ndarray:
    _refuse_unknown(chunk, where)
    kind = chunk.WhichOneof("chunk")
    if kind != "encoded_text":
        raise unsupported_chunk(kind, where)
    _refuse_unknown(chunk.encoded_text, where)
    return unpack(chunk.encoded_text.tokens, INT32, f"{where}.tokens")


def _tensor(tensor: pb.Tensor, where: str, expander: Expander) -> np.ndarray:
    _refuse_unknown(tensor, where)
    dtype = _ELEMENT_DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidRequest(f"{where} has dtype {tensor.dtype}; it must be 1 (float32) or 2 (int64)")
    shape = tuple(tensor.shape)
    match tensor.WhichOneof("encoding"):
        case "dense":
            return shaped(unpack(tensor.dense, dtype, where), shape, where)
        case "sparse_csr":
            csr = tensor.sparse_csr
            _refuse_unknown(csr, where)
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
        _refuse_unknown(value, f"loss_fn_config[{shown(name)}]")
        given = value.WhichOneof("value")
        config[name] = setting(name, getattr(value, given) if given else None)
    return config


def _refuse_unknown(message: Message, where: str) -> None:
    """Refuse fields that our `.proto` doesn't have; protobuf itself would keep quiet about them."""
    unknown = UnknownFieldSet(message)
    if len(unknown):
        raise InvalidRequest(f"{where} has the unknown protobuf field number {unknown[0].field_number}; remove it")


def _varint(body: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = body[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("a varint has at most ten bytes")


def _skip(wire_type: int, body: bytes, position: int) -> int:
    match wire_type:
        case 0:
            return _varint(body, position)[1]
        case 1:
            return position + 8
        case 2:
            length, position = _varint(body, position)
            return position + length
        case 5:
            return position + 4
    raise ValueError(f"wire type {wire_type} is not used")
