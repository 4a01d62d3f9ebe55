"""Causal attention over packed sequences.

All sequences of a pass lie one behind another on one axis `T`. Attention is the only place where tokens meet, and
here each sequence is by itself, neighbours of one length as a batch: no mask over the whole pack is ever built, and a
NaN in one sequence can't reach another. Transformers finds the function under `openrl_packed`; for a name without a
registered mask function it builds no mask (`masking_utils._preprocess_mask_arguments`).

A layer's own rule says how far back a token sees (its sliding window, itself included) and whether scores are capped.
A window is a band of blocks, so neither way costs the square of a sequence that is much longer than its window.

What a token sees of a cache is `openrl.workers.model.kv_cache`'s; short sequences of a layer of the usual form are
`short`'s.

Axes: `H` heads, `K` key-value heads, `T` packed tokens, `D` head size.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa
from transformers import AttentionInterface

from openrl.workers.model import varlen

if TYPE_CHECKING:
    from openrl.workers.model.loading import LoadedModel

NAME = "openrl_packed"
BLOCK = 256
"""Rows of a sequence that are attended at once where a mask is needed, or more where the window is larger."""


class Rule(NamedTuple):
    """How one layer attends. What is added must be refused by `short.serves` and `single.serves`, or done there."""

    scale: float
    """What the products of queries and keys are multiplied with."""
    window: int | None = None
    """Tokens that a token sees, itself the last of them; None is all before it."""
    softcap: float | None = None
    """Scores `s` become `softcap * tanh(s / softcap)`."""

    @classmethod
    def of(cls, layer: Any, arch: str) -> "Rule":
        """Return the rule of a layer's attention that caps no scores; Mistral's layers ask the config each time."""
        holder = layer.config if arch == "mistral" else layer
        return cls(layer.scaling, getattr(holder, "sliding_window", None))

    def first(self, position: int) -> int:
        """The first position that the token at `position` sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)


# (layer, query [1, H, T, D], key [1, K, T, D], value, rule) -> [1, H, T, D]
Attend = Callable[[int, Tensor, Tensor, Tensor, Rule], Tensor]
_ATTEND: ContextVar[Attend | None] = ContextVar("openrl_attend", default=None)
_LENGTHS: ContextVar[tuple[int, ...]] = ContextVar("openrl_lengths", default=())


@contextmanager
def packed(lengths: Sequence[int]) -> Iterator[None]:
    """Within the `with`, the model sees sequences of these lengths, one behind another, each by itself."""
    sizes = list(lengths)
    together = varlen.Packed(sizes)
    alike = [(length, len(list(group))) for length, group in groupby(sizes)]

    def attend(_layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        if varlen.fits(query, softcap=rule.softcap):
            return together.attend(query, key, value, scale=rule.scale, window=rule.window)
        if len(alike) == 1:
            return _side_by_side(query, key, value, alike[0], rule)
        tokens = [length * number for length, number in alike]
        cut = zip(query.split(tokens, 2), key.split(tokens, 2), value.split(tokens, 2), alike, strict=True)
        return torch.cat([_side_by_side(q, k, v, each, rule) for q, k, v, each in cut], 2)

    token = _LENGTHS.set(tuple(sizes))
    try:
        with attending(attend):
            yield
    finally:
        _LENGTHS.reset(token)


def _side_by_side(query: Tensor, key: Tensor, value: Tensor, alike: tuple[int, int], rule: Rule) -> Tensor:
    """Neighbours of one length, and how many they are: [1, H, T, D], computed as a batch. None sees another."""
    length, number = alike
    if number == 1:
        return causal(query, key, value, rule)
    q, k, v = (each[0].transpose(0, 1).unflatten(0, (number, length)).transpose(1, 2) for each in (query, key, value))
    return causal(q, k, v, rule).transpose(1, 2).flatten(0, 1).transpose(0, 1)[None]


def positions(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Position ids [1, T] that restart with each sequence."""
    return torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0).to(device)


def hidden_states(loaded: "LoadedModel", tokens_T: Tensor, position_ids: Tensor) -> Tensor:
    """Hidden states [T, D] behind the final norm, without the head; inside `packed` or `cached`."""
    body = loaded.model.base_model
    output = body(input_ids=tokens_T.view(1, -1), position_ids=position_ids.view(1, -1), use_cache=False)
    hidden_TD: Tensor = output.last_hidden_state[0]
    return hidden_TD


def causal(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
    """Whole sequences of one length, [B, H, T, D] and [B, K, T, D]: a token sees itself and what its rule lets it."""
    length = q.shape[2]
    if rule.softcap is None and (rule.window is None or length <= rule.window):
        return sdpa(q, k, v, is_causal=True, scale=rule.scale, enable_gqa=q.shape[1] != k.shape[1])
    parts = []
    for start in range(0, length, block := max(BLOCK, rule.window or 0)):
        stop = min(start + block, length)
        held = slice(rule.first(start), stop)
        mask = seen(start, stop, rule, q)
        parts.append(masked(q[:, :, start:stop], k[:, :, held], v[:, :, held], mask, rule))
    return torch.cat(parts, 2)


def seen(start: int, stop: int, rule: Rule, like: Tensor) -> Tensor:
    """What the tokens at [start, stop) see of the positions from the first that any of them does.

    An additive mask [rows, positions] for queries like these.
    """
    rows = torch.arange(start, stop, device=like.device)[:, None]
    columns = torch.arange(rule.first(start), stop, device=like.device)
    sees = columns <= rows
    return additive(sees if rule.window is None else sees & (columns > rows - rule.window), like.dtype)


def additive(sees: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask that is added to scores: 0 where `sees` holds, else minus infinity."""
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, -math.inf)


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: Rule) -> Tensor:
    """Attend to what an additive `mask` leaves, to everything without one: queries [B, H, T, D], keys [B, K, L, D]."""
    if rule.softcap is None:
        return sdpa(q, k, v, attn_mask=mask, scale=rule.scale, enable_gqa=q.shape[1] != k.shape[1])
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = (grouped @ k.unsqueeze(2).transpose(-1, -2)) * (rule.scale / rule.softcap)
    scores = scores.tanh() * rule.softcap
    if mask is not None:
        scores = scores + (mask if mask.ndim == 2 else mask.unsqueeze(1))
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    return (weights @ v.unsqueeze(2)).flatten(1, 2)


def current() -> Attend:
    """Return how layers attend here.

    Raises:
        RuntimeError: outside of `packed` and `attending`.
    """
    if (attend := _ATTEND.get()) is None:
        raise RuntimeError("attention is only defined inside `packed` or `cached`")
    return attend


def lengths() -> tuple[int, ...]:
    """Return the lengths of the sequences that are packed here; nothing outside of `packed`."""
    return _LENGTHS.get()


@contextmanager
def attending(attend: Attend) -> Iterator[None]:
    """Within the `with`, layers attend by this function."""
    token = _ATTEND.set(attend)
    try:
        yield
    finally:
        _ATTEND.reset(token)


def _forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """What transformers calls in each layer: [1, heads, T, D] in, [1, T, H, D] out."""
    attend = current()
    assert attention_mask is None, "transformers built a mask for packed attention"
    layer: Any = module.layer_idx
    rule = Rule(options["scaling"], options.get("sliding_window"), options.get("softcap"))
    return attend(layer, query, key, value, rule).transpose(1, 2), None


AttentionInterface.register(NAME, _forward)
