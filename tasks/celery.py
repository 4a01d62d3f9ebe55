"""The Celery application: dispatches every operation by name and shows it; decides nothing.

Order, once-only and durability belong to the journal (`openrl.tasks.journal`), since Celery on Redis
gives neither. Messages carry ids only, are acknowledged early and may be lost, doubled or late without
harm. `celery -A openrl.tasks ...` and Flower find this application here.
"""

from __future__ import annotations

import base64
import json
import os
import uuid

from celery import Celery

from openrl.tasks.settings import broker_url

CONTROL_QUEUE = "control"
"""The scheduler's own queue."""

KINDS = ("train", "sample")
"""The two families of queues: what a trainer consumes, what a sampler consumes."""

KEY_PREFIX = "openrl:celery:"
"""Before the name of everything that Celery keeps in the store."""


def queue_name(family: str, slug: str, tenant: str) -> str:
    """Name a tenant's queue of a base model. Unambiguous: a tenant's name holds no dot."""
    return f"{family}.{slug}.{tenant}"


def notice_queue(family: str, slug: str) -> str:
    """Name the queue that every worker of a base model consumes from its first moment."""
    return f"notice.{family}.{slug}"


def _configure(app: Celery) -> None:
    app.conf.update(
        accept_content=["json"],
        task_serializer="json",
        result_serializer="json",
        # Results live in the store beside the promises; Celery keeps none.
        task_ignore_result=True,
        # A doorbell that is lost with its worker does no harm; one that comes back twice costs threads.
        task_acks_late=False,
        worker_prefetch_multiplier=1,
        worker_disable_prefetch=True,
        worker_enable_remote_control=True,
        worker_send_task_events=True,
        # A worker says when it receives a task; the journal knows what waits.
        task_send_sent_event=False,
        worker_cancel_long_running_tasks_on_connection_loss=False,
        broker_connection_retry_on_startup=True,
        broker_pool_limit=8,
        broker_transport_options={
            # One Redis list a queue in place of four: BRPOP ships every key.
            "priority_steps": [0],
            "queue_order_strategy": "round_robin",
            "polling_interval": 0.1,
            "socket_timeout": 30,
            "socket_connect_timeout": 5,
            "socket_keepalive": True,
            "health_check_interval": 20,
            # No `retry_on_timeout`: redis-py would then connect again by itself in the midst of a read, and wait there
            # for a message that nobody sends, while Celery doesn't hear of it and consumes nothing any more.
            # Whoever rings doesn't wait for a broker that is away; a worker connects again by Celery's own loop.
            "max_retries": 0,
            "global_keyprefix": KEY_PREFIX,
        },
        task_default_queue=CONTROL_QUEUE,
        task_track_started=False,
        worker_hijack_root_logger=False,
        timezone="UTC",
    )


def letter(name: str, args: tuple[str, ...], *, task_id: str, queue: str) -> tuple[str, str]:
    """Return the list that is a queue in the store, and a task as Celery's transport for Redis lays it there."""
    # Celery's own way to shorten what it shows of long arguments takes longer than all the rest.
    shown = {"argsrepr": repr(args), "kwargsrepr": "{}"}
    task = celery.amqp.as_task_v2(task_id, name, args, ignore_result=True, **shown)
    message = {
        "body": base64.b64encode(json.dumps(task.body).encode()).decode(),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": task.headers,
        "properties": {
            **task.properties,
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": queue},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": str(uuid.uuid4()),
        },
    }
    return KEY_PREFIX + queue, json.dumps(message)


celery = Celery("openrl", include=["openrl.tasks.training", "openrl.tasks.sampling"])
celery.conf.broker_url = broker_url(os.environ)
_configure(celery)
