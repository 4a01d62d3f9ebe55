"""Who holds a data directory, and where its service is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def test_a_file_is_on_the_disk_before_its_rename_and_the_rename_before_the_return(tmp_path, monkeypatch):
    steps = []
    fsync, replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (steps.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(Path, "replace", lambda path, to: (steps.append("rename"), replace(path, to)))
    datadir.write_private(tmp_path / "epoch", "7")
    assert steps == [str(tmp_path / f".epoch.{os.getpid()}"), "rename", str(tmp_path)]
    assert (tmp_path / "epoch").read_text() == "7"


def test_a_directory_that_others_can_enter_is_refused_with_the_command_that_closes_it(tmp_path):
    directory = tmp_path / "a b"
    for mode in (0o755, 0o750, 0o701):
        directory.mkdir(exist_ok=True)
        directory.chmod(mode)
        with pytest.raises(datadir.DirectoryOpen, match=f"chmod 700 '{directory}'"), datadir.hold(directory):
            pass
        assert list(directory.iterdir()) == []
    directory.chmod(0o700)
    with datadir.hold(directory):
        pass


def test_what_is_made_while_it_is_held_is_this_users_alone(tmp_path):
    before = os.umask(0o022)
    try:
        with datadir.hold(tmp_path):
            (tmp_path / "x").mkdir()
            subprocess.run([sys.executable, "-c", "open('y', 'w')"], cwd=tmp_path, check=True)
        assert (tmp_path / "x").stat().st_mode & 0o777 == 0o700
        assert (tmp_path / "y").stat().st_mode & 0o777 == 0o600
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


def test_an_argument_wins_over_the_environment_over_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OPENRL_DATA_DIR", raising=False)
    assert datadir.resolve() == tmp_path / ".openrl"
    monkeypatch.setenv("OPENRL_DATA_DIR", str(tmp_path / "env"))
    assert datadir.resolve() == tmp_path / "env"
    assert datadir.resolve(tmp_path / "given") == tmp_path / "given"
