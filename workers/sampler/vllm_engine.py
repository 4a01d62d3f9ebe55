"""Sampling on vLLM: each sequence is one request of vLLM's, which joins and leaves its batch at any token.

vLLM decides what runs in a step and keeps what it has read of prompts; whose turn it is among tenants is decided here,
since vLLM knows none, and which adapters are in use. A sequence that gives up its slot keeps its tokens and goes on
later, to the same ones. What a sequence is and where it ends, `groups` says, as on the torch engine. One thread; vLLM's
answers come from another.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from weakref import WeakSet

import numpy as np
from vllm.logprobs import FlatLogprobs
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from openrl.tasks.errors import OperationFailed
from openrl.tasks.wire import codec
from openrl.workers.sampler import prompts, shares
from openrl.workers.sampler.adapter_places import AdapterPlaces
from openrl.workers.sampler.groups import Continuation, Group, Token
from openrl.workers.sampler.in_hand import InHand
from openrl.workers.sampler.requests import Finished, Request
from openrl.workers.sampler.sampling import FLOOR
from openrl.workers.sampler.stops import Decode
from openrl.workers.sampler.versions import Versions
from openrl.workers.sampler.vllm_client import Client, Ended, Said
from openrl.workers.sampler.vllm_rows import asked_of

log = logging.getLogger(__name__)

BUNDLE = 16
"""Tokens of a sequence that come together where nobody hears them one by one: each answer costs both processes."""

STEP_S = 0.25
"""How long a step waits for vLLM to say something, at most; `wake` ends the wait."""


@dataclass(slots=True, kw_only=True, eq=False)
class Stream:
    """One sequence while vLLM runs it."""

    group: Group
    sequence: Continuation
    start: int
    """How many tokens it had when it went to vLLM."""
    future: Future[None] | None = None


class VllmEngine(InHand[LoRARequest]):
    """Runs requests on vLLM."""

    def __init__(
        self,
        client: Client,
        versions: Versions[LoRARequest],
        decode: Decode,
        *,
        num_slots: int,
        places: AdapterPlaces,
    ) -> None:
        """Run at most `num_slots` sequences at a time, with those adapters that have `places`."""
        super().__init__(versions, decode)
        self._places = places
        self._client = client
        self._num_slots = num_slots
        self._streams: dict[Continuation, Stream] = {}
        self._heard: queue.SimpleQueue[tuple[Stream, Said] | None] = queue.SimpleQueue()
        self._scored: WeakSet[Group] = WeakSet()
        self._numbers = itertools.count()
        self._ended = threading.Event()
        self._came_back = False
        """Whether vLLM has slept, and the oldest sequence has drawn nothing since."""
        self.most_of_tenant = num_slots

    @property
    def pids(self) -> tuple[int, ...]:
        """Return vLLM's processes: those that hold the device."""
        return self._client.pids

    def weights_changed(self) -> None:
        """Hear that the model's own weights are others: nothing runs, and `vllm_weights` has cleared the cache."""
        assert not self._streams, "requests are on the old weights"

    def wake(self) -> None:
        """Let a step that waits return."""
        self._heard.put(None)

    def stopped(self) -> None:
        """Hear that vLLM has ended all that ran: it goes on with the next step. Any thread, but never during a step."""
        self._ended.set()

    def close(self) -> None:
        """End vLLM."""
        self._client.close()

    def step(self) -> list[Finished]:
        """Hand on what may run, take in what vLLM has drawn, and return what has ended.

        The first after vLLM slept lasts until the oldest sequence has drawn something: what was read of it is forgotten
        at every sleep, and turns that were shorter than to read it again would bring it nowhere for ever.
        """
        finished = self._come_back() if self._ended.is_set() else []
        self._place()
        finished += self._load()
        self._admit()
        while not finished:
            for stream, said in self._drawn(STEP_S if self._groups else 0.0):
                if self._streams.get(stream.sequence) is stream:
                    finished += self._take(stream, said)
            if not self._stands_still():
                break
        return finished

    def _come_back(self) -> list[Finished]:
        """Take in all that vLLM has said before it slept; what then hasn't ended waits again, in its order."""
        self._ended.clear()
        self._came_back = True
        finished: list[Finished] = []
        for stream, said in self._drawn(0.0):
            # That vLLM has ended it, be it without a token, is what sleep does.
            if self._streams.get(stream.sequence) is stream and not isinstance(said, Ended):
                finished += self._take(stream, said)
        for stream in reversed(list(self._streams.values())):
            self._stop(stream)
        return finished

    def _stands_still(self) -> bool:
        """Tell whether the oldest sequence has drawn nothing since vLLM came back."""
        oldest = min(self._streams.values(), key=lambda stream: stream.sequence.age, default=None)
        self._came_back = self._came_back and oldest is not None and len(oldest.sequence.tokens) == oldest.start
        return self._came_back

    def _place(self) -> None:
        """Choose the adapters that may be in the batch: vLLM is never given more, so that it need not choose itself."""
        asked = [(group.tenant, group.request.adapter_dir) for group in self._groups if group.request.adapter_dir]
        for directory in self._places.arrange(asked):
            for group in [group for group in self._groups if group.request.adapter_dir == directory]:
                self._give_back(group)

    def _load(self) -> list[Finished]:
        """Ask for the weights of those that may begin; one whose weights can't be loaded leaves."""
        for group in self._groups:
            directory = group.request.adapter_dir
            if not directory:
                group.ready = True
            elif directory in self._places and not group.ready and group not in self._loading:
                loading = self._loading[group] = self._versions.acquire(directory)
                loading.add_done_callback(lambda _: self.wake())
        failed: list[Finished] = []
        for group, loading in list(self._loading.items()):
            if loading.done():
                try:
                    group.adapter, group.ready = loading.result(), True
                    self._places.loaded(group.request.adapter_dir)
                    del self._loading[group]
                except Exception as failure:
                    failed.append(self._fail(group, failure))
        return failed

    def _admit(self) -> None:
        """Give free slots to those that wait, and slots of tenants that have more than their share."""
        while waiting := [group for group in self._groups if group.ready and group.waiting]:
            running = Counter(stream.group.tenant for stream in self._streams.values())
            tenants = [group.tenant for group in waiting]
            if len(self._streams) >= self._num_slots:
                richest = shares.giver(tenants, running)
                if richest is None:
                    return
                self._stop(max(self._of(richest), key=lambda stream: stream.sequence.age))
                running[richest] -= 1
            tenant = shares.next_tenant(tenants, running)
            self._start(next(group for group in waiting if group.tenant == tenant))

    def _of(self, tenant: str) -> Iterator[Stream]:
        return (stream for stream in self._streams.values() if stream.group.tenant == tenant)

    def _start(self, group: Group) -> None:
        """Let vLLM run the next sequence of a group; the first also says what the prompt is worth."""
        sequence, request = group.waiting.popleft(), group.request
        stream = self._streams[sequence] = Stream(group=group, sequence=sequence, start=len(sequence.tokens))
        group.running.append(sequence)
        scores = sequence.index == 0 and _is_scored(request) and group not in self._scored
        key = next(self._numbers) if scores else None
        start = len(sequence.tokens)
        params = SamplingParams(
            # Tokens are drawn by the rule in `extra_args`.
            temperature=1.0,
            max_tokens=request.max_new - start,
            stop_token_ids=sorted(request.stop_tokens),
            ignore_eos=True,
            detokenize=False,
            logprobs=request.topk_sample,
            prompt_logprobs=0 if scores else None,
            flat_logprobs=True,
            stream_interval=1 if request.heard or request.stop_strings else BUNDLE,
            output_kind=RequestOutputKind.DELTA,
            extra_args=asked_of(request, sequence.index, start=start, key=key),
        )
        stream.future = self._client.generate(
            f"{request.job.request_id}:{sequence.index}:{next(self._numbers)}",
            [*request.prompt, *sequence.tokens],
            params,
            adapter=group.adapter,
            salt=group.tenant,
            key=key,
            hear=lambda said: self._heard.put((stream, said)),
        )

    def _drawn(self, wait_s: float) -> Iterator[tuple[Stream, Said]]:
        """Wait, so long at most, until vLLM says something, and return all that it has said."""
        try:
            said = self._heard.get(timeout=wait_s) if wait_s else self._heard.get_nowait()
            while True:
                if said is not None:
                    yield said
                said = self._heard.get_nowait()
        except queue.Empty:
            return

    def _take(self, stream: Stream, said: Said) -> list[Finished]:
        """Take over what one sequence has drawn, or what its prompt is worth."""
        group, sequence = stream.group, stream.sequence
        try:
            if isinstance(said, Exception):
                raise said
            if isinstance(said, Ended):
                self._go_on(stream)
                return []
            if isinstance(said, bytes):
                self._scored.add(group)
                group.read_prompt(prompts.unpacked(said))
                return []
            for token in _tokens(said, group.request):
                sequence.push(token)
                if sequence.stop_reason:
                    break
        except Exception as failure:
            return [self._fail(group, failure)]
        if sequence.stop_reason:
            self._stop(stream)
        if not group.done:
            return []
        self._leave(group)
        return [Finished(request=group.request, result=group.result())]

    def _go_on(self, stream: Stream) -> None:
        """Let a sequence go on that vLLM has ended and we have not: from what it has drawn, as if it had given way."""
        if len(stream.sequence.tokens) == stream.start:
            raise OperationFailed("vLLM ended a sequence without a token; the sampler's log may tell why")
        self._stop(stream)

    def _stop(self, stream: Stream) -> None:
        """Take a sequence out of vLLM; one that hasn't ended waits for its next turn."""
        del self._streams[stream.sequence]
        stream.group.running.remove(stream.sequence)
        if not stream.sequence.stop_reason:
            stream.group.waiting.appendleft(stream.sequence)
        if stream.future is not None:
            stream.future.cancel()

    def _free(self, group: Group) -> None:
        for stream in [stream for stream in self._streams.values() if stream.group is group]:
            self._stop(stream)


def _is_scored(request: Request) -> bool:
    return request.looked_at_from < len(request.prompt) - 1


def _tokens(output: RequestOutput, request: Request) -> Iterator[Token]:
    """Return the new tokens of an answer with their log-probabilities and, where asked for, the likeliest."""
    drawn = output.outputs[0]
    if not drawn.token_ids:
        return
    found = drawn.logprobs
    assert isinstance(found, FlatLogprobs)
    for place, token in enumerate(drawn.token_ids):
        first, end = found.start_indices[place], found.end_indices[place]
        pairs = list(zip(found.token_ids[first:end], found.logprobs[first:end], strict=True))
        yield Token(int(token), pairs[0][1], _likeliest(pairs, request.topk_sample))


def _likeliest(pairs: list[tuple[int, float]], count: int) -> codec.Candidates | None:
    """Return the likeliest tokens, of the drawn one and then those; None: nobody asked.

    vLLM merges answers that had to wait by token, so that a drawn one which is among the likeliest comes once.
    """
    if not count:
        return None
    best = pairs[1:] if len(pairs) > count else sorted(pairs, key=lambda pair: -pair[1])
    ids, values = zip(*best, strict=True)
    return codec.Candidates(np.array([ids], np.int32), np.array([values], np.float32).clip(min=FLOOR))
