"""`manage.py doctor`: what it finds, what it advises, and that it does nothing else (docs/architecture.md, Commands)."""

import json
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta

import pytest
from django.utils import timezone

from embeddings.doctor.findings import Check, Status, examine, ok
from embeddings.doctor.installation import check_database, check_git, check_var_dir
from embeddings.doctor.providers import check_providers, check_servers
from embeddings.doctor.sweeps import check_repositories, check_runs, check_tenants
from embeddings.doctor.valkey import check_queues
from embeddings.models import RunCircuit
from embeddings.registry import issue_key
from embeddings.runtime import workers
from embeddings.states import CircuitState, OutcomeStatus, RunStatus, TaskState
from streaming.doctor import check_turns
from streaming.models import ChatTurn
from streaming.states import TurnState
from tests.conftest import REPOSITORY_ROOT
from tests.support.commanding import manage
from tests.support.factories import make_outcome, make_provider, make_repository, make_run, make_task, make_tenant
from tests.support.provider_server import ProviderServer, hang, status, unused_address, unused_port
from tests.support.waiting import eventually

AN_HOUR = timedelta(hours=1)


def doctor(environ, *arguments):
    """`manage.py doctor` as a process of its own."""
    command = [sys.executable, "manage.py", "doctor", *arguments]
    return subprocess.run(command, cwd=REPOSITORY_ROOT, env=environ, capture_output=True, text=True, timeout=60)


def found(*checks):
    """Their findings by name."""
    return {finding.name: finding for finding in examine(checks)}


def by_name(ended):
    return {check["name"]: check for check in json.loads(ended.stdout)["checks"]}


# --- how checks are run -----------------------------------------------------------------------------------------------
def test_a_check_that_raises_and_one_that_hangs_are_lines_and_spoil_no_other():
    let_go = threading.Event()
    checks = [
        Check("broken", lambda: 1 / 0),
        Check("stuck", lambda: [ok("stuck", str(let_go.wait(30)))], bound_s=0.1),
        Check("sound", lambda: [ok("sound", "as it should be")]),
    ]
    began = time.monotonic()
    broken, stuck, sound = examine(checks)
    assert time.monotonic() - began < 10
    assert (broken.status, broken.detail) == (Status.ERROR, "could not be looked at: ZeroDivisionError")
    assert (stuck.status, stuck.detail) == (Status.ERROR, "no answer within 0.1 s")
    assert sound.status == Status.OK
    let_go.set()


# --- the command ------------------------------------------------------------------------------------------------------
def test_a_fresh_installation_is_told_what_is_missing(tmp_path):
    ended = doctor(os.environ | {"VAR_DIR": str(tmp_path)})
    assert (ended.returncode, ended.stderr) == (1, "Unwell: 1 error.\n")
    heads, *lines = ended.stdout.splitlines()
    at = heads.index("finding")
    assert all(line[at - 2 : at] == "  " for line in lines)
    (line,) = (line for line in lines if line.startswith("error"))
    assert line.split()[:3] == ["error", "database", "answers;"]
    assert lines[lines.index(line) + 1].strip() == "-> manage.py migrate"
    assert sum(line.startswith("warning  queue") for line in lines) == 4
    assert "Traceback" not in ended.stdout + ended.stderr


def test_with_warnings_alone_it_is_well(process_environment, tmp_path):
    ended = doctor(process_environment | {"VAR_DIR": str(tmp_path)}, "--json")
    assert (ended.returncode, ended.stderr) == (0, "")
    said = json.loads(ended.stdout)
    assert said["ok"] is True
    assert {frozenset(check) for check in said["checks"]} == {frozenset({"name", "status", "detail", "advice"})}
    checks = by_name(ended)
    assert checks["database"]["status"] == "ok"
    assert checks["providers"]["status"] == checks["tenants"]["status"] == checks["queue chat"]["status"] == "warning"


def test_what_is_down_is_named_without_its_password_and_the_rest_is_still_looked_at(tmp_path):
    environ = os.environ | {
        "VAR_DIR": str(tmp_path),
        "DATABASE_URL": f"postgres://someone:hunter2@127.0.0.1:{unused_port()}/sluicegate",
        "REDIS_URL": f"redis://:hunter2@127.0.0.1:{unused_port()}/0",
        "LEASE_MS": "1000",
        "LEASE_RENEW_MS": "1000",
    }
    ended = doctor(environ, "--json", "--providers")
    assert ended.returncode == 1
    checks = by_name(ended)
    broken = {name for name, check in checks.items() if check["status"] == "error"}
    assert broken == {"sluicegate.E001", "database", "valkey"}
    assert {"settings", "VAR_DIR", "git"} == set(checks) - broken
    assert "REDIS_URL" in checks["valkey"]["advice"]
    assert "hunter2" not in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr


def test_what_it_does_not_know_is_usage():
    assert manage("doctor", "--everything").status == 2


# --- the ground -------------------------------------------------------------------------------------------------------
@pytest.mark.both_databases
def test_the_database_answers_and_has_its_vector_search(transactional_db):
    assert [finding.status for finding in examine([check_database])] == [Status.OK, Status.OK]


def test_a_folder_that_cannot_be_written(settings, tmp_path):
    settings.VAR_DIR = tmp_path / "gone"
    assert found(check_var_dir)["VAR_DIR"].status == Status.ERROR
    settings.VAR_DIR = tmp_path
    assert "GiB are free" in found(check_var_dir)["VAR_DIR"].detail


def test_git_that_is_not_there(monkeypatch, tmp_path):
    assert found(check_git)["git"].detail.startswith("git version")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert found(check_git)["git"].status == Status.ERROR


# --- workers ----------------------------------------------------------------------------------------------------------
def test_a_queue_that_no_worker_takes_is_named_with_the_line_that_starts_one(chat_stack):
    queues = found(check_queues)
    assert queues["queue chat"].status == Status.OK
    for name in ("queue sweeps", "queue embeddings", "queue housekeeping"):
        assert (queues[name].status, queues[name].detail) == (Status.ERROR, "no worker takes it")
        assert queues[name].advice == "celery -A project worker -Q sweeps,embeddings,housekeeping -P threads -c 16"


def test_a_worker_answers_and_one_that_stands_still_does_not(fleet):
    (worker,) = fleet.start()
    assert eventually(lambda: workers.takers("sweeps", 0.5)) == 1
    worker.pause()
    assert workers.takers("sweeps", 0.5) == 0


# --- model servers ----------------------------------------------------------------------------------------------------
@pytest.fixture
def server():
    with ProviderServer() as server:
        yield server


SCRIPTED = {"embedding_model": "scripted-embedding", "chat_model": "scripted-chat"}


def test_no_model_server_is_called_unless_it_is_asked_for(transactional_db, server):
    make_provider(name="local", base_url=server.openai_url, **SCRIPTED)
    manage("doctor", "--json")
    assert server.connections_accepted == 0
    assert '"server of local"' in manage("doctor", "--json", "--providers").out
    assert [(call.method, call.path) for call in server.calls] == [("GET", "/v1/models")]


@pytest.mark.parametrize(
    ("kind", "root", "path"),
    [
        ("openai-compatible", "openai_url", "/v1/models"),
        ("ollama", "address", "/api/tags"),
        ("gemini", "gemini_url", "/v1beta/models"),
    ],
)
def test_each_kind_lists_its_models(transactional_db, server, monkeypatch, kind, root, path):
    monkeypatch.setenv("SLUICEGATE_KEY_X", "hunter2")
    values = SCRIPTED | {"kind": kind, "base_url": getattr(server, root), "api_key_env": "SLUICEGATE_KEY_X"}
    provider = make_provider(name="local", **values)
    line = found(check_servers)["server of local"]
    assert (line.status, line.detail) == (Status.OK, "answers, and lists scripted-embedding, scripted-chat")
    provider.chat_model = "another"
    provider.save()
    line = found(check_servers)["server of local"]
    assert (line.status, line.detail) == (Status.WARNING, "answers, and does not list another")
    assert {call.path for call in server.calls} == {path}


def test_servers_that_do_not_answer_as_they_should(transactional_db, server):
    def script(call):
        if "slow" in call.path:
            return hang()
        return status(int(call.path.split("/")[1]), b'{"error": {"message": "no"}}')

    server.script(script)
    make_provider(name="away", base_url=f"{unused_address()}/v1")
    make_provider(name="slow", base_url=f"{server.address}/slow")
    make_provider(name="closed", base_url=f"{server.address}/401")
    make_provider(name="listless", base_url=f"{server.address}/404")
    make_provider(name="strange", base_url=f"{server.address}/200")
    make_provider(name="keyless", base_url=f"{server.address}/500", api_key_env="SLUICEGATE_KEY_NONE")
    began = time.monotonic()
    lines = found(check_servers)
    assert time.monotonic() - began < 10
    said = {name: (line.status, line.detail.split(":")[0]) for name, line in lines.items()}
    assert said == {
        "server of away": (Status.ERROR, "PROVIDER_UNREACHABLE"),
        "server of slow": (Status.ERROR, "OPENAI_COMPATIBLE_REQUEST_TIMEOUT"),
        "server of closed": (Status.ERROR, "PROVIDER_UNAUTHORIZED"),
        "server of listless": (Status.WARNING, "answers at http"),
        "server of strange": (Status.ERROR, "PROVIDER_REPLY_REFUSED"),
        "server of keyless": (Status.ERROR, "PROVIDER_CONFIGURATION"),
    }
    assert len(server.calls) == 4


@pytest.mark.both_databases
def test_a_key_is_told_of_by_its_variables_name_alone(transactional_db, monkeypatch):
    make_provider(name="local", api_key_env="SLUICEGATE_KEY_X")
    line = found(check_providers)["key of provider local"]
    assert (line.status, line.detail) == (Status.ERROR, "SLUICEGATE_KEY_X is not set here")
    monkeypatch.setenv("SLUICEGATE_KEY_X", "hunter2")
    lines = found(check_providers)
    assert lines["key of provider local"].status == Status.OK
    assert "hunter2" not in str(lines)


@pytest.mark.both_databases
def test_a_lane_that_nobody_drains(transactional_db):
    provider = make_provider(name="local")
    outcome = make_outcome(make_run(provider))
    task = make_task(outcome, queued_at=timezone.now() - AN_HOUR)
    line = found(check_providers)["provider local"]
    assert line.status == Status.WARNING
    assert "0 at the server, 1 queued, the oldest for 3600 s: no worker sends them" in line.detail
    assert "-Q sweeps,embeddings,housekeeping" in line.advice
    task.state = TaskState.DISPATCHED
    task.save()
    make_task(outcome, queued_at=timezone.now() - AN_HOUR)
    assert found(check_providers)["provider local"].status == Status.OK
    provider.is_paused = True
    provider.save()
    assert found(check_providers)["provider local"].advice == "manage.py provider resume local"


@pytest.mark.both_databases
def test_a_run_that_stalled_is_told_of_until_the_next_one(transactional_db):
    provider = make_provider(name="local")
    run = make_run(provider, status=RunStatus.DEGRADED)
    RunCircuit.objects.filter(run=run).update(
        state=CircuitState.OPEN, opened_by="acme/docs", source_error_code="ETIMEDOUT"
    )
    line = found(check_providers)["last run on local"]
    assert (line.status, "acme/docs (ETIMEDOUT)" in line.detail) == (Status.WARNING, True)
    make_run(provider)
    assert "last run on local" not in found(check_providers)


# --- rows -------------------------------------------------------------------------------------------------------------
@pytest.mark.both_databases
def test_a_run_that_nobody_attends(transactional_db):
    make_run()
    assert {line.status for line in found(check_runs).values()} == {Status.OK}
    run = make_run(alive_until=timezone.now() - AN_HOUR)
    lines = found(check_runs)
    line = lines[f"run {str(run.public_id)[:8]}"]
    assert (line.status, line.advice[:15]) == (Status.WARNING, "manage.py sweep")
    assert lines["runs"].detail == "1 at work"


@pytest.mark.both_databases
def test_repositories_that_keep_failing_and_those_that_are_overdue(transactional_db):
    tenant = make_tenant(slug="acme")
    make_repository(tenant, slug="sound", next_due_at=timezone.now() + AN_HOUR)
    assert [line.status for line in examine([check_repositories])] == [Status.OK]
    failing = make_repository(tenant, slug="docs", consecutive_failures=3, next_due_at=timezone.now() - AN_HOUR)
    run = make_run(tenant.embedding_provider, status=RunStatus.FAILED)
    make_outcome(run, failing, status=OutcomeStatus.FAILED, error_code="KB_SOURCE_UNREACHABLE")
    lines = found(check_repositories)
    assert lines["repository acme/docs"].detail == "failed (KB_SOURCE_UNREACHABLE), 3 failures in a row"
    assert lines["repository acme/docs"].advice == f"manage.py runs show {str(run.public_id)[:8]}"
    assert lines["schedule"].detail.startswith("1 overdue, acme/docs the longest, since")
    make_outcome(make_run(tenant.embedding_provider), failing)
    assert "schedule" not in found(check_repositories)


@pytest.mark.both_databases
def test_tenants_that_lack_something(transactional_db):
    whole = make_tenant(slug="whole", chat_provider=make_provider())
    issue_key(whole)
    make_tenant(slug="bare", embedding_provider=None)
    make_tenant(slug="gone", embedding_provider=None, is_active=False)
    advice = [line.advice for line in examine([check_tenants]) if line.status == Status.WARNING]
    assert advice == [
        "manage.py tenant set bare --embedding-provider NAME",
        "manage.py tenant set bare --chat-provider NAME",
        "manage.py key issue bare",
    ]


@pytest.mark.both_databases
def test_turns_that_wait_and_turns_that_are_lost(transactional_db):
    tenant = make_tenant()
    facts = {"tenant": tenant, "provider": tenant.embedding_provider, "model": "chat", "request": {}}
    fresh = ChatTurn.objects.create(**facts)
    assert [line.status for line in examine([check_turns])] == [Status.OK]
    ChatTurn.objects.create(**facts, created_at=timezone.now() - AN_HOUR)
    (line,) = examine([check_turns])
    assert (line.status, line.advice) == (Status.ERROR, "celery -A project worker -Q chat -P threads -c 256")
    ChatTurn.objects.exclude(pk=fresh.pk).update(state=TurnState.RUNNING, lease_expires_at=timezone.now() - AN_HOUR)
    (line,) = examine([check_turns])
    assert (line.status, line.detail[:9]) == (Status.WARNING, "1 at work")
