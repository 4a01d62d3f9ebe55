"""Answers that wait: such a request leaves Flask at once, and its answer is built when what it waits for is there.

Thousands of polls wait in a process. What Flask holds for a request in hand would be most of their memory, and most of
what the garbage collector has to walk through. Knows neither what is waited for nor for how long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from flask import Flask, Response, current_app, g

from openrl.app import errors

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

T = TypeVar("T")


class Held(Response):
    """The answer of a view whose request waits: `answer(wait())`, as if the view had returned that.

    `wait` runs outside of any request. `answer` runs inside the request again, whose body has been read; what either
    raises is answered as from a view.
    """

    def __init__(self, wait: Callable[[], T], answer: Callable[[T], Response]) -> None:
        super().__init__()
        self._wait, self._answer = wait, answer
        self._app: Flask = current_app._get_current_object()  # type: ignore[attr-defined]
        self._tenant, self._number = g.tenant, errors.request_id()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
        """Wait, and answer; the server asks for the first byte when Flask is done with the request."""
        build = self._waited()
        with self._app.request_context(environ):
            g.tenant, g.request_id = self._tenant, self._number
            response = self._built(build)
            response.headers.extend(self._added())
            chunks = response(environ, start_response)
        yield from chunks

    def _waited(self) -> Callable[[], Response]:
        try:
            return partial(self._answer, self._wait())
        except Exception as error:
            return partial(self._refusal, error)

    def _built(self, build: Callable[[], Response]) -> Response:
        try:
            return build()
        except Exception as error:
            return self._refusal(error)

    def _refusal(self, error: Exception) -> Response:
        return self._app.make_response(self._app.handle_user_exception(error))

    def _added(self) -> list[tuple[str, Any]]:
        """Return the headers that were put on this answer on its way out; its own type and length say nothing."""
        return [(name, value) for name, value in self.headers if name not in ("Content-Type", "Content-Length")]
