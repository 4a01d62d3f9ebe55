"""Answers that wait: such a request leaves Flask at once, and its answer is built when what it waits for is there.

Thousands of polls wait in a process. What Flask holds for a request in hand would be most of their memory, and most of
what the garbage collector has to walk through. Knows neither what is waited for nor for how long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from flask import Flask, Response, current_app, g

from openrl.app import errors

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

T = TypeVar("T")


class Held(Response):
    """The answer of a view whose request waits: `answer(wait())`, as if the view had returned that.

    `wait` runs outside of any request and application. `answer` has the application and, in `g`, the tenant and the
    number of the request; the request itself would have to be built again. What either raises is answered as from a
    view.
    """

    def __init__(self, wait: Callable[[], T], answer: Callable[[T], Response]) -> None:
        super().__init__()
        self._wait, self._answer = wait, answer
        self._app: Flask = current_app._get_current_object()  # type: ignore[attr-defined]
        self._tenant, self._number = g.tenant, errors.request_id()

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterator[bytes]:
        """Wait, and answer; the server asks for the first byte when Flask is done with the request."""
        try:
            response = self._answered(self._wait())
        except Exception as error:
            response = self._refusal(error, environ)
        response.headers.extend(self._added())
        yield from response(environ, start_response)

    def _answered(self, found: Any) -> Response:
        with self._app.app_context():
            self._identify()
            return self._answer(found)

    def _refusal(self, error: Exception, environ: WSGIEnvironment) -> Response:
        """Answer an error inside the request again: which handler it has depends on the route."""
        with self._app.request_context(environ):
            self._identify()
            return self._app.make_response(self._app.handle_user_exception(error))

    def _identify(self) -> None:
        g.tenant, g.request_id = self._tenant, self._number

    def _added(self) -> list[tuple[str, Any]]:
        """Return the headers that were put on this answer on its way out; its own type and length say nothing."""
        return [(name, value) for name, value in self.headers if name not in ("Content-Type", "Content-Length")]
