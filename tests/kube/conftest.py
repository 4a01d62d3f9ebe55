"""A cluster of the emulator, and the driver's own client on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kubernetes import client

from openrl.scheduler.clusters.kube_api import KubeApi
from tests.kube.machines import NAMESPACE, Machines


@pytest.fixture
def machines() -> Iterator[Machines]:
    """A cluster without nodes."""
    cluster = Machines()
    with cluster.server:
        yield cluster
    assert not cluster.server.mistakes, cluster.server.mistakes[0]


@pytest.fixture
def api(machines: Machines) -> Iterator[KubeApi]:
    """The driver's client."""
    made = connect(machines)
    yield made
    made.close()


def connect(machines: Machines) -> KubeApi:
    """Connect to the emulated server as the scheduler does to a real one."""
    return KubeApi.to(client.Configuration(host=machines.server.url), NAMESPACE)
