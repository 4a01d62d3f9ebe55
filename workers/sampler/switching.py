"""A full run's samples: one version of the weights is in memory at a time, and requests take turns by version.

Stands between the engine's thread and the runner that draws. A request comes to the runner only while its version is in
memory, and leaves it before another is. Versions are fetched and verified in a thread of their own, beside the steps;
only to apply one is a pause. `rotation` decides whose turn it is. Knows no torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from openrl.tasks.errors import InvalidRequest, NotFound, OperationFailed
from openrl.workers.sampler.requests import Finished, Request
from openrl.workers.sampler.rotation import Rotation
from openrl.workers.sampler.versions import loaded

log = logging.getLogger(__name__)

FETCH_WAIT_S = 0.05
"""How long a step that has nothing to do but wait for weights waits, at most."""
TRIES = 2
"""How often a version is fetched whose weights don't come out right in memory."""

Prepared = TypeVar("Prepared", bound="Closable")


class Version(Protocol):
    """What a request names; a value."""

    @property
    def directory(self) -> str:
        """Where it lies, relative to the data directory."""

    @property
    def digest(self) -> str:
        """What it must be known by; "" where nobody says."""


class Closable(Protocol):
    """What was fetched."""

    @property
    def digest(self) -> str:
        """What the version is known by."""

    def close(self) -> None:
        """Give it back, unused."""


class Weights(Protocol):
    """The weights in memory; `openrl.workers.sampler.full_weights` has some."""

    def prepare(self, version: Any) -> Any:
        """Fetch and verify a version, in any thread, beside the steps."""

    def apply(self, prepared: Any) -> object:
        """Make it the version in memory; nothing runs and nothing is being prepared meanwhile."""


class Aside(Protocol):
    """A request that was taken out with what it had drawn."""

    @property
    def request(self) -> Request:
        """Whose it is."""

    @property
    def num_drawn(self) -> int:
        """How many tokens it has."""


class Drawing(Protocol):
    """A runner whose requests may go on later; `openrl.workers.sampler.torch_engine` is one."""

    @property
    def most_of_tenant(self) -> int:
        """How many requests of one tenant it takes in at a time."""

    @property
    def requests(self) -> Sequence[Request]:
        """What it has not finished."""

    @property
    def outside(self) -> Sequence[Request]:
        """Those that hold nothing in its cache."""

    def num_drawn(self, request: Request) -> int:
        """How many tokens one has."""

    def add(self, request: Request) -> None:
        """Take one in."""

    def step(self) -> list[Finished]:
        """Advance, and return what ended."""

    def drop(self, requests: Collection[Request]) -> list[int]:
        """Forget some; return how much each had drawn."""

    def lay_aside(self, requests: Collection[Request]) -> Sequence[Any]:
        """Take some out, to go on later; return those that it could."""

    def resume(self, aside: Any) -> None:
        """Let one go on."""

    def weights_changed(self) -> None:
        """Hear that the weights are others now."""

    def wake(self) -> None:
        """Let a step that waits for something return; any thread may call it."""


@dataclass(slots=True, eq=False)
class _Entry:
    """A request in hand, as the runner has it."""

    request: Request
    version: Any
    since: float
    aside: Aside | None = None
    inside: bool = False
    """Whether the runner has it."""
    had_drawn: int = 0
    """When it last came to the runner."""


class Switching:
    """A runner of many versions. All methods belong to one thread."""

    def __init__(
        self,
        inner: Drawing,
        weights: Weights,
        rotation: Rotation[Any],
        version_of: Callable[[str, str], Any],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Draw with `inner` on `weights`; `version_of` makes a version of its directory and digest."""
        self._inner, self._weights, self._rotation = inner, weights, rotation
        self._version_of, self._clock = version_of, clock
        self._entries: dict[Request, _Entry] = {}
        self._fetching: dict[Any, Future[Any]] = {}
        """What is fetched or was, for the weights in memory now."""
        self._failures: dict[Any, int] = {}
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="versions")

    @property
    def most_of_tenant(self) -> int:
        """As many as the runner takes, of each version in hand: others can't be looked for behind those of one."""
        return self._inner.most_of_tenant * max(1, len(self._since()))

    @property
    def requests(self) -> list[Request]:
        """What isn't finished, oldest first."""
        return list(self._entries)

    @property
    def version(self) -> Any:
        """The version in memory; None while there is none."""
        return self._rotation.current

    def directory(self) -> str:
        """Return where the version in memory lies; "" while there is none."""
        return self.version.directory if self.version is not None else ""

    def add(self, request: Request) -> None:
        """Take a request in; it waits for its version's turn.

        Raises:
            InvalidRequest: it names no version.
        """
        if not request.adapter_dir:
            raise InvalidRequest("this sampler serves a full run's versions; the base model has a sampler of its own")
        version = self._version_of(request.adapter_dir, request.weights_digest)
        plain = replace(request, adapter_dir="", weights_digest="")
        self._entries[plain] = _Entry(plain, version, self._clock())

    def drop(self, requests: Collection[Request]) -> list[int]:
        """Forget some of the requests, wherever they are; return how many tokens each had."""
        drawn = []
        for entry in [self._entries.pop(request) for request in list(requests)]:
            if entry.inside:
                drawn += self._inner.drop([entry.request])
            else:
                drawn.append(entry.aside.num_drawn if entry.aside else 0)
        return drawn

    def foresee(self, directory: str) -> None:
        """Fetch a new version of the run whose weights are in memory, unless there is something else to fetch."""
        current = self._rotation.current
        if current is None or current.directory.rpartition("/")[0] != directory.rpartition("/")[0]:
            return
        if all(future.done() for future in self._fetching.values()) and self._since().keys() <= {current}:
            self._forget_fetched()
            self._fetch(self._version_of(directory, ""))

    def tidy(self) -> None:
        """Let go of what was foreseen and failed: whoever asks for it is to be told."""
        for version in [one for one, future in self._fetching.items() if _failed(future)]:
            if version not in self._since():
                del self._fetching[version]

    def wake(self) -> None:
        """Let a step that waits for something return."""
        self._inner.wake()

    def step(self) -> list[Finished]:
        """Advance what runs, and let another version have its turn when it is time."""
        asked = self._since()
        decision = self._rotation.decide(
            asked, running=bool(self._inner.requests), ready=self._is_ready, now=self._clock()
        )
        finished: list[Finished] = []
        if decision.fetch is not None:
            finished += self._fetch(decision.fetch)
        if decision.enter:
            self._let_in()
        else:
            self._lay_aside(self._inner.outside)
        if decision.lay_aside:
            self._lay_aside(self._advanced())
        if decision.switch and not finished:
            self._switch(decision.fetch)
        if self._inner.requests:
            finished += self._ended(self._inner.step())
        elif self._entries and (busy := [one for one in self._fetching.values() if not one.done()]):
            wait(busy, timeout=FETCH_WAIT_S)
        return finished

    def _since(self) -> dict[Any, float]:
        """Since when each version that is asked for has been, the oldest first."""
        since: dict[Any, float] = {}
        for entry in self._entries.values():
            since.setdefault(entry.version, entry.since)
        return since

    def _let_in(self) -> None:
        """Give the runner every request of the version in memory."""
        for entry in self._entries.values():
            if not entry.inside and entry.version == self._rotation.current:
                if entry.aside is None:
                    self._inner.add(entry.request)
                else:
                    self._inner.resume(entry.aside)
                entry.had_drawn, entry.aside = entry.aside.num_drawn if entry.aside else 0, None
                entry.inside = True

    def _advanced(self) -> Iterator[Request]:
        """Those that drew something in this turn: whoever has not would never get anywhere."""
        for request in self._inner.requests:
            if self._inner.num_drawn(request) > self._entries[request].had_drawn:
                yield request

    def _lay_aside(self, requests: Iterable[Request]) -> None:
        for aside in self._inner.lay_aside(list(requests)):
            entry = self._entries[aside.request]
            entry.inside, entry.aside = False, aside

    def _ended(self, ended: list[Finished]) -> list[Finished]:
        for one in ended:
            del self._entries[one.request]
        return ended

    def _fetch(self, version: Any) -> list[Finished]:
        """See to it that a version is fetched; those who asked for one that can't be leave."""
        future = self._fetching.get(version)
        if future is None:
            foreseen = self._fetching.pop(self._version_of(version.directory, ""), None)
            self._fetching[version] = self._loader.submit(self._prepared, version, foreseen)
        elif _failed(future):
            del self._fetching[version]
            return self._fail(version, future.exception())
        return []

    def _prepared(self, version: Any, foreseen: Future[Any] | None = None) -> Any:
        """Fetch a version, unless that very one was foreseen, which this thread has fetched before."""
        if foreseen is not None and not _failed(foreseen):
            prepared = foreseen.result()
            if prepared.digest == version.digest:
                return prepared
            prepared.close()
        return loaded(lambda directory: self._weights.prepare(version), version.directory)

    def _is_ready(self, version: Any) -> bool:
        """Tell whether a version was fetched, and nothing else is just being fetched for the weights in memory."""
        future = self._fetching.get(version)
        return future is not None and not _failed(future) and all(one.done() for one in self._fetching.values())

    def _switch(self, version: Any) -> None:
        """Make a version the one in memory."""
        assert not self._inner.requests, "requests are on the old weights"
        prepared = self._fetching.pop(version).result()
        self._forget_fetched()
        began = self._clock()
        try:
            touched = self._weights.apply(prepared)
        except Exception as failure:
            log.exception("version %s could not be applied; there is none in memory now", version.directory)
            self._rotation.begin(None, now=self._clock())
            self._failures[version] = self._failures.get(version, 0) + 1
            if self._failures[version] >= TRIES:
                self._fetching[version] = _failing(failure, version)
            return
        finally:
            self._inner.weights_changed()
        self._failures.clear()
        now = self._clock()
        self._rotation.begin(version, now=now, took_s=now - began)
        log.info("version %s is in memory: %s tensors touched in %.3f s", version.directory, touched, now - began)

    def _forget_fetched(self) -> None:
        """What was fetched for other weights than those in memory is of no use."""
        for future in self._fetching.values():
            if not _failed(future):
                future.result().close()
        self._fetching.clear()

    def _fail(self, version: Any, failure: BaseException | None) -> list[Finished]:
        """End every request of a version."""
        self._failures.pop(version, None)
        gone = [entry.request for entry in self._entries.values() if entry.version == version]
        self.drop(gone)
        users = isinstance(failure, InvalidRequest | NotFound)
        return [Finished(request=one, error=str(failure), category="user" if users else "server") for one in gone]


def _failed(future: Future[Any]) -> bool:
    return future.done() and future.exception() is not None


def _failing(failure: Exception, version: Any) -> Future[Any]:
    """What `_fetch` then tells everybody who asked for the version."""
    future: Future[Any] = Future()

    def apply(_: str) -> Any:
        raise failure

    try:
        loaded(apply, version.directory)
    except (NotFound, OperationFailed) as told:
        future.set_exception(told)
    return future
