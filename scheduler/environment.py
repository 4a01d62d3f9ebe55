"""What every part of a service on one machine is told: its environment, and the store's settings by it.

Knows no processes and starts nothing.
"""

from __future__ import annotations

import os

from openrl.scheduler.settings import UpSettings
from openrl.tasks import embedded
from openrl.tasks.settings import StoreSettings


def told(settings: UpSettings, *, port: int) -> dict[str, str]:
    """Return what all parts of the service are told."""
    return {
        "OPENRL_REDIS_URL": settings.redis_url or embedded.url(settings.data_dir),
        "OPENRL_BROKER_URL": settings.broker_url,
        "OPENRL_DATA_DIR": str(settings.data_dir),
        "OPENRL_HOST": settings.host,
        "OPENRL_PORT": str(port),
        "OPENRL_API_WORKERS": str(settings.api_workers),
        "OPENRL_ACCELERATORS": str(len(settings.devices)),
        "OPENRL_SAMPLER_REPLICAS": str(settings.sampler_replicas),
        "OPENRL_IDLE_TIMEOUT_S": str(settings.idle_timeout_s),
    }


def store_settings(settings: UpSettings) -> StoreSettings:
    """Return the settings of the service's store."""
    return StoreSettings.from_env(os.environ | told(settings, port=settings.port))
