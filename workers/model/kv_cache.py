"""Keys and values of sequences that grow, and what their next tokens see of them.

A forward's new tokens are rows: the next tokens of one sequence each, in its slot of a cache. All rows write their
keys and values first; then neighbours that look alike are attended in one call: single tokens, and equally long
beginnings.

Axes: `H` heads, `K` key-value heads, `G` heads per key-value head, `T` packed tokens, `B` rows, `L` positions, `D`
head size. Rows of one token are attended together by treating `G` as the query axis, so repeated heads are never
copied.
"""

import math
import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, groupby
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from openrl.workers.model import short, single
from openrl.workers.model.attention import Rule, additive, attending, causal, masked, seen

if TYPE_CHECKING:
    from openrl.workers.model.loading import LoadedModel


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
        """Take new memory, or lie over `memory`: keys and values [layers, slots * max_length, K, D] of others."""
        shape = (loaded.num_layers, slots * max_length, loaded.num_kv_heads, loaded.head_dim)
        self.memory = memory or (_zeros(shape, loaded), _zeros(shape, loaded))
        """Keys and values [layers, slots * L, K, D]: what one token has of them in a layer lies together."""
        self.keys, self.values = (one.unflatten(1, (slots, max_length)).transpose(2, 3) for one in self.memory)
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
        shape = (loaded.num_layers, tokens, loaded.num_kv_heads, loaded.head_dim)
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
def cached(cache: KVCache | Sequence[KVCache], rows: Sequence[Row]) -> Iterator["Appending"]:
    """Within the `with`, one forward appends the rows' tokens to their slots; each attends to all before it.

    `cache` is of all rows, or there is one for each row, all over one memory. The packed axis holds the rows in this
    order, each slot at most once. Neighbouring rows of one token and one cache are attended together, cheapest when
    their slots lie close. After a forward that raised, clear the slots.

    Raises:
        ValueError: a row doesn't continue its slot, or the caches lie in different memory; nothing was written.
    """
    caches = [cache] * len(rows) if isinstance(cache, KVCache) else list(cache)
    owners = list(dict.fromkeys(caches))
    if any(one.memory is not owners[0].memory for one in owners):
        raise ValueError("the rows of one forward lie in different memory")
    for one in owners:
        one.claim([row for owner, row in zip(caches, rows, strict=True) if owner is one])
    appending = Appending(caches, rows)
    with attending(appending.transposed):
        yield appending


class Appending:
    """What a forward's rows write into the cache, and how they attend."""

    def __init__(self, caches: Sequence[KVCache], rows: Sequence[Row]) -> None:
        keys, values = caches[0].memory
        self._keys, self._values = keys.unbind(), values.unbind()
        pairs = zip(caches, rows, strict=True)
        places = [range(begin := row.slot * one.max_length + row.start, begin + row.length) for one, row in pairs]
        self._places_T = torch.tensor(list(chain.from_iterable(places)), device=keys.device)
        """Where in the memory each token's keys and values lie."""
        self._batches = _batches(caches, rows)
        self._sizes = [batch.num_tokens for batch in self._batches]
        self._cut: tuple[Tensor | None, Sequence[Tensor]] = (None, ())
        """Queries that were cut for the batches, and the parts: a decoder's layers all have theirs in one place."""

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, rule: Rule) -> Tensor:
        """Append keys and values, and return what the queries see, [T, H, D]."""
        self._keys[layer].index_copy_(0, self._places_T, k_TKD)
        self._values[layer].index_copy_(0, self._places_T, v_TKD)
        if len(self._batches) == 1:
            return self._batches[0].attend(layer, q_THD, k_TKD, v_TKD, rule)
        if self._cut[0] is not q_THD:
            self._cut = (q_THD, q_THD.split_with_sizes(self._sizes))
        seen, stop = [], 0
        for batch, q in zip(self._batches, self._cut[1], strict=True):
            start, stop = stop, stop + batch.num_tokens
            k, v = (None, None) if batch.reads_cache else (k_TKD[start:stop], v_TKD[start:stop])
            seen.append(batch.attend(layer, q, k, v, rule))
        return torch.cat(seen)

    def transposed(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: Rule) -> Tensor:
        """`attend` for transformers: queries [1, H, T, D], keys and values [1, K, T, D] -> [1, H, T, D]."""
        q_THD, k_TKD, v_TKD = (each[0].transpose(0, 1) for each in (query, key, value))
        return self.attend(layer, q_THD, k_TKD, v_TKD, rule).transpose(0, 1).unsqueeze(0)


class _Beginnings:
    """The first tokens of several sequences, equally many of each."""

    reads_cache = False
    """Whether it finds keys and values there, and needs none beside the queries."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.length, self.num_tokens = rows[0].length, len(rows) * rows[0].length

    def attend(self, _layer: int, q_THD: Tensor, k_TKD: Tensor | None, v_TKD: Tensor | None, rule: Rule) -> Tensor:
        assert k_TKD is not None and v_TKD is not None
        lengths = [self.length] * (self.num_tokens // self.length)
        if short.serves(q_THD, lengths, rule):
            q, k, v = (each.contiguous() for each in (q_THD, k_TKD, v_TKD))
            return short.Short(q, k, v, lengths, rule.scale).out_THE
        q, k, v = (each.unflatten(0, (-1, self.length)).transpose(1, 2) for each in (q_THD, k_TKD, v_TKD))
        return causal(q, k, v, rule).transpose(1, 2).flatten(0, 1)


class _Prefill:
    """Several tokens of one row, which is under way."""

    reads_cache = True

    def __init__(self, cache: KVCache, row: Row) -> None:
        self.cache, self.row, self.num_tokens = cache, row, row.length
        self.masks: dict[int | None, Tensor] = {}
        """By window: layers that see equally far share one."""

    def attend(self, layer: int, q_THD: Tensor, _k_TKD: Tensor | None, _v_TKD: Tensor | None, rule: Rule) -> Tensor:
        slot, start, stop = self.row.slot, self.row.start, self.row.start + self.row.length
        if rule.window not in self.masks:
            self.masks[rule.window] = seen(start, stop, rule, q_THD)
        held = slice(rule.first(start), stop)
        k, v = (one[layer, slot : slot + 1, :, held] for one in (self.cache.keys, self.cache.values))
        return masked(q_THD.transpose(0, 1).unsqueeze(0), k, v, self.masks[rule.window], rule)[0].transpose(0, 1)


class _Decode:
    """One token of each of several rows: each by itself (`single`), or, where that can't be, padded to the longest."""

    reads_cache = True

    def __init__(self, cache: KVCache, rows: Sequence[Row]) -> None:
        self.cache, self.num_tokens, self.rows = cache, len(rows), rows
        self.table = single.table([row.slot * cache.max_length for row in rows], [row.start for row in rows])
        self.padded: _Padded | None = None

    def attend(self, layer: int, q_THD: Tensor, _k_TKD: Tensor | None, _v_TKD: Tensor | None, rule: Rule) -> Tensor:
        if single.serves(q_THD, self.cache.memory[0], rule):
            keys_PKD, values_PKD = (one[layer] for one in self.cache.memory)
            return single.attended(q_THD, keys_PKD, values_PKD, self.table, rule)
        if self.padded is None:
            self.padded = _Padded(self.cache, self.rows)
        return self.padded.attend(layer, q_THD, rule)


class _Padded:
    """Single tokens of several rows, padded to the longest.

    Slots are read where they lie: from the first to the last in use, those between them in vain, as copying costs more.
    Only rows that are spread thinly are gathered.
    """

    def __init__(self, cache: KVCache, rows: Sequence[Row]) -> None:
        device = cache.keys.device
        self.cache = cache
        starts, slots = [row.start for row in rows], [row.slot for row in rows]
        self.shortest, self.longest = min(starts), max(starts) + 1
        self.slots, self.starts = torch.tensor(slots, device=device), torch.tensor(starts, device=device)
        first, last = min(slots), max(slots)
        self.span = slice(first, last + 1) if last - first < 2 * len(rows) else None
        exact = self.span is None or slots == list(range(first, last + 1))
        self.places = None if exact else self.slots - first
        self.read: dict[int | None, tuple[Sequence[Tensor], Sequence[Tensor], Tensor | None]] = {}
        """By window, as layers that see equally far share it: each layer's keys and values, and the mask."""
        self.queries: tuple[Tensor | None, Tensor] = (None, self.starts)
        """Queries, and the same by heads of keys: a decoder's layers all have theirs in one place."""

    def attend(self, layer: int, q_THD: Tensor, rule: Rule) -> Tensor:
        """Return what the queries see, [T, H, D]."""
        if self.queries[0] is not q_THD:
            self.queries = (q_THD, q_THD.unflatten(1, (self.cache.keys.shape[2], -1)))
        q_BKGD = self.queries[1] if self.places is None else self._spread(self.queries[1])
        if rule.window not in self.read:
            self.read[rule.window] = (*self._read(rule), self._mask(rule, q_THD.dtype))
        keys, values, mask = self.read[rule.window]
        k, v = keys[layer], values[layer]
        if self.span is None:
            k, v = k.index_select(0, self.slots), v.index_select(0, self.slots)
        out_BKGD = masked(q_BKGD, k, v, mask, rule)
        if self.places is not None:
            out_BKGD = out_BKGD[self.places]
        return out_BKGD.reshape(q_THD.shape)

    def _mask(self, rule: Rule, dtype: torch.dtype) -> Tensor | None:
        """What each row sees of the positions that are read, [B, 1, 1, L]; None where that is all."""
        if self.places is None and self.shortest + 1 == self.longest:
            return None
        ends_B1 = (self.starts if self.places is None else self._spread(self.starts))[:, None]
        columns_L = torch.arange(rule.first(self.shortest), self.longest, device=ends_B1.device)
        seen_BL = columns_L <= ends_B1
        if rule.window is not None:
            seen_BL &= columns_L > ends_B1 - rule.window
        return additive(seen_BL, dtype)[:, None, None, :]

    def _spread(self, rows: Tensor) -> Tensor:
        """Put each row at the place of its slot in the span, zeros between them."""
        assert self.span is not None and self.places is not None
        spread = rows.new_zeros(self.span.stop - self.span.start, *rows.shape[1:])
        return spread.index_copy_(0, self.places, rows)

    def _read(self, rule: Rule) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return each layer's keys and values [slots, K, L, D] in the span, or in all of the cache where it is None."""
        held, span = slice(rule.first(self.shortest), self.longest), self.span or slice(None)
        return self.cache.keys[:, span, :, held].unbind(), self.cache.values[:, span, :, held].unbind()


def _batches(caches: Sequence[KVCache], rows: Sequence[Row]) -> list[_Beginnings | _Prefill | _Decode]:
    """Put neighbours together that can be attended in one call: single tokens, and equally long beginnings."""
    batches: list[_Beginnings | _Prefill | _Decode] = []
    pairs = zip(caches, rows, strict=True)
    for (cache, is_single, length), group in groupby(pairs, key=lambda pair: (pair[0], *_kind(pair[1]))):
        if is_single:
            batches.append(_Decode(cache, [row for _, row in group]))
        elif length:
            batches.append(_Beginnings([row for _, row in group]))
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
