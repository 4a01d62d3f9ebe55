"""vLLM as an object that threads can use: its event loop has a thread of its own, and answers go to a callback.

Only starts it, hands requests on and says whether it lives. What a request is to us, `vllm_engine` knows.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeAlias

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

from openrl.tasks.errors import InvalidRequest

log = logging.getLogger(__name__)


class Ended:
    """Nothing more comes of a sequence; whether it is complete, whoever hears it must know."""


ENDED: Final = Ended()
Said: TypeAlias = RequestOutput | bytes | Exception | Ended
"""More tokens, what the prompt is worth (`vllm_worker.Extension.openrl_scores`), why there are none, or the end."""


class CannotStart(InvalidRequest):
    """vLLM doesn't start on this model with these settings on this machine."""


class Client:
    """One vLLM engine, which runs in processes of its own; `pids` are theirs, those that hold the device first.

    With any of them this process ends too, as if killed, whatever waits for an answer: what was in vLLM is drawn again
    by the successor.
    """

    def __init__(self, args: AsyncEngineArgs, *, leave: Callable[[int], object] = os._exit) -> None:
        """Start it; returns when it can draw. `leave` ends this process.

        Raises:
            CannotStart: vLLM doesn't start with these arguments here.
        """
        self._exit = leave
        self._closing = threading.Event()
        self._loop = asyncio.new_event_loop()
        # Never ends before the process does: vLLM's processes are asked to end with the thread that started them.
        threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True).start()
        try:
            self._vllm: AsyncLLM = self._call(_started(args)).result()
        except (EngineDeadError, RuntimeError, ValueError) as failure:
            said = " ".join(str(failure).split())
            raise CannotStart(f"vLLM doesn't start on {args.model} here: {said}") from failure
        found = self.do(self._vllm.collective_rpc("openrl_prepare", args=(os.getpid(),))).result()
        self.pids: tuple[int, ...] = tuple(dict.fromkeys(pid for pair in found for pid in pair if pid != os.getpid()))
        handles = [os.pidfd_open(pid) for pid in self.pids]
        threading.Thread(target=self._watch, args=(handles,), name="vllm-watch", daemon=True).start()

    @property
    def max_context(self) -> int:
        """How many tokens a sequence may have: as many as fit its cache, and the model takes."""
        return int(self._vllm.vllm_config.model_config.max_model_len)

    @property
    def cache_tokens(self) -> int:
        """How many positions its cache has for sequences; one block is kept back by vLLM."""
        cache = self._vllm.vllm_config.cache_config
        return max(0, int(cache.num_gpu_blocks or 0) - 1) * int(cache.block_size or 0)

    def generate(
        self,
        name: str,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        adapter: LoRARequest | None,
        salt: str,
        key: int | None,
        hear: Callable[[Said], None],
    ) -> Future[None]:
        """Continue a prompt; cancelling what is returned ends it. `hear` is called in the loop's thread.

        What was read of a prompt is kept for others with the same `salt` and adapter, and for nobody else. With a
        `key` it is heard before the first token what the prompt is worth. ENDED is heard last, unless it was cancelled.
        """
        tokens = TokensPrompt(prompt_token_ids=list(prompt), cache_salt=salt)

        async def run() -> None:
            asked = key
            try:
                async for output in self._vllm.generate(tokens, params, name, lora_request=adapter):
                    # One that was ended before its first token was read in part, or not at all.
                    if asked is not None and output.outputs[0].token_ids:
                        asked = None
                        hear(await self._scores(key))
                    hear(output)
                hear(ENDED)
            except Exception as failure:
                self._look_at(failure)
                hear(failure)
            finally:
                if asked is not None and not self._vllm.errored:
                    self._loop.create_task(self._scores(asked))

        return self._call(run())

    async def _scores(self, key: int | None) -> bytes:
        """Fetch what a prompt is worth, which then is forgotten where it was; every worker has the same."""
        return bytes((await self._vllm.collective_rpc("openrl_scores", args=(key,)))[0])

    def add_adapter(self, adapter: LoRARequest) -> None:
        """Read an adapter's files now. Raises what vLLM raises."""
        self.do(self._vllm.add_lora(adapter)).result()

    def remove_adapter(self, adapter: LoRARequest) -> None:
        """Let go of an adapter, which nothing uses, as soon as that can be."""
        self.do(self._vllm.remove_lora(adapter.lora_int_id))

    def do(self, call: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run one call of vLLM's own."""

        async def run() -> Any:
            try:
                return await call
            except EngineDeadError as failure:
                # Here, before anybody waits no longer and tells a client of it.
                self._look_at(failure)
                raise

        return self._call(run())

    @property
    def vllm(self) -> AsyncLLM:
        """The engine itself, whose calls `do` runs."""
        return self._vllm

    def close(self) -> None:
        """End vLLM's processes."""
        self._closing.set()
        self._loop.call_soon_threadsafe(self._vllm.shutdown)

    def _watch(self, processes: list[int]) -> None:
        """Wait until one of vLLM's processes ends, given as pidfds: calls in flight would wait for ever."""
        select.select(processes, [], [])
        self._end("one of its processes is gone")

    def _look_at(self, failure: Exception) -> None:
        if isinstance(failure, EngineDeadError):
            self._end(str(failure))

    def _end(self, why: str) -> None:
        """Leave, unless vLLM was asked to end."""
        if not self._closing.is_set():
            log.critical("vLLM has ended (%s); leaving", why)
            logging.shutdown()
            self._exit(1)

    def _call(self, call: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(call, self._loop)


async def _started(args: AsyncEngineArgs) -> AsyncLLM:
    return AsyncLLM.from_engine_args(args)
