"""The service itself: is it up, what does it serve, how should a client behave."""

from __future__ import annotations

from typing import Any

import marshmallow
from flask.views import MethodView
from marshmallow import EXCLUDE, fields

from openrl.app import wire
from openrl.app.context import registry, services
from openrl.app.schemas import Sent, Text
from openrl.tasks.errors import StoreUnavailable

blp = wire.Blueprint("service", __name__, description="Health, capabilities and flags for clients.")


class ClientSchema(Sent):
    """A client that introduces itself.

    The one request whose unknown fields are read over: it is the first call of every SDK, a refusal ends
    the client, and nothing that it says could be ignored to anybody's harm.
    """

    class Meta:
        unknown = EXCLUDE

    sdk_version = Text(load_default="")


class ConfigSchema(marshmallow.Schema):
    """Flags for the SDK; those that aren't here keep the SDK's defaults. `AppSettings` gives the reasons."""

    pjwt_auth_enabled = fields.Boolean()
    parallel_fwdbwd_chunks = fields.Boolean()
    proto_compress_fwdbwd = fields.Boolean()
    custom_loss_server_side = fields.Boolean()
    sample_max_concurrent_requests = fields.Integer()
    sample_use_retrieve_futures = fields.Boolean()
    sample_join_sampling_session = fields.Boolean()


class DynamicConfigSchema(marshmallow.Schema):
    """Flags that clients ask for again and again."""

    refresh_interval_sec = fields.Integer(attribute="dynamic_config_refresh_s")
    sample_cancel_enabled = fields.Boolean()
    sample_cancel_max_batch_size = fields.Integer()


class ModelSchema(marshmallow.Schema):
    """A base model that is served here."""

    model_name = fields.String(attribute="name")
    max_context_length = fields.Integer(attribute="max_context")
    trainable = fields.Constant(True)
    sampleable = fields.Constant(True)


class CapabilitiesSchema(marshmallow.Schema):
    """All base models that are served here."""

    supported_models = fields.List(fields.Nested(ModelSchema))


class StatusSchema(marshmallow.Schema):
    """One word."""

    status = fields.String()


@blp.route("/healthz")
class HealthView(MethodView):
    @blp.response(200, StatusSchema)
    def get(self) -> dict[str, str]:
        """Answer once requests can be served. Needs no key."""
        if not services().store.ready():
            raise StoreUnavailable("the store doesn't answer yet; try again")
        return {"status": "ok"}


@blp.route("/client/config")
class ConfigView(MethodView):
    @blp.response(200, ConfigSchema)
    @blp.arguments(ClientSchema, location="wire")
    def post(self, _client: dict[str, str]) -> Any:
        """Tell a client how to behave."""
        return services().settings


@blp.route("/client/dynamic_config")
class DynamicConfigView(MethodView):
    @blp.response(200, DynamicConfigSchema)
    @blp.arguments(ClientSchema, location="wire")
    def post(self, _client: dict[str, str]) -> Any:
        """Tell a client what may change while it runs."""
        return services().settings


@blp.route("/get_server_capabilities")
class CapabilitiesView(MethodView):
    @blp.response(200, CapabilitiesSchema)
    def get(self) -> dict[str, Any]:
        """List the base models."""
        return {"supported_models": registry().models()}


@blp.route("/telemetry")
class TelemetryView(MethodView):
    @blp.response(200, StatusSchema)
    def post(self) -> dict[str, str]:
        """Accept a client's telemetry and drop it unread: it can hold headers with credentials."""
        return {"status": "accepted"}
