"""Unloading a run from memory, as SDKs up to 0.24 can ask. It loses nothing: its next operation loads it again."""

from __future__ import annotations

from flask.views import MethodView

from openrl.app import wire
from openrl.app.context import services, tenant
from openrl.app.schemas import PromiseSchema, Sent, Text, tag
from openrl.tasks.journal import Promise

blp = wire.Blueprint("unloading", __name__, description="Runs: unload.")


class UnloadSchema(Sent):
    """A run by its id."""

    model_id = Text(required=True)
    type = tag("unload_model")


@blp.route("/unload_model")
class UnloadView(MethodView):
    @blp.response(200, PromiseSchema)
    @blp.arguments(UnloadSchema, location="wire")
    def post(self, asked: dict[str, str]) -> Promise:
        """Promise that a run is out of the trainer's memory, once nothing of it waits there. Nothing of it is lost."""
        return services().journal.unload(tenant(), asked["model_id"])
