"""Links that expire and work without a key: whoever holds one may read what it names until then, and nothing else.

A link carries tenant, name and end of life, and the service's signature under them and under what kind of thing it
leads to. Knows none of those things.
"""

from __future__ import annotations

import time

from flask import request
from marshmallow import fields

from openrl.app.context import services
from openrl.app.schemas import Sent
from openrl.tasks.errors import Forbidden, Gone, Unauthorized

METHOD = "GET"
"""What a link allows; HEAD, its answer without a body, comes with it."""


class LinkSchema(Sent):
    """The end of a link: until when (unix seconds), and the signature."""

    expires = fields.String(load_default="")
    signature = fields.String(load_default="")


def link(route: str, owner: str, name: str, expires: int, *, kind: str = METHOD) -> str:
    """Return the address of `name` under `route`, good until `expires`."""
    signature = services().signer.sign(kind, owner, name, str(expires))
    base = services().settings.public_url.rstrip("/") or request.url_root.rstrip("/")
    return f"{base}/api/v1/{route}/{owner}/{name}?expires={expires}&signature={signature}"


def check(sent: dict[str, str], owner: str, name: str, *, again: str, kind: str = METHOD) -> None:
    """Refuse a link that isn't ours as it stands, or whose time is over; `again` says where to get a new one."""
    if not sent["signature"]:
        raise Unauthorized(f"this address wants the signature of a link; {again}")
    if not services().signer.verify(sent["signature"], kind, owner, name, sent["expires"]):
        raise Forbidden(f"the link was altered, or is not of this service; {again}")
    if int(sent["expires"]) <= time.time():
        raise Gone(f"the link has expired; {again}")
