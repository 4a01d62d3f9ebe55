"""Packing: nothing lost, nothing padded, owners together, the budget kept."""

import itertools
import random

import numpy as np
import pytest
import torch

from openrl.tasks.messages import Datum
from openrl.workers.trainer.batch import Load, Packing, micro_batches, num_tokens

CPU = torch.device("cpu")


def datum(length: int, first: int, *, width: int | None = None, **inputs: np.ndarray) -> Datum:
    shape = (length,) if width is None else (length, width)
    targets = np.arange(first, first + int(np.prod(shape))).reshape(shape)
    return Datum(tokens=np.arange(first, first + length, dtype=np.int32), inputs={"target_tokens": targets, **inputs})


@pytest.mark.parametrize("seed", range(20))
def test_every_token_appears_once_at_its_place_and_owners_lie_together(seed):
    draw = random.Random(seed)
    loads = []
    for index in range(draw.randint(1, 6)):
        data = tuple(
            datum(draw.randint(1, 30), 1000 * index + 50 * n, width=draw.choice([None, 2]))
            for n in range(draw.randint(1, 5))
        )
        loads.append(Load(owner=draw.choice("xyz"), data=data))
    seen, owners = set(), []
    for batch in micro_batches(loads, token_budget=40, device=CPU):
        assert sum(batch.lengths) == len(batch.tokens)
        assert len(batch.tokens) <= 40 or len(batch.lengths) == 1
        assert batch.pieces[0].start == 0 and batch.pieces[-1].stop == len(batch.tokens)
        for piece in batch.pieces:
            owners.append(loads[piece.load].owner)
            for span in piece.spans:
                original = loads[piece.load].data[span.datum]
                assert batch.tokens[span.start : span.stop].tolist() == original.tokens.tolist()
                rows = slice(span.start - piece.start, span.stop - piece.start)
                assert piece.targets[rows].tolist() == original.inputs["target_tokens"].tolist()
                assert (piece.load, span.datum) not in seen
                seen.add((piece.load, span.datum))
    assert len(seen) == sum(len(load.data) for load in loads)
    changes = sum(before != after for before, after in itertools.pairwise(owners))
    assert changes == len(set(owners)) - 1


def test_sequences_of_an_operation_lie_longest_first():
    [batch] = micro_batches(
        [Load(owner=0, data=(datum(2, 0), datum(7, 10), datum(4, 20)))], token_budget=99, device=CPU
    )
    assert batch.lengths == (7, 4, 2)
    assert [span.datum for span in batch.pieces[0].spans] == [1, 2, 0]


def test_a_sequence_longer_than_the_budget_goes_by_itself():
    loads = [Load(owner=0, data=(datum(50, 0), datum(3, 100), datum(3, 200)))]
    assert [batch.lengths for batch in micro_batches(loads, token_budget=10, device=CPU)] == [(50,), (3, 3)]


def test_absent_weights_are_ones_also_beside_datums_that_have_them():
    data = (datum(3, 0, weights=np.array([2, 0, -1], np.float32)), datum(2, 10))
    [batch] = micro_batches([Load(owner=0, data=data)], token_budget=99, device=CPU)
    assert batch.pieces[0].inputs["weights"].tolist() == [2, 0, -1, 1, 1]


def test_a_row_of_a_piece_is_found_again_in_its_datum():
    [batch] = micro_batches([Load(owner=0, data=(datum(2, 0), datum(4, 10)))], token_budget=99, device=CPU)
    [piece] = batch.pieces
    assert [piece.locate(row) for row in (0, 3, 4, 5)] == [(1, 0), (1, 3), (0, 0), (0, 1)]


def test_an_operation_alone_is_cut_as_if_nothing_else_existed():
    data = tuple(datum(length, 100 * n) for n, length in enumerate([5, 9, 3, 12]))
    first = [batch.lengths for batch in micro_batches([Load(owner="a", data=data)], token_budget=15, device=CPU)]
    again = [batch.lengths for batch in micro_batches([Load(owner="b", data=data)], token_budget=15, device=CPU)]
    assert first == again
    assert num_tokens(data) == 29


def test_a_pass_of_any_lengths_and_owners_is_packed_with_less_than_5_percent_of_waste():
    draw, packing = random.Random(3), Packing()
    loads = [
        Load(owner=owner, data=tuple(datum(draw.randint(1, 700), n) for n in range(draw.randint(1, 9))))
        for owner in range(8)
    ]
    for batch in micro_batches(loads, token_budget=1024, device=torch.device("cpu")):
        packing.add(batch)
    assert packing.tokens == sum(num_tokens(load.data) for load in loads)
    assert packing.waste < 0.05 and str(packing).endswith("waste 0.0 %")
    assert packing.micro_batches <= 2 * packing.tokens / 1024 + 1
