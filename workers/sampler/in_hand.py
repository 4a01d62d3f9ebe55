"""The requests that an engine has in hand: they join, leave, are laid aside, and let go of what they held.

What both engines share. What a request holds beside its weights (a place in the cache, a stream) each engine frees
itself. Knows neither torch nor vLLM. One thread only.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection
from concurrent.futures import Future
from typing import Generic

from openrl.tasks.errors import InvalidRequest, NotFound, OpenRLError
from openrl.workers.sampler.groups import Group
from openrl.workers.sampler.requests import Finished, Request
from openrl.workers.sampler.stops import Decode
from openrl.workers.sampler.versions import Adapter, Versions

log = logging.getLogger(__name__)


class InHand(Generic[Adapter]):
    """Requests, oldest first, and the weights that they wait for or use."""

    def __init__(self, versions: Versions[Adapter], decode: Decode) -> None:
        self._versions = versions
        self._decode = decode
        self._groups: list[Group] = []
        self._loading: dict[Group, Future[Adapter]] = {}
        self._arrivals = 0

    @property
    def requests(self) -> list[Request]:
        """Return what is in the engine, oldest first."""
        return [group.request for group in self._groups]

    @property
    def outside(self) -> list[Request]:
        """Return the requests of which nothing runs: they have not begun, or gave way."""
        return [group.request for group in self._groups if not group.running]

    def add(self, request: Request) -> None:
        """Let a request join at the next step."""
        self._groups.append(Group(request, arrival=self._arrivals, decode=self._decode))
        self._arrivals += 1

    def drop(self, requests: Collection[Request]) -> list[int]:
        """Forget these requests, half-drawn sequences included; return how many tokens each had."""
        groups = {id(group.request): group for group in self._groups}
        dropped = [groups[id(request)] for request in requests]
        for group in dropped:
            self._leave(group)
        return [group.num_drawn for group in dropped]

    def num_drawn(self, request: Request) -> int:
        """Return how many tokens a request has."""
        return next(group.num_drawn for group in self._groups if group.request is request)

    def lay_aside(self, requests: Collection[Request]) -> list[Group]:
        """Take these requests out, which keep what they have drawn and nothing else; `resume` lets them go on."""
        wanted = {id(request) for request in requests}
        aside = [group for group in self._groups if id(group.request) in wanted]
        for group in aside:
            self._leave(group)
        return aside

    def resume(self, aside: Group) -> None:
        """Let a request go on: it reads again what it has drawn."""
        self._groups.append(aside)

    def foresee(self, directory: str) -> None:
        """Load a version that is likely to be asked for next."""
        self._versions.foresee(directory)

    def tidy(self) -> None:
        """Let go of the versions that nobody has used for a while."""
        self._versions.tidy()

    def _free(self, group: Group) -> None:
        """Give back all that a group holds beside its weights."""
        raise NotImplementedError

    def _give_back(self, group: Group) -> None:
        """Let a group wait, which keeps what it has drawn and nothing else."""
        self._free(group)
        if self._loading.pop(group, None) or (group.ready and group.request.adapter_dir):
            self._versions.release(group.request.adapter_dir)
        group.adapter, group.ready = None, False

    def _leave(self, group: Group) -> None:
        """Take a group out and give back all it holds."""
        self._give_back(group)
        self._groups.remove(group)

    def _fail(self, group: Group, failure: Exception) -> Finished:
        """End one request with an error; what wasn't raised on purpose is logged under an id."""
        self._leave(group)
        if isinstance(failure, OpenRLError):
            users = isinstance(failure, InvalidRequest | NotFound)
            return Finished(request=group.request, error=str(failure), category="user" if users else "server")
        error_id = secrets.token_hex(4)
        log.error("request %s failed, error %s", group.request.job.request_id, error_id, exc_info=failure)
        error = f"the sampler failed on this request; its log tells why (error {error_id})"
        return Finished(request=group.request, error=error)
