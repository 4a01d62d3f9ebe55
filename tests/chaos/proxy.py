"""A TCP proxy before the store that can be told to cut, delay, half-close and refuse connections."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress

CHUNK = 1 << 16


class Proxy:
    """Listens on loopback from the start on and passes bytes on to `upstream`, a port of this machine."""

    def __init__(self, upstream: int) -> None:
        self._upstream = upstream
        self._delay_s = 0.0
        self._refuses = False
        self._pairs: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = set()
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._server: asyncio.Server | None = None
        self.port = 0
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)
        self._thread.start()
        self._started.wait(10)

    def cut(self) -> int:
        """Break every connection at once, in the middle of whatever it carries; return how many there were."""
        return self._call(self._cut)

    def half_close(self) -> int:
        """Tell every client that the store has ended its side, while what clients send still arrives there."""
        return self._call(self._half_close)

    def delay(self, seconds: float) -> None:
        """Hold every piece back for so long, in both directions; 0 ends it."""
        self._delay_s = seconds

    def refuse(self, refuses: bool) -> None:
        """Close new connections at once, or do so no more."""
        self._refuses = refuses

    def close(self) -> None:
        """End everything."""
        self._call(self._cut)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def _call(self, work) -> int:  # type: ignore[no-untyped-def]  # one of ours, run in the loop's thread
        async def run() -> int:
            return int(work())

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(10)

    def _cut(self) -> int:
        pairs = list(self._pairs)
        for pair in pairs:
            for writer in pair:
                writer.transport.abort()
        return len(pairs)

    def _half_close(self) -> int:
        pairs = list(self._pairs)
        for client, _ in pairs:
            with suppress(OSError, RuntimeError):
                client.write_eof()
        return len(pairs)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", 0))
        self.port = self._server.sockets[0].getsockname()[1]
        self._started.set()
        self._loop.run_forever()
        self._server.close()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0.05))
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._refuses:
            writer.transport.abort()
            return
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._upstream)
        except OSError:
            writer.transport.abort()
            return
        pair = (writer, up_writer)
        self._pairs.add(pair)
        try:
            await asyncio.gather(self._pump(reader, up_writer), self._pump(up_reader, writer))
        finally:
            self._pairs.discard(pair)
            for one in pair:
                one.transport.abort()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, RuntimeError):
            while piece := await reader.read(CHUNK):
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                writer.write(piece)
                await writer.drain()
        with suppress(OSError, RuntimeError):
            writer.write_eof()
