"""The short way through a model against transformers' own, with adapters, on every family that takes it."""

import pytest
import torch

from openrl.workers.model.attention import hidden_states, packed, positions
from openrl.workers.model.decoder import ARCHS, Decoder, way_through
from openrl.workers.model.kv_cache import KVCache, Row, cached, row_positions
from openrl.workers.model.loading import load
from openrl.workers.model.lora import Adapter, Segment, routing
from tests.model_families.zoo import ZOO, make_model

FAMILIES = sorted(name for name in ZOO if ZOO[name]["model_type"] in ARCHS)
"""Each of `ARCHS` has one at least."""


@pytest.mark.parametrize("name", FAMILIES)
def test_the_short_way_gives_what_transformers_does_with_two_adapters_and_none(tmp_path, name):
    """Beginnings, then the rest of two and a token of the third: each row has its own adapter, or the base alone."""
    loaded = load(make_model(tmp_path, name), device="cpu", dtype=torch.float32)
    way = way_through(loaded)
    assert isinstance(way, Decoder)
    adapters = [some_adapter(loaded, seed=1, rank=3), None, some_adapter(loaded, seed=2, rank=5)]
    sequences = [torch.randint(0, 256, (20,), generator=torch.Generator().manual_seed(i)) for i in range(3)]
    cache = KVCache(loaded, slots=3, max_length=32)

    parts = [[], [], []]
    for bounds in ([(0, 8), (0, 8), (0, 19)], [(8, 20), (8, 9), (19, 20)], [(9, 20)]):
        indices = range(3) if len(bounds) == 3 else [1]
        rows = [Row(index, start, stop - start) for index, (start, stop) in zip(indices, bounds, strict=True)]
        for row, part in zip(rows, step(way, cache, rows, sequences, adapters), strict=True):
            parts[row.slot].append(part)

    for sequence, adapter, ours in zip(sequences, adapters, parts, strict=True):
        with torch.no_grad(), packed([20]), routing([Segment(0, 20, adapter)]):
            expected_TD = hidden_states(loaded, sequence, positions([20]))
        torch.testing.assert_close(torch.cat(ours), expected_TD, atol=1e-5, rtol=1e-5)


def test_weights_that_are_changed_in_place_are_those_of_the_next_step(tmp_path):
    loaded = load(make_model(tmp_path, "qwen3"), device="cpu", dtype=torch.float32)
    way, tokens = way_through(loaded), torch.arange(6)
    for parameter in loaded.model.parameters():
        parameter.data.mul_(1.25)

    ours_TD = step(way, KVCache(loaded, slots=1, max_length=8), [Row(0, 0, 6)], [tokens], [None])[0]

    with torch.no_grad(), packed([6]):
        torch.testing.assert_close(ours_TD, hidden_states(loaded, tokens, positions([6])), atol=1e-5, rtol=1e-5)


def step(way, cache, rows, sequences, adapters):
    """One forward of these rows; sequences and adapters are by slot."""
    tokens, segments, begin = [], [], 0
    for row in rows:
        tokens.append(sequences[row.slot][row.start : row.start + row.length])
        segments.append(Segment(begin, begin := begin + row.length, adapters[row.slot]))
    with cached(cache, rows) as appending, routing(segments):
        hidden_TD = way.hidden_states(torch.cat(tokens), row_positions(rows), appending)
    return hidden_TD.split([row.length for row in rows])


def some_adapter(loaded, *, seed, rank, **flags):
    """A random adapter, B not zero."""
    made = Adapter.init(loaded, rank=rank, seed=seed, **flags)
    for _, b_OR in made.weights.values():
        b_OR.data.normal_(0, 0.1, generator=torch.Generator().manual_seed(seed))
    return made
