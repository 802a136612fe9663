"""`sweep`, `search`, `runs` and `rows`: what they print and how they end (docs/architecture.md, Commands)."""

import json
import os
import pty
import signal
import socket
import subprocess
import sys

import pytest

from embeddings import codes
from embeddings.models import EmbeddingTask, KnowledgeRow, TenantRun
from embeddings.reports import run_facts
from embeddings.runs import follow
from embeddings.states import OutcomeStatus, RunStatus, TaskState
from tests.conftest import REPOSITORY_ROOT
from tests.support.commanding import manage
from tests.support.factories import make_outcome, make_repository, make_row, make_run, make_tenant, make_version
from tests.support.provider_server import Gate, containing, gated, hang, status
from tests.support.waiting import eventually

OUTCOME_KEYS = {
    *("tenant", "repository", "status", "error_code", "source_error_code", "provider_calls", "files", "rows"),
    *("embedded", "reused", "pending", "deleted", "undeliverable", "skipped", "seconds"),
}
CIRCUIT_KEYS = {"state", "reason_code", "source_error_code", "opened_by"}


@pytest.fixture(autouse=True)
def _step_in_soon(monkeypatch):
    monkeypatch.setattr(follow, "STEP_IN_AFTER_S", 0.05)


@pytest.fixture
def run_manage(process_environment):
    """Starts `manage.py` as a process of its own."""
    started = []

    def start(*arguments, **options):
        command = [sys.executable, "manage.py", *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": process_environment}
        started.append(subprocess.Popen(command, cwd=REPOSITORY_ROOT, **pipes | options))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe:
                pipe.close()


class TestSweep:
    def test_prints_the_outcomes_and_then_says_unchanged(self, stage):
        stage.repository("docs", "alpha", "beta")
        ended = manage("sweep")
        assert ended.status == 0, ended.err
        header, line = ended.out.splitlines()
        assert header.split()[:3] == ["repository", "outcome", "files"]
        assert line.split()[:5] == [f"{stage.tenant}/docs", "succeeded", "2", "2", "2"]
        assert f"{stage.tenant}/docs: succeeded" in ended.err
        calls = len(stage.server.embedding_calls)
        again = manage("sweep")
        assert (again.status, again.out.splitlines()[1].split()[1]) == (0, "unchanged")
        assert len(stage.server.embedding_calls) == calls

    def test_as_json_is_one_object_and_nothing_else(self, stage):
        stage.repository("docs", "alpha")
        ended = manage("sweep", "--json")
        (run,) = ended.json["runs"]
        assert {"id", "provider", "status", "circuit", "provider_calls", "outcomes"} <= run.keys()
        assert run["circuit"].keys() == CIRCUIT_KEYS
        (outcome,) = run["outcomes"]
        assert outcome.keys() >= OUTCOME_KEYS
        assert (outcome["status"], outcome["rows"], outcome["embedded"]) == ("succeeded", 1, 1)
        assert (run["status"], run["circuit"]["state"], run["provider_calls"]) == ("completed", "closed", 1)

    def test_a_dead_provider_is_called_once_and_the_rest_is_spared(self, stage):
        stage.server.when(containing("alpha"), hang())
        stage.repository("a-docs", "alpha")
        stage.repository("b-app", "beta")
        ended = manage("sweep", "--json", "--concurrency", "1")
        (run,) = ended.json["runs"]
        stalled, spared = run["outcomes"]
        assert ended.status == 3
        assert (run["circuit"]["state"], run["circuit"]["opened_by"]) == ("open", f"{stage.tenant}/a-docs")
        assert (stalled["status"], stalled["error_code"]) == ("deferred", codes.PROVIDER_TIMED_OUT)
        assert (spared["status"], spared["error_code"]) == ("deferred", codes.CIRCUIT_OPEN)
        assert (stalled["provider_calls"], spared["provider_calls"]) == (1, 0)

    def test_an_open_circuit_is_told_as_a_story(self, stage):
        stage.server.when(containing("alpha"), hang())
        stage.repository("a-docs", "alpha")
        stage.repository("b-app", "beta")
        ended = manage("sweep", "--concurrency", "1")
        assert f"timed out on {stage.tenant}/a-docs (OPENAI_COMPATIBLE_REQUEST_TIMEOUT)" in ended.err
        assert "1 further repositories were spared" in ended.err
        (run,) = TenantRun.objects.all()
        assert "1 further repositories were spared" in manage("runs", "show", str(run.public_id)).out

    def test_a_failure_ends_with_1(self, stage):
        stage.server.when(containing("alpha"), status(401))
        stage.repository("docs", "alpha")
        ended = manage("sweep")
        assert ended.status == 1
        assert "PROVIDER_UNAUTHORIZED" in ended.out

    def test_one_run_for_each_provider(self, stage, tmp_path):
        stage.repository("docs", "alpha")
        unreachable = make_tenant()
        make_repository(unreachable, source=str(tmp_path / "nowhere"))
        ended = manage("sweep", "--json")
        assert ended.status == 3
        assert {run["provider"] for run in ended.json["runs"]} == {
            stage.provider.name,
            unreachable.embedding_provider.name,
        }

    def test_what_another_run_has_is_skipped(self, stage):
        repository = stage.repository("docs", "alpha")
        make_outcome(make_run(stage.provider), repository)
        ended = manage("sweep", "--detach", "--json")
        (outcome,) = ended.json["runs"][0]["outcomes"]
        assert (outcome["status"], outcome["error_code"]) == ("skipped", codes.REPOSITORY_BUSY)

    def test_selects(self, stage):
        stage.repository("docs", "alpha")
        stage.repository("app", "beta")
        ended = manage("sweep", "--repository", f"{stage.tenant}/app", "--json")
        assert [outcome["repository"] for outcome in ended.json["runs"][0]["outcomes"]] == ["app"]

    def test_detached_it_leaves_the_work_to_the_workers(self, stage):
        stage.repository("docs", "alpha")
        ended = manage("sweep", "--detach")
        run = TenantRun.objects.get()
        assert (ended.status, run.status) == (0, RunStatus.QUEUED)
        assert f"Run {run_facts.short_id(run)} started" in ended.out
        assert not stage.server.embedding_calls

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            ((), "tenant add"),
            (("--tenant", "nobody"), "no tenant 'nobody'"),
            (("--repository", "docs"), "tenant/repository"),
            (("--concurrency", "0"), "--concurrency"),
            (("--concurrency", "1.5"), "--concurrency"),
            (("--everything",), "--everything"),
        ],
    )
    @pytest.mark.django_db
    def test_usage_is_one_line_and_starts_nothing(self, arguments, named):
        ended = manage("sweep", *arguments)
        assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1)
        assert named in ended.err
        assert not TenantRun.objects.exists()

    @pytest.mark.parametrize(
        ("statuses", "expected"),
        [
            ([], 0),
            (["succeeded", "unchanged"], 0),
            (["succeeded", "deferred"], 3),
            (["skipped"], 3),
            (["cancelled"], 3),
            (["deferred", "failed"], 1),
            (["interrupted", "succeeded"], 1),
        ],
    )
    def test_exit_statuses(self, statuses, expected):
        assert run_facts.exit_status(statuses) == expected


def test_a_database_that_cannot_be_reached_is_no_mistake_of_the_caller(run_manage, process_environment):
    """Exit status 2 would tell a scheduler that its command line is wrong."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    environ = process_environment | {"DATABASE_URL": f"postgres://sluicegate@127.0.0.1:{port}/none"}
    command = run_manage("sweep", "--json", env=environ)
    out, err = command.communicate(timeout=60)
    assert (command.returncode, out, len(err.splitlines())) == (4, "", 1), err
    assert "the database cannot be used" in err


class TestInterrupting:
    @pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
    def test_cancels_the_run_keeps_what_is_stored_and_the_next_sweep_goes_on(self, stage, run_manage, how):
        repository = stage.repository("docs", *(f"text {number}" for number in range(8)))
        gate = Gate()
        stage.server.when(containing("text 7"), gated(gate))
        process = run_manage("sweep", "--json")
        gate.wait_arrived(timeout=40)
        eventually(lambda: KnowledgeRow.objects.filter(repository=repository, vector__isnull=False).count() == 4)
        process.send_signal(how)
        out, err = process.communicate(timeout=40)
        assert process.returncode == 130, err
        assert "Cancelling" in err
        assert json.loads(out)["runs"][0]["status"] == "cancelled"
        run = TenantRun.objects.get()
        assert (run.status, run.outcomes.get().status) == (RunStatus.CANCELLED, OutcomeStatus.CANCELLED)
        assert not EmbeddingTask.objects.filter(state=TaskState.QUEUED).exists()
        gate.release()
        again = manage("sweep", "--json")
        (outcome,) = again.json["runs"][0]["outcomes"]
        assert (again.status, outcome["status"], outcome["embedded"]) == (0, "succeeded", 4)

    def test_reaches_a_scan_whose_source_never_answers(self, stage, run_manage):
        with socket.create_server(("127.0.0.1", 0)) as silent:
            source = f"https://127.0.0.1:{silent.getsockname()[1]}/docs.git"
            outcomes = make_repository(stage.tenant, source=source).outcomes
            process = run_manage("sweep")
            eventually(lambda: outcomes.filter(status=OutcomeStatus.SCANNING).exists(), timeout=40)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=20)
        assert process.returncode == 130, err
        assert outcomes.get().status == OutcomeStatus.CANCELLED

    def test_leaving_without_cancelling_would_leave_the_repository_taken(self, stage):
        """The twin: what Ctrl-C is there to prevent."""
        repository = stage.repository("docs", "alpha")
        stage.start(repository)
        ended = manage("sweep", "--detach", "--json")
        assert ended.json["runs"][0]["outcomes"][0]["error_code"] == codes.REPOSITORY_BUSY


class TestATerminal:
    def test_shows_a_bar_for_each_repository_and_a_table(self, stage, run_manage):
        stage.repository("docs", "alpha")
        ours, theirs = pty.openpty()
        process = run_manage("sweep", stdout=theirs, stderr=theirs)
        os.close(theirs)
        shown = _read_all(ours)
        assert process.wait(timeout=40) == 0, shown
        assert f"{stage.tenant}/docs" in shown
        assert "━" in shown
        assert "succeeded" in shown


class TestSearch:
    def test_answers_with_place_and_text(self, stage):
        stage.repository("docs", "alpha", "beta")
        manage("sweep")
        ended = manage("search", str(stage.tenant), "beta", "--limit", "1")
        assert ended.status == 0, ended.err
        assert ended.out.startswith("docs 001.txt:1-1")
        assert "    beta" in ended.out
        (result,) = manage("search", str(stage.tenant), "beta", "--limit", "1", "--json").json["results"]
        assert result.keys() == {"repository", "path", "start_line", "end_line", "score", "text"}
        assert (result["path"], result["text"], round(result["score"], 3)) == ("001.txt", "beta", 1.0)

    def test_sees_nothing_of_another_tenant(self, stage):
        other = make_tenant(embedding_provider=stage.provider)
        stage.repository("docs", "alpha")
        stage.repository("docs", "secret", tenant=other)
        manage("sweep")
        assert [hit["text"] for hit in manage("search", str(stage.tenant), "secret", "--json").json["results"]] == [
            "alpha"
        ]

    def test_a_provider_that_fails_ends_it_with_1_and_one_line(self, stage):
        stage.repository("docs", "alpha")
        manage("sweep")
        stage.server.when(containing("question"), status(401))
        ended = manage("search", str(stage.tenant), "question")
        assert (ended.status, ended.out) == (1, "")
        assert "PROVIDER_UNAUTHORIZED" in ended.err

    @pytest.mark.django_db
    def test_usage(self):
        assert "no tenant 'acme'" in manage("search", "acme", "words").err
        make_tenant(slug="acme")
        assert "Nothing found" in manage("search", "acme", "words").out
        for arguments in ((" ",), ("words", "--limit", "0"), ("words", "--limit", "1000000")):
            ended = manage("search", "acme", *arguments)
            assert (ended.status, ended.out, ended.err.count("\n")) == (2, "", 1), arguments


@pytest.mark.django_db
class TestRuns:
    def test_list(self, django_assert_max_num_queries):
        assert "manage.py sweep" in manage("runs", "list").out
        first, second = make_run(), make_run(status=RunStatus.DEGRADED)
        for run in (first, second):
            make_outcome(run, status=OutcomeStatus.FAILED)
            make_outcome(run, status=OutcomeStatus.DEFERRED, error_code=codes.CIRCUIT_OPEN)
        with django_assert_max_num_queries(1):
            listed = manage("runs", "list", "--json").json["runs"]
        assert [run["id"] for run in listed] == [str(second.public_id), str(first.public_id)]
        assert (listed[0]["outcomes"], listed[0]["spared"], listed[0]["failed"]) == (2, 1, 1)
        assert len(manage("runs", "list", "--limit", "1").out.splitlines()) == 2
        (only,) = manage("runs", "list", "--status", "degraded", "--json").json["runs"]
        assert only["id"] == str(second.public_id)
        assert manage("runs", "list", "--provider", first.provider.name, "--json").json["runs"][0] == listed[1]

    def test_show_takes_the_beginning_of_an_id(self):
        run = make_run()
        outcome = make_outcome(run, status=OutcomeStatus.UNCHANGED)
        ended = manage("runs", "show", run_facts.short_id(run))
        assert str(run.public_id) in ended.out
        assert str(outcome) in ended.out
        assert manage("runs", "show", str(run.public_id), "--json").json["id"] == str(run.public_id)

    @pytest.mark.parametrize("name", ["", "zz", "00000000-0000", "%", "' or 1=1"])
    def test_unknown_runs(self, name):
        make_run()
        ended = manage("runs", "show", name)
        assert (ended.status, ended.err.count("\n")) == (2, 1)

    def test_an_ambiguous_beginning(self):
        for run in (make_run(), make_run()):
            TenantRun.objects.filter(pk=run.pk).update(public_id=f"aaaaaaaa-0000-4000-8000-{run.pk:012d}")
        ended = manage("runs", "show", "aaaaaaaa")
        assert (ended.status, "More than one run" in ended.err) == (2, True)

    def test_cancel(self):
        run = make_run()
        outcomes = [make_outcome(run), make_outcome(run)]
        name = str(outcomes[0])
        assert f"{name} is cancelled" in manage("runs", "cancel", str(run.public_id), "--repository", name).out
        for outcome in outcomes:
            outcome.refresh_from_db()
        assert [outcome.status for outcome in outcomes] == [OutcomeStatus.CANCELLED, OutcomeStatus.PENDING]
        assert manage("runs", "cancel", str(run.public_id), "--repository", "x/y").status == 2
        assert "embedded rows are kept" in manage("runs", "cancel", str(run.public_id)).out
        run.refresh_from_db()
        assert run.status == RunStatus.CANCELLED
        assert "already" in manage("runs", "cancel", str(run.public_id)).out


@pytest.mark.django_db
class TestRows:
    @pytest.fixture
    def refused(self):
        repository = make_repository(make_tenant(slug="acme"), slug="docs")
        version = make_version(repository, make_run(repository.tenant.embedding_provider).generation, path="a.py")
        make_row(version)
        return make_row(version, text="a\x1b[31m b", start_line=3, end_line=4, undeliverable_reason="400: too long")

    def test_undeliverable(self, refused):
        line = manage("rows", "undeliverable", "--tenant", "acme").out.splitlines()[1]
        assert line.split()[:2] == ["acme/docs", "a.py:3-4"]
        assert "400: too long" in line
        assert "\x1b" not in line
        (row,) = manage("rows", "undeliverable", "--json").json["rows"]
        assert (row["path"], row["start_line"], row["reason"]) == ("a.py", 3, "400: too long")
        make_tenant(slug="globex")
        assert manage("rows", "undeliverable", "--tenant", "globex").out == "No undeliverable row.\n"

    def test_retry(self, refused):
        assert manage("rows", "retry", "--repository", "acme/docs").out.startswith("1 rows are tried again")
        refused.refresh_from_db()
        assert refused.undeliverable_reason == ""
        assert "nothing to retry" in manage("rows", "retry").out
        assert "no tenant 'x'" in manage("rows", "retry", "--tenant", "x").err


def _read_all(descriptor):
    """What a terminal shows until its last writer has left."""
    shown = b""
    while True:
        try:
            part = os.read(descriptor, 65536)
        except OSError:  # Linux says EIO where another system says end of file.
            part = b""
        if not part:
            os.close(descriptor)
            return shown.decode()
        shown += part
