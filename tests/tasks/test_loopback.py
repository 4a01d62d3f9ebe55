"""This machine's own addresses, told from a network's."""

from openrl.tasks.loopback import is_loopback


def test_loopback_is_told_from_the_rest():
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "localhost", "::1", "[::1]")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "gpu-box", "localhost.example.com", "")))
