"""Every error that crosses a boundary: HTTP, the queue, or a worker's engine.

One class per remedy. Each message is one line: what happened, and what to do. The classes know
nothing of HTTP; `openrl.app.errors` holds the one table from class to status. What a message repeats of a request
goes through `shown`.
"""

from reprlib import Repr

_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80


def shown(value: object) -> str:
    """Return `repr(value)`, cut where it is longer than a message can bear."""
    return _SHORT.repr(value)


class OpenRLError(Exception):
    """The base of everything this service raises on purpose."""


class InvalidRequest(OpenRLError, ValueError):
    """The caller's request makes no sense as it stands: mend the named field and send it again."""


class Undecodable(InvalidRequest):
    """The body could not be read at all: send well-formed JSON or protobuf."""


class Incomplete(OpenRLError):
    """The body broke off or stopped arriving: send the same request again."""


class TooLarge(InvalidRequest):
    """The body is over a size limit: send less at once."""


class KeyReused(InvalidRequest):
    """A different operation was already accepted under this key: use the next one."""


class QuotaExceeded(InvalidRequest):
    """The tenant has as much as it may have: give something back, or have the operator raise the quota."""


class NotFound(OpenRLError, LookupError):
    """No such thing for this tenant; another tenant's thing looks exactly the same."""


class Gone(OpenRLError):
    """It existed, and its result is no longer kept: submit the operation anew."""


class Unauthorized(OpenRLError):
    """No valid API key: create one with `openrl keys create`."""


class TokenRejected(Unauthorized):
    """The short-lived token is no longer valid: exchange the API key for a new one."""


class OutOfScope(OpenRLError):
    """The API key may not do this: use one that has the scope."""


class Forbidden(OpenRLError):
    """The link was altered or isn't ours: ask the service for a new one."""


class Overloaded(OpenRLError):
    """Too much at once: try the same request again after a while."""

    retry_after_s: float = 2.0
    """How long a client does well to wait."""


class NotServed(OpenRLError):
    """A base model that something was made on isn't served now: an operator starts the service with it again."""


class OtherVersion(OpenRLError):
    """Another version of the service wrote this: an operator starts that version, or upgrades the data."""


class NotLocal(OpenRLError):
    """A service without API keys was asked from elsewhere than this machine: make a key, and send it."""


class StoreUnavailable(OpenRLError):
    """Redis doesn't answer: try again; an operator must look if it lasts."""


class DiskRefusal(StoreUnavailable):
    """The disk under the data directory takes nothing now: it is full or read-only; an operator must look."""


class StoreFault(OpenRLError):
    """The store answers and couldn't carry out a command: a fault of the service, found in its log."""


class StaleOwner(OpenRLError):
    """This worker's lease on the run has passed to another: drop the run's state, commit nothing."""


class OperationFailed(OpenRLError):
    """An operation ran and failed; `openrl.tasks.futures` holds its category and message."""
