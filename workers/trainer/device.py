"""Carries out a list of operations of several runs on one base model. The trainer's torch side.

Forwards of different runs, ranks, losses and settings share micro-batches; everything that reaches a run's
state is per run: its gradients are computed apart, checked, and only then accumulated. An operation that
fails leaves the others as if it had not been there. What runs when is decided in `passes`; order and
once-only belong to the journal.

Backward is for those who asked: operations without gradients go through the model in micro-batches of their own.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from itertools import groupby, islice

import torch
from torch import Tensor

from openrl.tasks.errors import InvalidRequest, StoreUnavailable
from openrl.tasks.journal import Outcome
from openrl.tasks.messages import (
    CreateModel,
    ForwardBackward,
    LoadWeights,
    OptimStep,
    SaveWeights,
    SaveWeightsExternal,
    SaveWeightsForSampler,
)
from openrl.workers.model.attention import packed, positions
from openrl.workers.model.gathering import Gathering
from openrl.workers.model.layers import way_through
from openrl.workers.model.loading import LoadedModel
from openrl.workers.model.logprobs import head_shares, target_logprobs
from openrl.workers.model.lora import Adapter, Segment, routing
from openrl.workers.model.recomputing import Recomputing
from openrl.workers.model.threads import Threads
from openrl.workers.trainer import vectors
from openrl.workers.trainer.batch import Load, MicroBatch, Packing, Piece, micro_batches, num_tokens
from openrl.workers.trainer.checkpoints import Checkpoints
from openrl.workers.trainer.lanes import Lanes
from openrl.workers.trainer.optimizer import is_finite
from openrl.workers.trainer.passes import BOUNDLESS
from openrl.workers.trainer.residency import Residency
from openrl.workers.trainer.runs import Run
from openrl.workers.trainer.share import Part, Share, costs
from openrl.workers.trainer.work import Work, failed

log = logging.getLogger(__name__)

STEP_FLOPS = 20
"""Multiplications and additions of AdamW for one parameter, about."""

COMPUTED = (CreateModel, OptimStep, LoadWeights)
"""What needs its run on the device, beside forwards; a save takes it from where it lies."""

Gradients = dict[Run, Sequence[Tensor]]


class Device:
    """One base model and what is done with it."""

    def __init__(
        self,
        loaded: LoadedModel,
        checkpoints: Checkpoints,
        *,
        token_budget: int,
        residency: Residency | None = None,
        recomputing: Recomputing | None = None,
        lanes: Lanes | None = None,
        tells_entropy: bool = False,
    ) -> None:
        """Compute passes in micro-batches of `token_budget`; no `residency`: every run lies on the device.

        No `lanes`: as many as torch has threads. No `recomputing`: whether layers are computed again in backward is
        decided by the memory there is.
        `tells_entropy`: the metrics of a forward have the entropy of what its tokens are predicted from.
        """
        self._tells_entropy = tells_entropy
        self._loaded = loaded
        self._way = way_through(loaded)
        self.residency = Residency(loaded.device) if residency is None else residency
        self._recomputing = recomputing or Recomputing(loaded)
        self._checkpoints = checkpoints
        self._token_budget = token_budget
        self._threads = Threads()
        self._lanes = lanes or Lanes(loaded.device)
        self._flops_per_token = loaded.flops_per_token

    def execute(self, works: Sequence[Work]) -> list[Outcome]:
        """Carry out the operations, in order for each run; neighbouring forwards go together.

        Raises:
            StoreUnavailable: the registry could not be asked; that operation changed nothing.
        """
        outcomes: list[Outcome] = []
        for is_packed, group in groupby(works, key=lambda work: work.packed):
            neighbours = list(group)
            outcomes += self._forwards(neighbours) if is_packed else self._others(neighbours)
        return outcomes

    def foresee(self, run: Run) -> None:
        """Hear that a run's step is committed: there is time to prepare what is likely to be asked for next."""
        self._checkpoints.foresee(run)

    def discard(self, outcome: Outcome) -> None:
        """Delete what an operation wrote that can't be registered."""
        self._checkpoints.discard(outcome)

    # one at a time

    def _others(self, works: list[Work]) -> list[Outcome]:
        """Carry out what isn't a forward: neighbouring steps of different runs side by side, all else in turn."""
        outcomes: list[Outcome] = []
        for steps, group in groupby(works, key=lambda work: isinstance(work.message, OptimStep)):
            neighbours = list(group)
            runs = {work.run for work in neighbours}
            if steps and 1 < len(runs) == len(neighbours) and self._admits(runs):
                outcomes += self._lanes.map(partial(self._single, beside_others=True), neighbours)
            else:
                outcomes += map(self._single, neighbours)
        return outcomes

    def _admits(self, runs: Collection[Run]) -> bool:
        """Bring these runs onto the device; where that fails, each will be told by itself."""
        try:
            self.residency.admit(runs)
        except Exception as error:
            log.warning("the runs of %d steps can't be on the device together: %s", len(runs), error)
            return False
        return True

    def _single(self, work: Work, *, beside_others: bool = False) -> Outcome:
        try:
            return self._dispatch(work, beside_others)
        except StoreUnavailable:
            raise
        except Exception as error:
            outcome = failed(work, error)
        if isinstance(work.message, OptimStep):
            work.run.drop_gradient()  # as a replay does with a step that is recorded as failed
        if isinstance(work.message, CreateModel):
            work.run.failure = outcome.error or ""
            return Outcome(error=outcome.error, category=outcome.category, run_fields={"state": "failed"})
        return outcome

    def _dispatch(self, work: Work, beside_others: bool) -> Outcome:
        """`beside_others`: runs are on the device, and the threads are shared out."""
        run, message = work.run, work.message
        room = BOUNDLESS if work.is_repeated else self.residency.room
        if isinstance(message, COMPUTED) and not beside_others:
            self.residency.admit([run])
        if isinstance(message, CreateModel):
            outcome = self._checkpoints.create(run, message, room)
            self.residency.admit([run])  # now that it has a size
            return outcome
        run.weights()
        if isinstance(message, OptimStep):
            if not beside_others:
                self._threads.fit(STEP_FLOPS * sum(tensor.numel() for tensor in run.weights().parameters()))
            return Outcome(result=json.dumps({"type": "optim_step", "metrics": run.step(message)}).encode())
        if isinstance(message, SaveWeights):
            return self._checkpoints.save(run, message, work.seq_id)
        if isinstance(message, SaveWeightsForSampler):
            return self._checkpoints.save_for_sampler(run, message, work.seq_id)
        if isinstance(message, SaveWeightsExternal):
            return self._checkpoints.save_external(run, message, work.seq_id)
        if isinstance(message, LoadWeights):
            return self._checkpoints.load(run, message, work.seq_id, room)
        raise InvalidRequest(f"a trainer doesn't carry out {work.kind!r}")

    # forwards, together

    def _forwards(self, works: list[Work]) -> list[Outcome]:
        """Run forwards in one pass. One that breaks it is found by running each of them alone."""
        began = time.monotonic()
        try:
            self.residency.admit(work.run for work in works)
            shares = [Share(work) for work in works]
            computed = [share for share in shares if not share.error]
            gradients = self._compute(computed)
        except Exception as error:
            if len(works) == 1:
                return [_fail(works[0], failed(works[0], error))]
            log.warning("a pass of %d operations broke (%s); running them one by one", len(works), type(error).__name__)
            return [outcome for work in works for outcome in self._forwards([work])]
        suspects = self._settle(shares, gradients)
        told = costs(computed, time.monotonic() - began)
        return [self._forwards([one.work])[0] if one in suspects else one.outcome(told.get(one, {})) for one in shares]

    def _compute(self, shares: list[Share]) -> Gradients:
        """Fill in every share's results; return each run's gradient. Touches no run."""
        gradients: Gradients = {}
        packing = Packing()
        for trains in (False, True):
            chosen = [share for share in shares if share.trains is trains]
            loads = [Load(owner=share.run, data=share.message.data) for share in chosen]
            lanes = self._lanes.number(sum(num_tokens(load.data) for load in loads), self._flops_per_token)
            batches = micro_batches(
                loads, token_budget=self._token_budget, device=self._loaded.device, side_by_side=lanes
            )
            while together := list(islice(batches, lanes)):
                for batch, (parts, mine) in zip(together, self._side_by_side(together, chosen, trains), strict=True):
                    for piece, part in zip(batch.pieces, parts, strict=True):
                        chosen[piece.load].take(piece, part)
                    _add(gradients, mine)
                    packing.add(batch)
        log.info("packed: %s", packing)
        return gradients

    def _side_by_side(
        self, batches: list[MicroBatch], shares: list[Share], trains: bool
    ) -> list[tuple[list[Part], Gradients]]:
        """Compute micro-batches, each in a lane of its own; what a pass comes to is put together in their order."""
        tokens = sum(sum(batch.lengths) for batch in batches)
        self._threads.fit((1 + trains) * self._flops_per_token * tokens)

        def one(batch: MicroBatch) -> tuple[list[Part], Gradients]:
            runs = [shares[piece.load].run for piece in batch.pieces]
            gathering = Gathering({run.adapter: run.room for run in runs})
            with torch.set_grad_enabled(trains), self._recomputing.for_tokens(tokens if trains else 0):
                results = zip(batch.pieces, *self._logprobs(batch, shares, gathering), strict=True)
                parts = [shares[piece.load].part(piece, logprobs, told) for piece, logprobs, told in results]
            if not trains:
                return parts, {}
            return parts, _gradients(list(zip(runs, parts, strict=True)), gathering)

        return self._lanes.map(one, batches)

    def _logprobs(
        self, batch: MicroBatch, shares: list[Share], gathering: Gathering[vectors.Parts]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the log-probability of every target, piece by piece, and if they are told the entropies."""
        loaded = self._loaded
        adapters = {piece.load: shares[piece.load].run.adapter for piece in batch.pieces}
        with packed(batch.lengths), routing(_segments(batch.pieces, adapters)):
            places_T = positions(batch.lengths, loaded.device)
            hidden_TD = self._way.hidden_states(batch.tokens, places_T, gathering)
        # Neighbours with one number of targets a position are one product.
        groups = [list(group) for _, group in groupby(batch.pieces, key=lambda piece: piece.targets.shape[1:])]
        sizes = [group[-1].stop - group[0].start for group in groups]
        logprobs: list[Tensor] = []
        entropies_T = torch.zeros(len(hidden_TD), device=hidden_TD.device) if self._tells_entropy else None
        for group, hidden_SD in zip(groups, hidden_TD.split(sizes) if len(groups) > 1 else [hidden_TD], strict=True):
            together = target_logprobs(
                hidden_SD,
                loaded.head,
                torch.cat([piece.targets for piece in group]),
                lora=head_shares(loaded, _segments(group, adapters)),
                softcap=loaded.logit_softcap,
                entropies_T=None if entropies_T is None else entropies_T[group[0].start : group[-1].stop],
            )
            logprobs += together.split([piece.stop - piece.start for piece in group])
        told = [None if entropies_T is None else entropies_T[piece.start : piece.stop] for piece in batch.pieces]
        return logprobs, told

    def _settle(self, shares: list[Share], gradients: Gradients) -> list[Share]:
        """Bring each run's gradient into the run, or void it; return shares of which one is guilty of a bad sum."""
        suspects: list[Share] = []
        for share in shares:
            if share.error and share.trains:
                share.run.make_void(share.work.seq_id, share.error)
        for run, gradient in gradients.items():
            mine = [share for share in shares if share.run is run and share.trains]
            if any(share.error for share in mine):
                continue
            if is_finite(gradient):
                run.accumulate(gradient)
            elif len(mine) == 1:
                mine[0].error = _bad_gradient(run, gradient)
                run.make_void(mine[0].work.seq_id, mine[0].error)
            else:
                suspects += mine
        return suspects


def _segments(pieces: Sequence[Piece], adapters: Mapping[int, Adapter | None]) -> list[Segment]:
    """Whose tokens are whose, counted from the first of these pieces. A full run has no adapter."""
    first = pieces[0].start
    return [Segment(piece.start - first, piece.stop - first, adapters[piece.load]) for piece in pieces]


def _gradients(parts: list[tuple[Run, Part]], gathering: Gathering[vectors.Parts]) -> Gradients:
    """Return the gradients of one micro-batch's finite losses; no tensor of a run gets a `.grad`."""
    losses = [(run, part.loss) for run, part in parts if part.loss is not None]
    if not losses:
        return {}
    runs = list(dict.fromkeys(run for run, _ in losses))
    leaves = [run.leaves() for run in runs]
    flat = [tensor for tensors in leaves for tensor in tensors]
    total = torch.stack([loss for _, loss in losses]).sum()
    ends = flat if gathering.end is None else [*flat, gathering.end]
    grads = iter(torch.autograd.grad(total, ends, allow_unused=True))
    gradients: Gradients = {}
    for run, tensors in zip(runs, leaves, strict=True):
        gathered = None if run.adapter is None else gathering.rooms.get(run.adapter)
        gradients[run] = run.gradients([next(grads) for _ in tensors], gathered)
    return gradients


def _add(gradients: Gradients, more: Gradients) -> None:
    """Add the gradients of one more micro-batch."""
    for run, mine in more.items():
        if run in gradients:
            vectors.add(gradients[run], mine)
        else:
            gradients[run] = mine


def _fail(work: Work, outcome: Outcome) -> Outcome:
    if work.kind == ForwardBackward.kind:
        work.run.make_void(work.seq_id, outcome.error or "")
    return outcome


def _bad_gradient(run: Run, gradient: Sequence[Tensor]) -> str:
    for (name, _), tensor in zip(run.weights().named_parameters(), gradient, strict=True):
        bad = tensor[~tensor.isfinite()]
        if bad.numel():
            return f"the gradient is not finite ({float(bad[0])}) at {name}; nothing was accumulated"
    return f"the gradient is not finite ({math.nan}); nothing was accumulated"
