"""The public face of the wire: bytes and JSON in, values out, and back.

Values are in `values`, requests in `requests` and `json_requests`, results in `results`; everybody
else imports them from here.
"""

from openrl.tasks.wire.json_requests import decode_cells_json, decode_forward_backward_json, decode_prompt_json
from openrl.tasks.wire.requests import decode_forward_backward, encode_forward_backward, peek_forward_backward
from openrl.tasks.wire.results import (
    Alternatives,
    Candidates,
    SampledSequence,
    encode_forward_backward_output,
    encode_sample_response,
    output_to_json,
    sample_response_to_json,
)
from openrl.tasks.wire.values import Cells, Datum, ForwardBackwardRequest, LossCall

__all__ = [
    "Alternatives",
    "Candidates",
    "Cells",
    "Datum",
    "ForwardBackwardRequest",
    "LossCall",
    "SampledSequence",
    "decode_cells_json",
    "decode_forward_backward",
    "decode_forward_backward_json",
    "decode_prompt_json",
    "encode_forward_backward",
    "encode_forward_backward_output",
    "encode_sample_response",
    "output_to_json",
    "peek_forward_backward",
    "sample_response_to_json",
]
