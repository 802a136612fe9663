"""Children that end with the block that started them."""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading

import pytest

from project.local.processes import background, end, foreground, is_free, local_environment, within
from tests.support.waiting import eventually

# Starts a child of its own and prints its pid; both would live for a minute, and the parent ignores SIGTERM if told.
PARENT = """
import signal, subprocess, sys
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print(child.pid, flush=True)
child.wait()
"""


def is_running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def log(tmp_path):
    return tmp_path / "log"


def test_a_background_process_and_its_children_are_gone_after_the_block(log):
    with background([sys.executable, "-c", PARENT], os.environ, log) as process:
        child = int(eventually(lambda: log.read_bytes().strip()))
        assert is_running(process.pid)
        assert is_running(child)
    assert process.returncode == -signal.SIGTERM
    assert eventually(lambda: not is_running(child))


def test_they_are_gone_when_the_block_fails_too(log):
    with (
        pytest.raises(RuntimeError, match="inside"),
        background([sys.executable, "-c", PARENT], os.environ, log) as process,
    ):
        raise RuntimeError("inside")
    assert not is_running(process.pid)


def test_one_that_ended_by_itself_is_left_alone(log):
    with background([sys.executable, "-c", "print('done')"], os.environ, log) as process:
        assert process.wait(20) == 0
    assert log.read_text() == "done\n"


def test_one_that_ignores_the_request_is_killed(log, monkeypatch):
    monkeypatch.setattr("project.local.processes._STOP_TIMEOUT_S", 0.2)
    with background([sys.executable, "-c", PARENT, "stubborn"], os.environ, log) as process:
        child = int(eventually(lambda: log.read_bytes().strip()))
    assert process.returncode == -signal.SIGKILL
    assert eventually(lambda: not is_running(child))


def test_a_terminals_interrupt_does_not_reach_the_background(log):
    with background([sys.executable, "-c", PARENT], os.environ, log) as process:
        assert os.getpgid(process.pid) != os.getpgid(0)


def test_a_foreground_process_hands_its_exit_status_back():
    assert foreground([sys.executable, "-c", "raise SystemExit(3)"], os.environ) == 3


def test_ending_twice_does_nothing():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    end(process)
    end(process)
    assert process.returncode == -signal.SIGTERM


def test_a_taken_port_is_not_free():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert not is_free(port)
    assert is_free(port)


def test_within_waits_no_longer_than_it_must():
    event = threading.Event()
    threading.Timer(0.05, event.set).start()
    assert within(event.is_set, 10)
    assert not within(lambda: False, 0.05)


def test_a_local_run_takes_nothing_of_another_deployment(monkeypatch, tmp_path):
    monkeypatch.setenv("DATABASE_URL", "postgres://production")
    monkeypatch.setenv("REDIS_URL", "redis://production")
    environ = local_environment(tmp_path)
    assert not {"DATABASE_URL", "REDIS_URL"} & environ.keys()
    assert environ["VAR_DIR"] == str(tmp_path)
    assert environ["PATH"].startswith(str(pathlib.Path(sys.executable).parent))
