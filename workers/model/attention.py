"""Causal attention over packed sequences, and over a cache for generation.

All sequences of a pass lie one behind another on one axis `T`. Attention is the only place where tokens meet, and
here it goes sequence by sequence: no mask over the whole pack is ever built, and a NaN in one sequence can't
reach another. Transformers finds the function under `openrl_packed`; for a name without a registered mask
function it builds no mask (`masking_utils._preprocess_mask_arguments`).

A layer's own rule says how far back a token sees (its sliding window, itself included) and whether scores are capped.
A window is a band of blocks, so neither way costs the square of a sequence that is much longer than its window.

Axes: `H` heads, `K` key-value heads, `G` heads per key-value head, `T` packed tokens, `L` positions, `D` head size.
Rows of one token are attended together by treating `G` as the query axis, so repeated heads are never copied.
"""

import math
import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple, Self

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
    """How one layer attends."""

    scale: float
    """What the products of queries and keys are multiplied with."""
    window: int | None = None
    """Tokens that a token sees, itself the last of them; None is all before it."""
    softcap: float | None = None
    """Scores `s` become `softcap * tanh(s / softcap)`."""

    def first(self, position: int) -> int:
        """The first position that the token at `position` sees."""
        return 0 if self.window is None else max(0, position + 1 - self.window)


# (layer, query [1, H, T, D], key [1, K, T, D], value, rule) -> [1, H, T, D]
_Attend = Callable[[int, Tensor, Tensor, Tensor, Rule], Tensor]
_ATTEND: ContextVar[_Attend | None] = ContextVar("openrl_attend", default=None)


@contextmanager
def packed(lengths: Sequence[int]) -> Iterator[None]:
    """Within the `with`, the model sees sequences of these lengths, one behind another, each by itself."""
    sizes = list(lengths)
    together = varlen.Packed(sizes)

    def attend(_layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        if varlen.fits(query, softcap=rule.softcap):
            return together.attend(query, key, value, scale=rule.scale, window=rule.window)
        parts = [
            _causal(q, k, v, rule)
            for q, k, v in zip(query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=True)
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    with _attending(attend):
        yield


def positions(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Position ids [1, T] that restart with each sequence."""
    return torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0).to(device)


@dataclass(frozen=True, slots=True)
class Row:
    """The next `length` tokens of the sequence in `slot`, the first of them at position `start`."""

    slot: int
    start: int
    length: int


def row_positions(rows: Sequence[Row], device: torch.device | str = "cpu") -> Tensor:
    """Position ids [1, T] of the rows' tokens."""
    numbers = [number for row in rows for number in range(row.start, row.start + row.length)]
    return torch.tensor(numbers, dtype=torch.long, device=device).unsqueeze(0)


class KVCache:
    """Keys and values of up to `slots` sequences of up to `max_length` tokens, allocated at once.

    On a CPU untouched memory costs nothing (zero pages); `size_bytes` is the bound. What lies behind a slot's
    length is always finite: masked positions are still multiplied by zero, and a NaN left by an earlier
    sequence would come through. Not for two threads at once.
    """

    def __init__(
        self, loaded: "LoadedModel", *, slots: int, max_length: int, memory: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Take new memory, or lie over `memory`: keys and values [layers, K, slots * max_length, D] of others."""
        shape = (loaded.num_layers, loaded.num_kv_heads, slots * max_length, loaded.head_dim)
        keys, values = memory or (_zeros(shape, loaded), _zeros(shape, loaded))
        self.keys, self.values = (whole.unflatten(2, (slots, max_length)).transpose(1, 2) for whole in (keys, values))
        """[layers, slots, K, L, D]"""
        self.slots, self.max_length = slots, max_length
        self.lengths = [0] * slots
        """Tokens held by each slot."""

    @classmethod
    def pools(cls, loaded: "LoadedModel", *, tokens: int, smallest: int) -> tuple[Self, ...]:
        """The same memory of `tokens` positions cut into slots of every power of two from `smallest` on.

        All are powers of two. Slots of different pools that overlap must not be in use at the same time, and one
        must be cleared before another that overlaps it is used.
        """
        shape = (loaded.num_layers, loaded.num_kv_heads, tokens, loaded.head_dim)
        memory = (_zeros(shape, loaded), _zeros(shape, loaded))
        sizes = [smallest << i for i in range((tokens // smallest).bit_length())]
        return tuple(cls(loaded, slots=tokens // size, max_length=size, memory=memory) for size in sizes)

    @property
    def size_bytes(self) -> int:
        """The most it may occupy."""
        return self.keys.nbytes + self.values.nbytes

    def clear(self, slot: int) -> None:
        """Forget a slot's sequence."""
        self.truncate(slot, 0)

    def truncate(self, slot: int, length: int) -> None:
        """Forget what a slot holds behind its first `length` tokens, if anything."""
        if length < self.lengths[slot]:
            self.keys[:, slot, :, length : self.lengths[slot]] = 0
            self.values[:, slot, :, length : self.lengths[slot]] = 0
            self.lengths[slot] = length

    def copy(self, source: int, target: int, length: int, *, into: "KVCache | None" = None) -> None:
        """Let `target` (of `into`) begin with the first `length` tokens of `source`: one prompt, several continuations.

        The two must not overlap.
        """
        if length > self.lengths[source]:
            raise ValueError(f"slot {source} holds {self.lengths[source]} tokens, not {length}")
        into = into or self
        into.clear(target)
        into.keys[:, target, :, :length] = self.keys[:, source, :, :length]
        into.values[:, target, :, :length] = self.values[:, source, :, :length]
        into.lengths[target] = length

    def move(self, source: int, target: int, *, into: "KVCache") -> None:
        """Let `target` of `into`, which is empty, hold what `source` does, and empty that; the two may overlap."""
        length = self.lengths[source]
        keys, values = (one[:, source, :, :length].clone() for one in (self.keys, self.values))
        self.clear(source)
        into.keys[:, target, :, :length], into.values[:, target, :, :length] = keys, values
        into.lengths[target] = length

    def claim(self, rows: Sequence[Row]) -> None:
        """Make room for rows: one at position 0 begins a new sequence, others continue where theirs ended.

        Raises:
            ValueError: a row does neither, or passes `max_length`, or two are of one slot; nothing was changed.
        """
        for row in rows:
            held = self.lengths[row.slot]
            if row.length < 1 or row.start not in (0, held) or row.start + row.length > self.max_length:
                raise ValueError(f"{row} doesn't continue a slot of {held} tokens, or passes {self.max_length}")
        if len({row.slot for row in rows}) != len(rows):
            raise ValueError("one slot has two rows")
        for row in rows:
            if row.start == 0:
                self.clear(row.slot)
            self.lengths[row.slot] = row.start + row.length


@contextmanager
def cached(cache: KVCache | Sequence[KVCache], rows: Sequence[Row]) -> Iterator[None]:
    """Within the `with`, one forward appends the rows' tokens to their slots; each attends to all before it.

    `cache` is of all rows, or there is one for each row. The packed axis holds the rows in this order, each slot at
    most once. Neighbouring rows of one token and one cache are attended together, cheapest when their slots lie
    close. After a forward that raised, clear the slots.
    """
    caches = [cache] * len(rows) if isinstance(cache, KVCache) else list(cache)
    for one in dict.fromkeys(caches):
        one.claim([row for owner, row in zip(caches, rows, strict=True) if owner is one])
    batches = _batches(caches, rows)
    sizes = [batch.num_tokens for batch in batches]

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        parts = [
            batch.attend(layer, q, k, v, rule)
            for batch, q, k, v in zip(
                batches, query.split(sizes, 2), key.split(sizes, 2), value.split(sizes, 2), strict=True
            )
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 2)

    with _attending(attend):
        yield


def hidden_states(loaded: "LoadedModel", tokens_T: Tensor, position_ids: Tensor) -> Tensor:
    """Hidden states [T, D] behind the final norm, without the head; inside `packed` or `cached`."""
    body = loaded.model.base_model
    output = body(input_ids=tokens_T.view(1, -1), position_ids=position_ids.view(1, -1), use_cache=False)
    hidden_TD: Tensor = output.last_hidden_state[0]
    return hidden_TD


class _Beginnings:
    """The first tokens of several sequences, equally many of each."""

    def __init__(self, cache: KVCache, rows: Sequence[Row]) -> None:
        self.cache, self.length, self.num_tokens = cache, rows[0].length, len(rows) * rows[0].length
        self.slots = torch.tensor([row.slot for row in rows], device=cache.keys.device)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        q_BHLD, k_BKLD, v_BKLD = (each[0].unflatten(1, (-1, self.length)).transpose(0, 1) for each in (q, k, v))
        self.cache.keys[layer][self.slots, :, : self.length] = k_BKLD
        self.cache.values[layer][self.slots, :, : self.length] = v_BKLD
        return _causal(q_BHLD, k_BKLD, v_BKLD, rule).transpose(0, 1).flatten(1, 2).unsqueeze(0)


class _Prefill:
    """Several tokens of one row."""

    def __init__(self, cache: KVCache, row: Row) -> None:
        self.cache, self.row, self.num_tokens = cache, row, row.length
        self.masks: dict[int | None, Tensor] = {}
        """By window: layers that see equally far share one."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        slot, start, stop = self.row.slot, self.row.start, self.row.start + self.row.length
        keys[slot, :, start:stop], values[slot, :, start:stop] = k[0], v[0]
        if start == 0:
            return _causal(q, k, v, rule)
        if rule.window not in self.masks:
            self.masks[rule.window] = _seen(start, stop, rule, q.device)
        held = slice(rule.first(start), stop)
        k, v = keys[slot : slot + 1, :, held], values[slot : slot + 1, :, held]
        return _masked(q, k, v, self.masks[rule.window], rule)


class _Decode:
    """One token of each of several rows, padded to the longest.

    Slots are read where they lie: from the first to the last in use, those between them in vain, as copying costs
    more. Only rows that are spread thinly are gathered.
    """

    def __init__(self, cache: KVCache, rows: Sequence[Row]) -> None:
        device = cache.keys.device
        self.cache, self.num_tokens = cache, len(rows)
        self.longest = max(row.start for row in rows) + 1
        self.slots = torch.tensor([row.slot for row in rows], device=device)
        self.starts = torch.tensor([row.start for row in rows], device=device)
        slots = [row.slot for row in rows]
        first, last = min(slots), max(slots)
        self.span = slice(first, last + 1) if last - first < 2 * len(rows) else None
        exact = self.span is None or slots == list(range(first, last + 1))
        self.places = None if exact else self.slots - first
        self.shortest = min(row.start for row in rows)
        self.masks: dict[int | None, Tensor | None] = {}
        """By window: layers that see equally far share one."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        keys[self.slots, :, self.starts] = k[0].transpose(0, 1)
        values[self.slots, :, self.starts] = v[0].transpose(0, 1)
        num_heads, head_dim = q.shape[1], q.shape[3]
        q_BKGD = q[0].transpose(0, 1).reshape(self.num_tokens, k.shape[1], num_heads // k.shape[1], head_dim)
        if self.places is not None:
            q_BKGD = self._spread(q_BKGD)
        if rule.window not in self.masks:
            self.masks[rule.window] = self._mask(rule)
        first = rule.first(self.shortest)
        out_BKGD = _masked(q_BKGD, self._held(keys, first), self._held(values, first), self.masks[rule.window], rule)
        if self.places is not None:
            out_BKGD = out_BKGD[self.places]
        return out_BKGD.reshape(self.num_tokens, num_heads, head_dim).transpose(0, 1).unsqueeze(0)

    def _mask(self, rule: Rule) -> Tensor | None:
        """What each row sees of the positions that are read, [B, 1, 1, L]; None where that is all."""
        if self.places is None and self.shortest + 1 == self.longest:
            return None
        ends_B1 = (self.starts if self.places is None else self._spread(self.starts))[:, None]
        columns_L = torch.arange(rule.first(self.shortest), self.longest, device=ends_B1.device)
        seen_BL = columns_L <= ends_B1
        if rule.window is not None:
            seen_BL &= columns_L > ends_B1 - rule.window
        return seen_BL[:, None, None, :]

    def _spread(self, rows: Tensor) -> Tensor:
        """Put each row at the place of its slot in the span, zeros between them."""
        assert self.span is not None and self.places is not None
        spread = rows.new_zeros(self.span.stop - self.span.start, *rows.shape[1:])
        return spread.index_copy_(0, self.places, rows)

    def _held(self, store: Tensor, first: int) -> Tensor:
        read = store[:, :, first : self.longest]
        return read[self.span] if self.span is not None else read.index_select(0, self.slots)


def _batches(caches: Sequence[KVCache], rows: Sequence[Row]) -> list[_Beginnings | _Prefill | _Decode]:
    """Put neighbours together that can be attended in one call: single tokens, and equally long beginnings."""
    batches: list[_Beginnings | _Prefill | _Decode] = []
    pairs = zip(caches, rows, strict=True)
    for (cache, single, length), group in groupby(pairs, key=lambda pair: (pair[0], *_kind(pair[1]))):
        if single:
            batches.append(_Decode(cache, [row for _, row in group]))
        elif length:
            batches.append(_Beginnings(cache, [row for _, row in group]))
        else:
            batches.extend(_Prefill(cache, row) for _, row in group)
    return batches


def _kind(row: Row) -> tuple[bool, int]:
    """Tell whether a row is of one token, else how many tokens a sequence begins with in it; 0 where it goes on."""
    if row.length == 1:
        return True, 0
    return False, row.length if row.start == 0 else 0


def _zeros(shape: Sequence[int], loaded: "LoadedModel") -> Tensor:
    """Zeros that on a CPU take no memory before they are written; torch would write them at once."""
    if loaded.device.type != "cpu":
        return torch.zeros(*shape, dtype=loaded.dtype, device=loaded.device)
    pages = mmap.mmap(-1, math.prod(shape) * loaded.dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=loaded.dtype).view(*shape)


def _causal(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> Tensor:
    """One whole sequence, each token seeing itself and what its rule lets it see before."""
    length = q.shape[2]
    if rule.softcap is None and (rule.window is None or length <= rule.window):
        return sdpa(q, k, v, is_causal=True, scale=rule.scale, enable_gqa=q.shape[1] != k.shape[1])
    parts = []
    for start in range(0, length, block := max(BLOCK, rule.window or 0)):
        stop = min(start + block, length)
        held = slice(rule.first(start), stop)
        mask = _seen(start, stop, rule, q.device)
        parts.append(_masked(q[:, :, start:stop], k[:, :, held], v[:, :, held], mask, rule))
    return torch.cat(parts, 2)


def _seen(start: int, stop: int, rule: Rule, device: torch.device) -> Tensor:
    """What the tokens at [start, stop) see of the positions from the first that any of them does, [rows, positions]."""
    rows = torch.arange(start, stop, device=device)[:, None]
    columns = torch.arange(rule.first(start), stop, device=device)
    seen = columns <= rows
    return seen if rule.window is None else seen & (columns > rows - rule.window)


def _masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rule: Rule) -> Tensor:
    """Attend where `mask` holds, everywhere without one."""
    if rule.softcap is None:
        return sdpa(q, k, v, attn_mask=mask, scale=rule.scale, enable_gqa=q.shape[1] != k.shape[1])
    grouped = q.unflatten(1, (k.shape[1], -1))
    scores = (grouped @ k.unsqueeze(2).transpose(-1, -2)) * (rule.scale / rule.softcap)
    scores = scores.tanh() * rule.softcap
    if mask is not None:
        scores = scores.masked_fill(~(mask if mask.ndim == 2 else mask.unsqueeze(1)), -math.inf)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    return (weights @ v.unsqueeze(2)).flatten(1, 2)


@contextmanager
def _attending(attend: _Attend) -> Iterator[None]:
    token = _ATTEND.set(attend)
    try:
        yield
    finally:
        _ATTEND.reset(token)


def _forward(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    """What transformers calls in each layer: [1, heads, T, D] in, [1, T, H, D] out."""
    attend = _ATTEND.get()
    if attend is None:
        raise RuntimeError("attention is only defined inside `packed` or `cached`")
    assert attention_mask is None, "transformers built a mask for packed attention"
    layer: Any = module.layer_idx
    rule = Rule(options["scaling"], options.get("sliding_window"), options.get("softcap"))
    return attend(layer, query, key, value, rule).transpose(1, 2), None


AttentionInterface.register(NAME, _forward)
