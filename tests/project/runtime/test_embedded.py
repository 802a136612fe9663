"""The embedded Valkey, tried with the real server: found, started, shared, stopped, and survived when killed."""

import contextlib
import os
import pathlib
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time

import pytest
import redis
from kombu import Connection as BrokerConnection
from redis.backoff import NoBackoff
from redis.retry import Retry

from project.runtime import embedded
from project.runtime.embedded import EmbeddedValkeyError, ensure_valkey, hold_valkey, valkey_socket
from project.runtime.file_lock import lock_file, try_lock
from tests.support.waiting import eventually

ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.fixture
def var_dir(tmp_path):
    """A VAR_DIR of this test; whatever server still runs for it at the end is stopped."""
    directory = tmp_path / "var"
    yield directory
    if is_running(directory):
        ensure_valkey(directory).release()
    assert not is_running(directory)
    shutil.rmtree(valkey_socket(directory).parent, ignore_errors=True)


@pytest.fixture
def another_tmpdir():
    """A second place for sockets, short enough for them."""
    with tempfile.TemporaryDirectory(prefix="sg") as directory:
        yield directory


def client(var_dir):
    path = str(valkey_socket(var_dir))
    return redis.Redis(unix_socket_path=path, socket_timeout=5, retry=Retry(NoBackoff(), 0))


def is_running(var_dir):
    with client(var_dir) as connection:
        try:
            return connection.ping()
        except redis.exceptions.ConnectionError:
            return False


def server_pid(var_dir):
    with client(var_dir) as connection:
        return connection.info("server")["process_id"]


def holder(var_dir):
    """Another process that holds the server, up to its first line."""
    process = subprocess.Popen(
        [sys.executable, "-m", "project.runtime.embedded", str(var_dir)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline().startswith("valkey ready")
    return process


def killable_holder(var_dir):
    """A holder whose server's guard looks for users every 50 ms."""
    code = (
        "import sys; from project.runtime import embedded; embedded.GUARD_INTERVAL_S = 0.05; sys.exit(embedded.main())"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(var_dir)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("valkey ready")
    return process


def end(process, number=signal.SIGTERM):
    process.send_signal(number)
    process.communicate(timeout=20)
    return process.returncode


def test_started_on_demand_used_and_stopped_by_its_starter(var_dir):
    with ensure_valkey(var_dir) as valkey:
        assert valkey.started_here
        with redis.Redis.from_url(valkey.url) as connection:
            assert connection.set("key", "value")
            assert int(connection.config_get("port")["port"]) == 0
    assert not is_running(var_dir)


def test_what_was_written_is_there_after_a_restart(var_dir):
    with ensure_valkey(var_dir), client(var_dir) as connection:
        connection.xadd("log", {"n": 1})
    with ensure_valkey(var_dir), client(var_dir) as connection:
        assert connection.xlen("log") == 1


def test_its_starter_leaves_it_to_those_who_are_still_connected_and_the_last_stops_it(var_dir):
    starter = ensure_valkey(var_dir)
    second = ensure_valkey(var_dir)
    assert (starter.started_here, second.started_here) == (True, False)
    starter.release()
    assert is_running(var_dir)
    second.release()
    assert not is_running(var_dir)


def test_a_second_release_does_nothing(var_dir):
    first = ensure_valkey(var_dir)
    first.release()
    with ensure_valkey(var_dir):
        first.release()
        assert is_running(var_dir)


def test_a_process_takes_one_hold_however_often_it_asks(var_dir):
    first = hold_valkey(var_dir)
    assert hold_valkey(var_dir) is first
    first.release()
    again = hold_valkey(var_dir)
    assert again is not first
    again.release()


def test_held_by_another_process_it_outlives_its_starter_and_ends_with_the_other(var_dir):
    starter = ensure_valkey(var_dir)
    other = holder(var_dir)
    starter.release()
    assert is_running(var_dir)
    assert end(other) == 0
    assert not is_running(var_dir)


def test_a_starter_that_is_killed_leaves_a_server_that_the_next_one_uses_and_stops(var_dir):
    starter = holder(var_dir)
    end(starter, signal.SIGKILL)
    assert is_running(var_dir)
    with ensure_valkey(var_dir) as valkey:
        assert not valkey.started_here
    assert not is_running(var_dir)


def guard_pids(var_dir):
    """The guards of `var_dir`, found by their arguments, which only they have."""
    lock = os.fsencode(var_dir.resolve() / "valkey" / "start.lock")
    found = []
    for entry in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if lock in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
    return found


def the_guard(var_dir):
    """Its process: just after its start it has no arguments yet."""
    (guard,) = eventually(lambda: guard_pids(var_dir))
    return guard


def has_no_server(var_dir):
    """Whether no process holds the data directory; asks without connecting, since a connection counts as a user."""
    with lock_file(var_dir / "valkey" / "data.lock") as descriptor:
        return try_lock(descriptor)


class TestGuard:
    def test_a_server_whose_users_were_all_killed_ends_and_keeps_what_was_written(self, var_dir):
        users = [killable_holder(var_dir), killable_holder(var_dir)]
        with client(var_dir) as connection:
            for n in range(100):
                connection.xadd("log", {"n": n})
        for user in users:
            end(user, signal.SIGKILL)
        eventually(lambda: has_no_server(var_dir))
        eventually(lambda: not guard_pids(var_dir))
        assert not valkey_socket(var_dir).parent.exists()
        with ensure_valkey(var_dir) as valkey, client(var_dir) as connection:
            assert valkey.started_here
            assert connection.xlen("log") == 100

    def test_without_its_guard_it_stays(self, var_dir, tmp_path):
        """The twin: another server's guard ends it meanwhile, after as many intervals or more."""
        user = killable_holder(var_dir)
        guard = the_guard(var_dir)
        os.kill(guard, signal.SIGKILL)
        end(user, signal.SIGKILL)
        end(killable_holder(tmp_path / "guarded"), signal.SIGKILL)
        eventually(lambda: has_no_server(tmp_path / "guarded"))
        assert is_running(var_dir)

    def test_it_ends_no_server_that_has_a_user(self, var_dir, tmp_path):
        killed, user = killable_holder(var_dir), killable_holder(var_dir)
        end(killed, signal.SIGKILL)
        end(killable_holder(tmp_path / "without"), signal.SIGKILL)
        eventually(lambda: has_no_server(tmp_path / "without"))
        assert is_running(var_dir)
        assert end(user) == 0
        assert not is_running(var_dir)
        eventually(lambda: not guard_pids(var_dir))

    def test_the_next_user_replaces_a_guard_that_was_killed(self, var_dir):
        first = killable_holder(var_dir)
        guard = the_guard(var_dir)
        os.kill(guard, signal.SIGKILL)
        eventually(lambda: "sluicegate-guard" not in connection_names(var_dir))
        second = killable_holder(var_dir)
        for user in (first, second):
            end(user, signal.SIGKILL)
        eventually(lambda: has_no_server(var_dir))

    def test_one_guard_serves_all_users(self, var_dir):
        with ensure_valkey(var_dir), ensure_valkey(var_dir):
            assert connection_names(var_dir).count("sluicegate-guard") == 1
            assert the_guard(var_dir)
        assert not guard_pids(var_dir)

    def test_it_waits_while_a_user_starts(self, var_dir):
        """A user that holds the start lock is not connected yet and must find the server."""
        user = killable_holder(var_dir)
        with lock_file(var_dir / "valkey" / "start.lock") as descriptor:
            assert try_lock(descriptor)
            end(user, signal.SIGKILL)
            eventually(lambda: connection_names(var_dir) == ["", "sluicegate-guard"])
            assert is_running(var_dir)
        eventually(lambda: has_no_server(var_dir))

    def test_a_frozen_server_ends_when_it_continues(self, var_dir, tmp_path):
        user, server = killable_holder(var_dir), server_pid(var_dir)
        os.kill(server, signal.SIGSTOP)
        try:
            end(user, signal.SIGKILL)
            end(killable_holder(tmp_path / "not frozen"), signal.SIGKILL)
            eventually(lambda: has_no_server(tmp_path / "not frozen"))
            with lock_file(var_dir / "valkey" / "start.lock") as descriptor:
                assert try_lock(descriptor)
        finally:
            os.kill(server, signal.SIGCONT)
        eventually(lambda: has_no_server(var_dir))

    def test_users_that_come_while_it_ends_the_server_get_one(self, var_dir):
        """Killed and followed at once, many times: the next user meets the server running, ending or gone."""
        for n in range(9):
            user = killable_holder(var_dir)
            end(user, signal.SIGKILL)
            moment = (lambda: True, lambda: not valkey_socket(var_dir).exists(), lambda: not guard_pids(var_dir))[n % 3]
            eventually(moment, interval=0.001)
            with ensure_valkey(var_dir), client(var_dir) as connection:
                assert connection.incr("users") == n + 1

    def test_its_environment_holds_no_keys(self, var_dir, monkeypatch):
        monkeypatch.setenv("SLUICEGATE_KEY_X", "secret")
        with ensure_valkey(var_dir):
            guard = the_guard(var_dir)
            assert b"secret" not in pathlib.Path(f"/proc/{guard}/environ").read_bytes()
            assert os.getsid(guard) != os.getsid(0)


def connection_names(var_dir):
    with client(var_dir) as connection:
        return sorted(entry["name"] for entry in connection.client_list())


def test_a_server_that_is_killed_leaves_a_socket_that_does_not_wedge_the_next_start(var_dir):
    first = ensure_valkey(var_dir)
    os.kill(server_pid(var_dir), signal.SIGKILL)
    with ensure_valkey(var_dir) as second:
        assert second.started_here
        first.release()  # the hold of a dead server must neither stop its successor nor wait for it
        assert is_running(var_dir)


def test_a_dead_server_is_replaced_for_a_process_that_held_it(var_dir):
    first = hold_valkey(var_dir)
    os.kill(server_pid(var_dir), signal.SIGKILL)
    second = hold_valkey(var_dir)
    assert second is not first
    assert is_running(var_dir)
    first.release()
    second.release()


def test_many_starters_at_once_share_one_server(var_dir):
    holds, errors = [], []

    def start():
        try:
            holds.append(ensure_valkey(var_dir))
        except EmbeddedValkeyError as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert [hold.started_here for hold in holds].count(True) == 1
    for hold in holds:
        hold.release()


def test_processes_that_start_at_once_share_one_server(var_dir):
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "project.runtime.embedded", str(var_dir)], cwd=ROOT, stdout=subprocess.PIPE
        )
        for _ in range(3)
    ]
    try:
        assert all(process.stdout.readline().startswith(b"valkey ready") for process in processes)
        with client(var_dir) as connection:
            holds = [entry["name"] for entry in connection.client_list() if "hold" in entry["name"]]
        assert len(holds) == len(processes)
    finally:
        assert [end(process) for process in processes] == [0, 0, 0]
    assert not is_running(var_dir)


def test_two_servers_never_write_one_data_directory(var_dir, another_tmpdir, monkeypatch):
    """A second TMPDIR hides the socket of the first server: the data lock still sees it."""
    with ensure_valkey(var_dir), monkeypatch.context() as patch:
        patch.setattr(tempfile, "tempdir", another_tmpdir)
        with pytest.raises(EmbeddedValkeyError, match="holds"):
            ensure_valkey(var_dir, timeout_s=0.3)


def test_without_the_data_lock_two_servers_would_share_it(var_dir, another_tmpdir, monkeypatch):
    """The twin: with the lock taken out of the way the second server starts over the first one's files."""
    with ensure_valkey(var_dir), monkeypatch.context() as patch:
        (var_dir / "valkey" / "data.lock").unlink()
        patch.setattr(tempfile, "tempdir", another_tmpdir)
        second = ensure_valkey(var_dir)
        assert second.started_here
        second.release()


def test_two_var_dirs_never_meet(tmp_path):
    with ensure_valkey(tmp_path / "a"), ensure_valkey(tmp_path / "b"):
        with client(tmp_path / "a") as connection:
            connection.set("whose", "a")
        with client(tmp_path / "b") as connection:
            assert connection.get("whose") is None


def test_one_var_dir_by_two_names_is_one(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert valkey_socket(tmp_path / "link") == valkey_socket(tmp_path / "real")


def test_a_deep_var_dir_still_has_a_short_socket(tmp_path):
    deep = tmp_path.joinpath(*["directory-with-a-long-name"] * 8)
    assert len(os.fsencode(valkey_socket(deep))) <= embedded.SOCKET_PATH_LIMIT
    with ensure_valkey(deep):
        assert is_running(deep)


def test_a_temporary_directory_that_is_too_deep_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("x" * 120)))
    with pytest.raises(EmbeddedValkeyError, match="TMPDIR"):
        valkey_socket(tmp_path)


def test_the_socket_is_private(var_dir):
    directory = valkey_socket(var_dir).parent
    directory.mkdir(mode=0o755)
    with ensure_valkey(var_dir) as valkey:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_IMODE(valkey.socket_path.stat().st_mode) == 0o700


def test_a_directory_of_somebody_else_is_refused(var_dir, monkeypatch):
    directory = valkey_socket(var_dir).parent
    directory.mkdir(mode=0o700)
    found = os.geteuid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: found + 1)
        patch.setattr(embedded, "valkey_socket", lambda _: directory / "valkey.sock")
        with pytest.raises(EmbeddedValkeyError, match="does not belong"):
            ensure_valkey(var_dir)


def test_a_link_in_the_place_of_the_directory_is_refused(var_dir, tmp_path):
    directory = valkey_socket(var_dir).parent
    directory.symlink_to(tmp_path)
    with pytest.raises(EmbeddedValkeyError, match="does not belong"):
        ensure_valkey(var_dir)
    directory.unlink()


def test_a_server_that_cannot_start_says_why_in_one_line(var_dir):
    broken = var_dir / "valkey" / "appendonlydir"
    broken.parent.mkdir(parents=True)
    broken.write_text("not a directory")
    started = time.monotonic()
    with pytest.raises(EmbeddedValkeyError, match=r"did not start: .*append") as caught:
        ensure_valkey(var_dir)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - started < 9


def test_a_terminals_interrupt_does_not_reach_it(var_dir):
    with ensure_valkey(var_dir):
        assert os.getsid(server_pid(var_dir)) != os.getsid(0)


def test_its_environment_holds_no_keys(var_dir, monkeypatch):
    monkeypatch.setenv("SLUICEGATE_KEY_X", "secret")
    with ensure_valkey(var_dir):
        assert pathlib.Path(f"/proc/{server_pid(var_dir)}/environ").read_bytes() == b""


def test_without_its_directory_it_is_still_stopped(var_dir):
    valkey = ensure_valkey(var_dir)
    os.rename(var_dir, var_dir.with_name("moved"))
    valkey.release()
    assert not is_running(var_dir)


def test_the_foreground_command_ends_cleanly_on_an_interrupt(var_dir):
    assert end(holder(var_dir), signal.SIGINT) == 0
    assert not is_running(var_dir)


def test_urls_name_the_embedded_server(tmp_path):
    path = valkey_socket(tmp_path)
    assert embedded.redis_url(tmp_path, {}) == f"unix://{path}"
    assert embedded.redis_url(tmp_path, {"REDIS_URL": " "}) == f"unix://{path}"
    assert embedded.broker_url(tmp_path, {}) == f"redis+socket://{path}"


@pytest.mark.parametrize(
    ("given", "broker"),
    [
        ("redis://:secret@queue.example:6379/3", "redis://:secret@queue.example:6379/3"),
        ("rediss://queue.example", "rediss://queue.example"),
        ("unix:///run/valkey.sock?db=2", "redis+socket:///run/valkey.sock?virtual_host=2"),
    ],
)
def test_urls_of_an_outside_server_are_taken_as_they_stand(tmp_path, given, broker):
    assert embedded.redis_url(tmp_path, {"REDIS_URL": given}) == given
    assert embedded.broker_url(tmp_path, {"REDIS_URL": given}) == broker


def test_kombu_reaches_it_through_the_broker_url(var_dir):
    with ensure_valkey(var_dir), BrokerConnection(embedded.broker_url(var_dir, {})) as broker:
        broker.ensure_connection(max_retries=1)
        queue = broker.SimpleQueue("doorbells")
        queue.put({"ring": 1})
        assert queue.get(timeout=5).payload == {"ring": 1}
        queue.close()
