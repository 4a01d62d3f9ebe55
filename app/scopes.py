"""What a key must be allowed to do for each route: the one place that says so.

A route asks for any one of its scopes. A new route is written down here; until it is, it takes the scope `admin`, and
a test fails. Knows neither keys nor views.
"""

from __future__ import annotations

import re
from functools import cache

from openrl.tasks.tenants import ADMIN, READ, SAMPLE, TRAIN

OPEN: tuple[str, ...] | None = None
"""No key at all: the health check, and what the signature in the address opens."""

ANY: tuple[str, ...] = ()
"""Any key: what every client asks for at its start, and what a key may do about itself."""

CLIENT = (TRAIN, SAMPLE)
RESULTS = (TRAIN, SAMPLE, READ)

SCOPES: dict[str, tuple[str, ...] | None] = {
    # the service
    "GET /healthz": OPEN,
    "GET /openapi.json": ANY,
    "GET /docs": ANY,
    "POST /client/config": ANY,
    "POST /client/dynamic_config": ANY,
    "GET /get_server_capabilities": ANY,
    "POST /telemetry": ANY,
    # keys
    "POST /auth/token": ANY,
    "GET /auth/apikey/me": ANY,
    "DELETE /auth/apikey/me": ANY,
    # sessions
    "POST /create_session": CLIENT,
    "POST /session_heartbeat": CLIENT,
    "POST /sessions/{}/finish": CLIENT,
    "GET /sessions": (READ,),
    "GET /sessions/{}": (READ,),
    "POST /sessions/search": (READ,),
    "PUT /sessions/{}/project": CLIENT,
    "GET /sessions/{}/trace_export": (READ,),
    "GET /traces/{}/{}": OPEN,
    # runs
    "POST /create_model": (TRAIN,),
    "POST /load_weights": (TRAIN,),
    "POST /unload_model": (TRAIN,),
    "POST /get_info": (TRAIN, READ),
    "POST /forward_backward": (TRAIN,),
    "POST /forward": (TRAIN,),
    "POST /optim_step": (TRAIN,),
    "GET /training_runs": (READ,),
    "GET /training_runs/{}": (READ,),
    # checkpoints
    "POST /save_weights": (TRAIN,),
    "POST /save_weights_for_sampler": (TRAIN,),
    "POST /save_weights_external": (TRAIN,),
    "POST /copy_weights": (TRAIN,),
    "POST /weights_info": RESULTS,
    "GET /checkpoints": (READ,),
    "GET /training_runs/{}/checkpoints": (READ,),
    "DELETE /training_runs/{}/checkpoints/{}/{}": (TRAIN,),
    "PUT /training_runs/{}/checkpoints/{}/{}/ttl": (TRAIN,),
    "POST /training_runs/{}/checkpoints/{}/{}/publish": (TRAIN,),
    "DELETE /training_runs/{}/checkpoints/{}/{}/publish": (TRAIN,),
    "GET /training_runs/{}/checkpoints/external_weights/{}/external_weights_urls": (READ,),
    "GET /training_runs/{}/checkpoints/{}/{}/archive": (READ,),
    "GET /exports/{}/{}": OPEN,
    # sampling
    "POST /create_sampling_session": (SAMPLE,),
    "POST /join_sampling_session": (SAMPLE,),
    "GET /samplers/{}": (SAMPLE, READ),
    "POST /asample": (SAMPLE,),
    # results
    "POST /retrieve_future": RESULTS,
    "POST /retrieve_futures": RESULTS,
    "POST /cancel_future": CLIENT,
    # the tenant's books
    "GET /audit": (ADMIN,),
    "GET /billing/usage/events": (ADMIN,),
    "GET /billing/usage/checkpoints/current": (ADMIN,),
    # clients of OpenAI's API
    "GET /v1/models": (SAMPLE, READ),
    "GET /v1/models/{}": (SAMPLE, READ),
    "POST /v1/completions": (SAMPLE,),
    "POST /v1/chat/completions": (SAMPLE,),
}

PREFIX = "/api/v1"

UNDECLARED = (ADMIN,)
"""What a route takes that isn't written down: as good as nobody has it."""


def name(method: str, rule: str) -> str:
    """Return how a route is called here: `<id>` in its rule is `{}`, and HEAD is GET without a body."""
    path = re.sub(r"<[^>]*>", "{}", rule)
    if path.startswith(f"{PREFIX}/") and not path.startswith(f"{PREFIX}/v1/"):
        path = path.removeprefix(PREFIX)
    return f"{'GET' if method == 'HEAD' else method} {path}"


@cache
def needed(method: str, rule: str) -> tuple[str, ...] | None:
    """Return the scopes of which a key needs one; OPEN where it needs none, ANY where each key will do."""
    if method == "OPTIONS":
        return ANY
    return SCOPES.get(name(method, rule), UNDECLARED)
