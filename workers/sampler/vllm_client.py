"""vLLM as an object that threads can use: its event loop has a thread of its own, and answers go to a callback.

Only starts it, hands requests on and says whether it lives. What a request is to us, `vllm_engine` knows.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

log = logging.getLogger(__name__)

Said: TypeAlias = RequestOutput | bytes | Exception
"""Some more tokens, what the prompt is worth (`vllm_worker.Extension.openrl_scores`), or why there are none."""


class Client:
    """One vLLM engine, which runs in processes of its own; `pids` are theirs, those that hold the device first."""

    def __init__(self, args: AsyncEngineArgs) -> None:
        """Start it; returns when it can draw."""
        self._loop = asyncio.new_event_loop()
        # Never ends before the process does: vLLM's processes are asked to end with the thread that started them.
        threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True).start()
        self._vllm: AsyncLLM = self._call(_started(args)).result()
        found = self.do(self._vllm.collective_rpc("openrl_prepare", args=(os.getpid(),))).result()
        self.pids: tuple[int, ...] = tuple(dict.fromkeys(pid for pair in found for pid in pair if pid != os.getpid()))

    @property
    def dead(self) -> bool:
        """Tell whether vLLM has ended, or can't go on."""
        return bool(self._vllm.errored)

    @property
    def cache_tokens(self) -> int:
        """How many positions its cache has."""
        cache = self._vllm.vllm_config.cache_config
        return int(cache.num_gpu_blocks or 0) * int(cache.block_size or 0)

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
        `key` it is heard first what the prompt is worth.
        """
        tokens = TokensPrompt(prompt_token_ids=list(prompt), cache_salt=salt)

        async def run() -> None:
            asked = key
            try:
                async for output in self._vllm.generate(tokens, params, name, lora_request=adapter):
                    if asked is not None:
                        asked = None
                        hear(await self._scores(key))
                    hear(output)
            except Exception as failure:
                hear(failure)
            finally:
                if asked is not None and not self.dead:
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
        return self._call(call)

    @property
    def vllm(self) -> AsyncLLM:
        """The engine itself, whose calls `do` runs."""
        return self._vllm

    def close(self) -> None:
        """End vLLM's processes."""
        self._loop.call_soon_threadsafe(self._vllm.shutdown)

    def _call(self, call: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(call, self._loop)


def is_death(failure: Exception) -> bool:
    """Tell whether vLLM itself has ended, not one request."""
    return isinstance(failure, EngineDeadError)


async def _started(args: AsyncEngineArgs) -> AsyncLLM:
    return AsyncLLM.from_engine_args(args)
