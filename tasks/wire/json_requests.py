"""forward_backward requests and prompts in JSON, as SDK 0.6 to 0.18 and curl send them.

As strict as protobuf: a key that would be ignored is refused by name. null means absent.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from openrl.tasks.errors import InvalidRequest, shown
from openrl.tasks.wire.tensors import DTYPES, INT32, INT64, Expander, csr_rows, listed, shaped
from openrl.tasks.wire.values import (
    MAX_DATUMS,
    Cells,
    Datum,
    ForwardBackwardRequest,
    by_key,
    joined,
    refuse_crowd,
    setting,
    unsupported_chunk,
)


def decode_forward_backward_json(body: object, forward_only: bool) -> ForwardBackwardRequest:
    """Read the JSON body of `/forward_backward`, or of `/forward` where `forward_only`; null means absent."""
    name = "forward_input" if forward_only else "forward_backward_input"
    request = _object(body, "the request", {name, "model_id", "seq_id", "type"})
    content = _object(request.get(name), name, {"data", "loss_fn", "loss_fn_config"})
    data = _typed(content.get("data", []), list, "data")
    refuse_crowd(len(data), MAX_DATUMS, "datums")
    config = _typed(content.get("loss_fn_config", {}), dict, "loss_fn_config")
    expander = Expander()
    return ForwardBackwardRequest(
        model_id=_typed(request.get("model_id", ""), str, "model_id"),
        seq_id=_typed(request.get("seq_id", 0), int, "seq_id"),
        data=tuple(_json_datum(datum, f"data[{i}]", expander) for i, datum in enumerate(data)),
        loss_fn=_typed(content.get("loss_fn", ""), str, "loss_fn"),
        loss_fn_config={key: setting(key, value) for key, value in config.items() if value is not None},
        forward_only=forward_only,
    )


def decode_prompt_json(prompt: object) -> tuple[int, ...]:
    """Read a sampling prompt `{"chunks": [...]}` into its token ids."""
    return tuple(_json_tokens(prompt, "prompt").tolist())


def decode_cells_json(value: object, where: str) -> Cells:
    """Read an int64 tensor [N, K], dense or in compressed sparse rows, and leave it as it is laid out."""
    tensor = _object(value, where, {"data", "dtype", "shape", "sparse_crow_indices", "sparse_col_indices"})
    if tensor.get("dtype") != "int64":
        raise InvalidRequest(f"{where} has dtype {shown(tensor.get('dtype'))}; it must be 'int64'")
    shape = listed(tensor.get("shape", []), INT64, f"{where}.shape").tolist()
    if len(shape) != 2:
        raise InvalidRequest(f"{where} has shape {shown(shape)}; it must be [N, K]")
    values = listed(tensor.get("data"), INT64, f"{where}.data")
    if "sparse_crow_indices" not in tensor and "sparse_col_indices" not in tensor:
        return Cells(values=shaped(values, shape, where).ravel(), shape=(shape[0], shape[1]))
    crow = listed(tensor.get("sparse_crow_indices"), INT64, f"{where}.sparse_crow_indices")
    columns = listed(tensor.get("sparse_col_indices"), INT64, f"{where}.sparse_col_indices")
    csr_rows(crow, columns, shape, len(values), where)
    return Cells(values=values, shape=(shape[0], shape[1]), crow=crow, columns=columns)


def _json_datum(value: object, where: str, expander: Expander) -> Datum:
    allowed = {"model_input", "loss_fn_inputs", "model_input_spans", "loss_fn_input_spans"}
    datum = _object(value, where, allowed)
    inputs = _typed(datum.get("loss_fn_inputs", {}), dict, f"{where}.loss_fn_inputs")
    return Datum(
        tokens=_json_tokens(datum.get("model_input"), f"{where}.model_input"),
        inputs={
            name: by_key(name, _json_tensor(tensor, f"{where}.loss_fn_inputs[{shown(name)}]", expander))
            for name, tensor in inputs.items()
        },
    )


def _json_tokens(value: object, where: str) -> np.ndarray:
    chunks = _typed(_object(value, where, {"chunks"}).get("chunks", []), list, f"{where}.chunks")
    return joined([_json_chunk(chunk, f"{where}.chunks[{i}]") for i, chunk in enumerate(chunks)])


def _json_chunk(value: object, where: str) -> np.ndarray:
    if isinstance(value, dict) and value.get("type") not in (None, "encoded_text"):
        raise unsupported_chunk(value["type"], where)
    chunk = _object(value, where, {"type", "tokens"})
    return listed(chunk.get("tokens"), INT32, f"{where}.tokens")


def _json_tensor(value: object, where: str, expander: Expander) -> np.ndarray:
    tensor = _object(value, where, {"data", "dtype", "shape", "sparse_crow_indices", "sparse_col_indices"})
    dtype = DTYPES.get(_typed(tensor.get("dtype", ""), str, f"{where}.dtype"))
    if dtype is None:
        raise InvalidRequest(f"{where} has dtype {shown(tensor.get('dtype'))}; it must be 'float32' or 'int64'")
    shape = listed(tensor.get("shape", []), INT64, f"{where}.shape").tolist()
    values = listed(tensor.get("data"), dtype, f"{where}.data")
    if "sparse_crow_indices" not in tensor and "sparse_col_indices" not in tensor:
        return shaped(values, shape, where)
    rows = listed(tensor.get("sparse_crow_indices"), INT64, f"{where}.sparse_crow_indices")
    columns = listed(tensor.get("sparse_col_indices"), INT64, f"{where}.sparse_col_indices")
    return expander.expand(values, rows, columns, shape, where)


def _object(value: object, where: str, allowed: set[str]) -> dict[str, Any]:
    """Return a JSON object without its nulls, refusing keys that would be ignored."""
    given = _typed(value, dict, where)
    if unknown := [key for key in given if key not in allowed]:
        raise InvalidRequest(f"{where} has the unknown key {shown(unknown[0])}; known are {', '.join(sorted(allowed))}")
    return {key: item for key, item in given.items() if item is not None}


def _typed(value: Any, kind: type, where: str) -> Any:
    if type(value) is not kind:
        names = {dict: "an object", list: "a list", str: "a text", int: "a whole number"}
        raise InvalidRequest(f"{where} must be {names[kind]}, not {shown(value)}")
    return value
