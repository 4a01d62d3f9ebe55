"""What a key may know and do about itself: exchange it for a token, see what it is, revoke it."""

from __future__ import annotations

from typing import Any

import marshmallow
from flask.views import MethodView
from marshmallow import fields

from openrl.app import wire
from openrl.app.auth import caller
from openrl.app.context import services
from openrl.app.schemas import ErrorSchema, Sent
from openrl.app.tokens import email_of
from openrl.tasks.errors import NotFound

blp = wire.Blueprint("identity", __name__, description="Keys: tokens, what a key is, revoking it.")

NO_KEYS = "this service has no API keys: it serves its own machine alone"


class EmptySchema(Sent):
    """Nothing: the key itself is in the header."""


class TokenSchema(marshmallow.Schema):
    """A token to be sent in place of the key."""

    jwt = fields.String(required=True)


class OrganizationSchema(marshmallow.Schema):
    """The tenant."""

    name = fields.String(required=True)


class UserSchema(marshmallow.Schema):
    """Whoever a key is for: its name, where that is an address."""

    email = fields.String(required=True)


class DetailsSchema(marshmallow.Schema):
    """Whose a key is."""

    org_details = fields.Nested(OrganizationSchema, required=True)
    user_details = fields.Nested(UserSchema, required=True)


class KeySchema(marshmallow.Schema):
    """A key, as the SDK's `tinker auth login` asks for it; and what it may do."""

    key_id = fields.Integer(required=True)
    name = fields.String(required=True)
    note = fields.String(required=True)
    details = fields.Nested(DetailsSchema, required=True)
    scopes = fields.List(fields.String(), required=True)
    expires = fields.Float(allow_none=True)


@blp.route("/auth/token")
class TokenView(MethodView):
    @blp.response(200, TokenSchema)
    @blp.arguments(EmptySchema, location="wire")
    def post(self, _nothing: dict[str, Any]) -> dict[str, str]:
        """Give a short-lived token for the key. For a token, one that ends when it does."""
        return {"jwt": services().tokens.give(caller().tenant, caller().key, until=caller().until)}


@blp.route("/auth/apikey/me")
class KeyView(MethodView):
    @blp.response(200, KeySchema)
    def get(self) -> dict[str, Any]:
        """Say what the key is."""
        asks = caller()
        return {
            "key_id": asks.key.number if asks.key else 0,
            "name": asks.key.name if asks.key else asks.tenant,
            "note": asks.key.note if asks.key else NO_KEYS,
            "details": {"org_details": {"name": asks.tenant}, "user_details": {"email": email_of(asks.key)}},
            "scopes": asks.scopes,
            "expires": asks.key.expires if asks.key else None,
        }

    @blp.response(200, marshmallow.Schema)
    @blp.alt_response(404, schema=ErrorSchema, description="This service has no keys.")
    def delete(self) -> dict[str, Any]:
        """Revoke the key, and its tokens with it."""
        key = caller().key
        if key is None:
            raise NotFound(f"no API key; {NO_KEYS}")
        services().tenants.revoke_key(key.key_id, actor=caller().actor)
        services().known_keys.forget()
        return {}
