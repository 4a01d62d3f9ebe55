import subprocess
import sys

import pytest
import zstandard

from openrl.app.wire import unpack
from openrl.tasks.errors import TooLarge, Undecodable


def test_zstd_frames_come_back_whole_one_or_several() -> None:
    data = bytes(range(256)) * 5000
    frames = zstandard.compress(data) + zstandard.compress(b"tail")
    assert unpack(frames, 1 << 24) == data + b"tail"


def test_a_bomb_is_refused_before_it_has_grown() -> None:
    bomb = zstandard.compress(bytes(1 << 28))
    with pytest.raises(TooLarge, match="1048576 bytes after zstd"):
        unpack(bomb, 1 << 20)


@pytest.mark.parametrize("broken", [b"not zstd at all", b"", zstandard.compress(bytes(range(256)) * 99)[:-5]])
def test_broken_zstd_is_undecodable(broken: bytes) -> None:
    with pytest.raises(Undecodable):
        unpack(broken, 1 << 20)


def test_the_api_starts_without_torch() -> None:
    check = "import sys, openrl.app.factory, openrl.app.gunicorn; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_the_master_process_loads_neither_flask_nor_redis() -> None:
    check = "import sys, openrl.app.__main__; sys.exit(bool({'flask', 'redis', 'celery'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", check], check=True)
