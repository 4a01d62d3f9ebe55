"""Exports: the files of an external checkpoint, behind links that expire.

A link names tenant, file and end of life, and carries the service's signature under them: whoever holds it
may read that one file until then, without a key. Files are streamed, in parts where a part is asked for, so
that a download that broke off goes on where it was. Which files there are is `openrl.workers.weights`' to say.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

import marshmallow
from flask import Response, request, send_file
from flask.views import MethodView
from marshmallow import fields

from openrl.app import wire
from openrl.app.context import registry, services, tenant
from openrl.app.schemas import Sent
from openrl.tasks.errors import Forbidden, Gone, NotFound, Unauthorized, shown
from openrl.workers.weights import layout

blp = wire.Blueprint("exports", __name__, description="Exports: links, files.")

FILES = ("adapter_config.json", "adapter_model.safetensors")
"""What stock PEFT reads, and all that is handed out."""

METHOD = "GET"
"""What a link allows; HEAD, its answer without a body, comes with it."""


class LinkSchema(Sent):
    """The end of a link: until when (unix seconds), and the signature."""

    expires = fields.String(load_default="")
    signature = fields.String(load_default="")


class LinksSchema(marshmallow.Schema):
    """A link for each file of a checkpoint."""

    urls = fields.Dict(keys=fields.String(), values=fields.String())
    expires = fields.AwareDateTime(format="iso")


@blp.route("/training_runs/<run_id>/checkpoints/external_weights/<name>/external_weights_urls")
class LinksView(MethodView):
    @blp.response(200, LinksSchema)
    def get(self, run_id: str, name: str) -> dict[str, Any]:
        """Give a link for each file of an export, which works for a short time without a key."""
        checkpoint = registry().checkpoint(tenant(), run_id, f"external_weights/{name}")
        expires = int(time.time()) + services().settings.download_link_ttl_s
        if checkpoint.expires_at is not None:
            expires = min(expires, int(checkpoint.expires_at))
        inside = checkpoint.directory.removeprefix(f"{layout.tenant_dir(tenant())}/")
        urls = {file: _link(tenant(), f"{inside}/{file}", expires) for file in FILES}
        return {"urls": urls, "expires": datetime.fromtimestamp(expires, UTC)}


@blp.route("/exports/<owner>/<path:file>")
class FileView(MethodView):
    @blp.response(200, description="The file, or the part of it that `Range` asks for.", content_type="*/*")
    @blp.arguments(LinkSchema, location="query")
    def get(self, link: dict[str, str], owner: str, file: str) -> Response:
        """Stream one file of an export to the holder of its link."""
        _check(link, owner, file)
        path = layout.tenant_file(services().store.settings.data_dir, owner, file)
        try:
            answer = send_file(path, "application/octet-stream", as_attachment=True, conditional=True)
        except FileNotFoundError:  # deleted in this moment
            raise NotFound(f"no file {shown(file)}; it was deleted") from None
        answer.headers["Cache-Control"] = "private, no-store"
        answer.headers["X-Content-Type-Options"] = "nosniff"
        return answer


def _link(owner: str, file: str, expires: int) -> str:
    signature = services().signer.sign(METHOD, owner, file, str(expires))
    base = services().settings.public_url.rstrip("/") or request.url_root.rstrip("/")
    return f"{base}/api/v1/exports/{owner}/{file}?expires={expires}&signature={signature}"


def _check(link: dict[str, str], owner: str, file: str) -> None:
    """Refuse a link that isn't ours as it stands, or whose time is over."""
    again = "GET .../external_weights_urls gives a new one"
    if not link["signature"]:
        raise Unauthorized(f"this address wants the signature of a link; {again}")
    if not services().signer.verify(link["signature"], METHOD, owner, file, link["expires"]):
        raise Forbidden(f"the link was altered, or is not of this service; {again}")
    if int(link["expires"]) <= time.time():
        raise Gone(f"the link has expired; {again}")
