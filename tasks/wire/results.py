"""Results of forward_backward and sample: values to protobuf, and that to the older SDKs' JSON.

A result is stored as protobuf, whatever its reader takes; JSON is made when it is read. JSON never
holds NaN or infinity: they become null, and a metric that isn't finite is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from openrl.tasks.wire import openrl_pb2 as pb
from openrl.tasks.wire.tensors import FLOAT32, INT32, INT64
from openrl.tasks.wire.values import Cells

OUTPUT_TYPE = "TorchLossReturn"
EMPTY_LOGPROB = -99999.0
"""Fills unused cells of a top-k row, with token 0; a row that starts with it reads as None."""


class Candidates(NamedTuple):
    """The likeliest tokens of each position, best first: ids and their logprobs, both [positions, k].

    A position that has none is filled with token 0 and `EMPTY_LOGPROB`.
    """

    tokens: np.ndarray
    logprobs: np.ndarray

    @classmethod
    def none(cls, num_positions: int, k: int) -> Self:
        """Return positions that have none."""
        return cls(np.zeros((num_positions, k), INT32), np.full((num_positions, k), EMPTY_LOGPROB, FLOAT32))

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Put parts of the same k (at least one) behind each other."""
        return cls(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledSequence:
    """One continuation; `logprobs` and `topk` (None: not asked for) have a row for each token."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stop_reason: Literal["stop", "length"]
    topk: Candidates | None = None


class Alternatives(NamedTuple):
    """Draws in place of each prompt token after the first: ids and their logprobs, both [prompt length - 1, k]."""

    tokens: np.ndarray
    logprobs: np.ndarray


_STOP_REASONS = {"stop": pb.STOP_REASON_STOP, "length": pb.STOP_REASON_LENGTH}
_STOP_NAMES = {number: name for name, number in _STOP_REASONS.items()}


# forward_backward --------------------------------------------------------------------------------


def encode_forward_backward_output(logprobs: Sequence[np.ndarray], metrics: Mapping[str, float]) -> bytes:
    """Encode each datum's float32 logprobs ([N] or [N, K], in datum order) and the metrics.

    Consecutive datums of the same K share a record. A metric's name is `<name>:<reduction>`.
    """
    for name in metrics:
        assert name.count(":") == 1, f"the SDK can't reduce a metric called {name!r}"
    result = pb.ForwardBackwardResult(loss_fn_output_type=OUTPUT_TYPE)
    for trailing, run in groupby(logprobs, key=lambda array: array.shape[1:]):
        arrays = [np.asarray(array, FLOAT32) for array in run]
        record = result.loss_fn_outputs.add(type_tag=OUTPUT_TYPE, num_datums=len(arrays))
        field = record.fields["logprobs"]
        field.data = b"".join(array.tobytes() for array in arrays)
        field.offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=INT64).tobytes()
        field.dtype = pb.ELEMENT_FLOAT32
        field.trailing_shape.extend(trailing)
    for name, value in metrics.items():
        result.metrics[name] = value
    return result.SerializeToString(deterministic=True)


def output_to_json(body: bytes) -> dict[str, Any]:
    """Turn what `encode_forward_backward_output` wrote into the older SDKs' JSON."""
    result = pb.ForwardBackwardResult.FromString(body)
    outputs = chain.from_iterable(map(_record_arrays, result.loss_fn_outputs))
    return {
        "loss_fn_output_type": result.loss_fn_output_type,
        "loss_fn_outputs": [
            {"logprobs": {"data": _finite(array.ravel()), "dtype": "float32", "shape": list(array.shape)}}
            for array in outputs
        ],
        "metrics": {name: value for name, value in sorted(result.metrics.items()) if np.isfinite(value)},
    }


def _record_arrays(record: pb.Record) -> Iterator[np.ndarray]:
    field = record.fields["logprobs"]
    values = np.frombuffer(field.data, FLOAT32)
    bounds = (np.frombuffer(field.offsets, INT64) // FLOAT32.itemsize).tolist()
    width = math.prod(field.trailing_shape)
    for start, stop in pairwise(bounds):
        yield values[start:stop].reshape((stop - start) // width, *field.trailing_shape)


# sample ------------------------------------------------------------------------------------------


def encode_sample_response(
    sequences: Sequence[SampledSequence],
    prompt_logprobs: Sequence[float | None] | None = None,
    topk_prompt_logprobs: Candidates | None = None,
    target_logprobs: Cells | None = None,
    alternatives: Alternatives | None = None,
    *,
    weights: str = "",
) -> bytes:
    """Encode the continuations; the prompt's logprobs (None where there is none) only where asked for.

    `weights` names the version that drew them, "" the base model.
    """
    result = pb.SampleResult(weights=weights)
    for sequence in sequences:
        continuation = result.sequences.add(
            stop_reason=_STOP_REASONS[sequence.stop_reason],
            tokens=np.array(sequence.tokens, INT32).tobytes(),
            logprobs=np.array(sequence.logprobs, FLOAT32).tobytes(),
        )
        if sequence.topk is not None:
            continuation.topk_sampled_logprobs.CopyFrom(_topk(sequence.topk))
    if prompt_logprobs is not None:
        result.prompt_logprobs = np.array(prompt_logprobs, FLOAT32).tobytes()  # numpy reads None as NaN
    if topk_prompt_logprobs is not None:
        result.topk_prompt_logprobs.CopyFrom(_topk(topk_prompt_logprobs))
    if target_logprobs is not None:
        result.target_prompt_logprobs.CopyFrom(_cells(target_logprobs))
    if alternatives is not None:
        result.prompt_alt_tokens.tokens.CopyFrom(_dense(alternatives.tokens, INT64, pb.ELEMENT_INT64))
        result.prompt_alt_tokens.logprobs.CopyFrom(_dense(alternatives.logprobs, FLOAT32, pb.ELEMENT_FLOAT32))
    return result.SerializeToString(deterministic=True)


def sample_response_to_json(body: bytes) -> dict[str, Any]:
    """Turn what `encode_sample_response` wrote into the older SDKs' JSON."""
    result = pb.SampleResult.FromString(body)
    response: dict[str, Any] = {"type": "sample", "sequences": [_continuation_json(one) for one in result.sequences]}
    if result.HasField("prompt_logprobs"):
        response["prompt_logprobs"] = _finite(np.frombuffer(result.prompt_logprobs, FLOAT32))
    if result.HasField("topk_prompt_logprobs"):
        response["topk_prompt_logprobs"] = _topk_lists(result.topk_prompt_logprobs)
    if result.HasField("target_prompt_logprobs"):
        response["target_prompt_logprobs"] = _tensor_json(result.target_prompt_logprobs)
    if result.HasField("prompt_alt_tokens"):
        drawn = result.prompt_alt_tokens
        response["prompt_alt_tokens"] = {"tokens": _tensor_json(drawn.tokens), "logprobs": _tensor_json(drawn.logprobs)}
    if result.weights:
        response["weights"] = result.weights
    return response


def _continuation_json(continuation: pb.Continuation) -> dict[str, Any]:
    sequence: dict[str, Any] = {
        "stop_reason": _STOP_NAMES[continuation.stop_reason],
        "tokens": np.frombuffer(continuation.tokens, INT32).tolist(),
        "logprobs": _finite(np.frombuffer(continuation.logprobs, FLOAT32)),
    }
    if continuation.HasField("topk_sampled_logprobs"):
        sequence["topk_logprobs"] = _topk_lists(continuation.topk_sampled_logprobs)
    return sequence


def _dense(array: np.ndarray, dtype: np.dtype[Any], element: pb.ElementType) -> pb.Tensor:
    return pb.Tensor(dense=np.asarray(array, dtype).tobytes(), dtype=element, shape=array.shape)


def _cells(cells: Cells) -> pb.Tensor:
    """Pack float32 cells in their own layout."""
    if cells.crow is None or cells.columns is None:
        return _dense(cells.values.reshape(cells.shape), FLOAT32, pb.ELEMENT_FLOAT32)
    csr = pb.Csr(
        values=np.asarray(cells.values, FLOAT32).tobytes(),
        crow_indices=np.asarray(cells.crow, INT64).tobytes(),
        col_indices=np.asarray(cells.columns, INT64).tobytes(),
    )
    return pb.Tensor(sparse_csr=csr, dtype=pb.ELEMENT_FLOAT32, shape=cells.shape)


def _tensor_json(tensor: pb.Tensor) -> dict[str, Any]:
    sparse = tensor.HasField("sparse_csr")
    whole = tensor.dtype == pb.ELEMENT_INT64
    values = np.frombuffer(tensor.sparse_csr.values if sparse else tensor.dense, INT64 if whole else FLOAT32)
    found: dict[str, Any] = {
        "data": values.tolist() if whole else _finite(values),
        "dtype": "int64" if whole else "float32",
        "shape": list(tensor.shape),
    }
    if sparse:
        found["sparse_crow_indices"] = np.frombuffer(tensor.sparse_csr.crow_indices, INT64).tolist()
        found["sparse_col_indices"] = np.frombuffer(tensor.sparse_csr.col_indices, INT64).tolist()
    return found


def _topk(candidates: Candidates) -> pb.Topk:
    length, k = candidates.tokens.shape
    token_ids, logprobs = np.asarray(candidates.tokens, INT32), np.asarray(candidates.logprobs, FLOAT32)
    return pb.Topk(token_ids=token_ids.tobytes(), logprobs=logprobs.tobytes(), k=k, length=length)


def _topk_lists(topk: pb.Topk) -> list[list[list[Any]] | None]:
    token_ids = np.frombuffer(topk.token_ids, INT32).reshape(topk.length, topk.k)
    logprobs = np.frombuffer(topk.logprobs, FLOAT32).reshape(topk.length, topk.k)
    lengths = (~((token_ids == 0) & (logprobs == EMPTY_LOGPROB))).sum(axis=1)
    return [
        [list(cell) for cell in zip(ids[:n].tolist(), _finite(row[:n]), strict=True)] if n else None
        for ids, row, n in zip(token_ids, logprobs, lengths, strict=True)
    ]


def _finite(values: np.ndarray) -> list[float | None]:
    objects = values.astype(object)
    objects[~np.isfinite(values)] = None
    return list(objects)
