"""Who holds a data directory, and where its service is."""

from __future__ import annotations

import subprocess
import sys

import pytest

from openrl.tasks import datadir

HOLDER = """
import sys, pathlib, time
from openrl.tasks import datadir
with datadir.hold(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""

SERVICE = datadir.Service(pid=7, redis_url="unix:///s", broker_url="redis+socket:///s", base_url="h", started=1.0)


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_held_directory_cannot_be_held_again(tmp_path, holder):
    assert datadir.held(tmp_path)
    with pytest.raises(datadir.DirectoryInUse, match="in use by another openrl process"), datadir.hold(tmp_path):
        pass


def test_the_holder_is_named_once_it_has_said_who_it_is(tmp_path, holder):
    datadir.publish(tmp_path, SERVICE)
    with pytest.raises(datadir.DirectoryInUse, match=r"`openrl up` \(pid 7\)"), datadir.hold(tmp_path):
        pass


def test_a_killed_holder_lets_go(tmp_path, holder):
    holder.kill()
    holder.wait()
    assert not datadir.held(tmp_path)
    with datadir.hold(tmp_path):
        pass


def test_a_new_directory_is_private(tmp_path):
    with datadir.hold(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_a_service_is_found_only_while_its_directory_is_held(tmp_path):
    datadir.publish(tmp_path, SERVICE)
    assert datadir.service(tmp_path) is None
    with datadir.hold(tmp_path):
        assert datadir.service(tmp_path) == SERVICE
        datadir.withdraw(tmp_path)
        assert datadir.service(tmp_path, patience_s=0.0) is None


def test_the_service_file_is_private(tmp_path):
    datadir.publish(tmp_path, SERVICE)
    assert (tmp_path / datadir.SERVICE).stat().st_mode & 0o777 == 0o600


def test_an_argument_wins_over_the_environment_over_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OPENRL_DATA_DIR", raising=False)
    assert datadir.resolve() == tmp_path / ".openrl"
    monkeypatch.setenv("OPENRL_DATA_DIR", str(tmp_path / "env"))
    assert datadir.resolve() == tmp_path / "env"
    assert datadir.resolve(tmp_path / "given") == tmp_path / "given"
