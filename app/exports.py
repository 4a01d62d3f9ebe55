"""Exports: the files of a checkpoint, behind links that expire; singly, or as the archive that older SDKs ask for.

Whoever holds a link may read that one file until then, without a key, as long as that version is there. A link to
somebody else's published checkpoint doesn't tell whose it is, and ends with the publication. Files are streamed, in
parts where a part is asked for, so that a download that broke off goes on where it was.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import marshmallow
from flask import Response, jsonify, send_file
from flask.views import MethodView
from marshmallow import fields

from openrl.app import archives, wire
from openrl.app.archives import Archive
from openrl.app.auth import caller
from openrl.app.context import registry, services, tenant
from openrl.app.links import LinkSchema, check, link
from openrl.app.schemas import BINARY, ErrorSchema
from openrl.tasks import audit
from openrl.tasks.errors import InvalidRequest, NotFound, shown
from openrl.tasks.registry import Checkpoint
from openrl.workers.weights import layout, manifest

blp = wire.Blueprint("exports", __name__, description="Exports: links, files.")

FILES = ("adapter_config.json", "adapter_model.safetensors")
"""What stock PEFT reads, and all that is handed out of an adapter."""

EVERYBODY = "-"
"""Stands for the owner in a link to a published checkpoint; no tenant is called so."""

AGAIN = "GET .../external_weights_urls or .../archive gives a new one"


class LinksSchema(marshmallow.Schema):
    """A link for each file of a checkpoint."""

    urls = fields.Dict(keys=fields.String(), values=fields.String())
    expires = fields.AwareDateTime(format="iso")


@blp.route("/training_runs/<run_id>/checkpoints/external_weights/<name>/external_weights_urls")
class LinksView(MethodView):
    @blp.response(200, LinksSchema)
    def get(self, run_id: str, name: str) -> dict[str, Any]:
        """Give a link for each file of an export, which works for a short time without a key."""
        owner, checkpoint = registry().readable(tenant(), run_id, f"external_weights/{name}")
        expires = _end(checkpoint)
        _note_export(checkpoint)
        urls = {file: _link(owner, checkpoint, file, expires) for file in _files(checkpoint)}
        return {"urls": urls, "expires": datetime.fromtimestamp(expires, UTC)}


class ArchiveLinkSchema(marshmallow.Schema):
    """A link to the archive of a checkpoint."""

    url = fields.String()
    expires = fields.AwareDateTime(format="iso")


@blp.route("/training_runs/<run_id>/checkpoints/<kind>/<name>/archive")
class ArchiveView(MethodView):
    @blp.response(302, ArchiveLinkSchema, description="`Location` leads to a tar.gz, as `url` does.")
    def get(self, run_id: str, kind: str, name: str) -> Response:
        """Redirect to the checkpoint's weights as one archive; for SDKs up to 0.30."""
        owner, checkpoint = registry().readable(tenant(), run_id, f"{kind}/{name}")
        _files(checkpoint)
        end = _end(checkpoint)
        _note_export(checkpoint)
        url, expires = _link(owner, checkpoint, archives.NAME, end), datetime.fromtimestamp(end, UTC)
        answer = jsonify(ArchiveLinkSchema().dump({"url": url, "expires": expires}))
        answer.status_code = 302
        answer.headers["Location"] = url
        answer.headers["Expires"] = format_datetime(expires, usegmt=True)
        answer.headers["Cache-Control"] = "private, no-store"
        return answer


@blp.route("/exports/<owner>/<path:file>")
class FileView(MethodView):
    @blp.doc(responses={status: {"content": {"*/*": {"schema": BINARY}}} for status in ("200", "206")})
    @blp.response(200, description="The file.", content_type="*/*")
    @blp.alt_response(206, description="The part of the file that `Range` asks for.", content_type="*/*")
    @blp.alt_response(416, schema=ErrorSchema, description="The file has no such part.")
    @blp.arguments(LinkSchema, location="query")
    def get(self, sent: dict[str, str], owner: str, file: str) -> Response:
        """Stream one file of an export to the holder of its link."""
        check(sent, owner, file, again=AGAIN)
        checkpoint, name = _addressed(owner, file)
        home, _, inside = checkpoint.directory.partition("/runs/")
        try:
            if name == archives.NAME:
                return _archive(checkpoint, Path(home).name, f"runs/{inside}")
            path = layout.tenant_file(_data_dir(), Path(home).name, f"runs/{inside}/{name}")
            answer = send_file(path, "application/octet-stream", as_attachment=True, conditional=True)
        except (FileNotFoundError, NotFound):  # being deleted in this moment
            raise _no_file(file) from None
        return _guarded(answer)


def _end(checkpoint: Checkpoint) -> int:
    """Return when a link made now ends (unix seconds): never after its checkpoint."""
    end = int(time.time()) + services().settings.download_link_ttl_s
    return end if checkpoint.expires_at is None else min(end, int(checkpoint.expires_at))


def _note_export(checkpoint: Checkpoint) -> None:
    """Write into the audit log of whoever asks that links to a checkpoint were given."""
    uri, actor = checkpoint.uri, caller().actor
    audit.record(services().store, tenant(), "checkpoint_exported", actor=actor, tinker_path=uri)


def _link(owner: str, checkpoint: Checkpoint, name: str, expires: int) -> str:
    segment = checkpoint.checkpoint_id.partition("/")[0]
    file = f"runs/{checkpoint.run_id}/{segment}/{Path(checkpoint.directory).name}/{name}"
    return link("exports", owner if owner == tenant() else EVERYBODY, file, expires)


def _addressed(owner: str, file: str) -> tuple[Checkpoint, str]:
    """Return the checkpoint and the file's name that a link means, if that very version is still there to be read."""
    parts = file.split("/")
    if len(parts) != 5 or parts[0] != "runs":
        raise _no_file(file)
    _, run_id, segment, version, name = parts
    checkpoint_id = f"{segment}/{version.rpartition('.')[0]}"
    try:
        if owner == EVERYBODY:
            checkpoint = registry().readable("", run_id, checkpoint_id)[1]
        else:
            checkpoint = registry().checkpoint(owner, run_id, checkpoint_id)
    except NotFound:
        raise _no_file(file) from None
    if Path(checkpoint.directory).name != version or name not in (*_files(checkpoint), archives.NAME):
        raise _no_file(file)
    return checkpoint, name


def _files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the names of what is handed out: an adapter, or a model's directory."""
    if checkpoint.is_lora:
        return FILES
    if checkpoint.weights_digest:
        raise InvalidRequest(
            f"{checkpoint.uri} is kept as what changed since the version before it; "
            "save_weights_external makes a model's directory, and so does save_state"
        )
    found = manifest.read(layout.existing(_data_dir(), checkpoint.directory))
    return tuple(sorted(found.files.keys() - {*manifest.STATE_FILES}))


def _archive(checkpoint: Checkpoint, owner: str, directory: str) -> Response:
    files = {name: layout.tenant_file(_data_dir(), owner, f"{directory}/{name}") for name in _files(checkpoint)}
    archive = Archive(files, modified=checkpoint.created)
    answer = Response(archive.pieces(), mimetype="application/gzip")
    answer.call_on_close(archive.close)
    answer.content_length = archive.num_bytes
    name = checkpoint.checkpoint_id.partition("/")[2]
    answer.headers.set("Content-Disposition", "attachment", filename=f"{name}.tar.gz")
    return _guarded(answer)


def _guarded(answer: Response) -> Response:
    answer.headers["Cache-Control"] = "private, no-store"
    answer.headers["X-Content-Type-Options"] = "nosniff"
    return answer


def _data_dir() -> Path:
    return services().store.settings.data_dir


def _no_file(file: str) -> NotFound:
    return NotFound(f"no file {shown(file)}; it was deleted, or never there")
