"""`provider`, `tenant`, `key` and `repository`: what they print and how they end (docs/architecture.md, Commands)."""

import subprocess
import sys

import pytest
from django.utils import timezone

from embeddings import registry
from embeddings.models import Provider, Repository, TenantApiKey
from tests.conftest import REPOSITORY_ROOT
from tests.support.commanding import manage
from tests.support.factories import make_generation, make_outcome, make_provider, make_repository, make_run, make_tenant

pytestmark = pytest.mark.django_db

SET_LOCAL = ("provider", "set", "local", "--base-url", "http://127.0.0.1:8089/v1", "--embedding-model", "minilm")


def refused(ended):
    """The one line of a refusal; nothing stands on standard output."""
    assert (ended.status, ended.out) == (2, "")
    assert ended.err.count("\n") == 1
    return ended.err


class TestProvider:
    def test_set_makes_and_changes(self):
        assert manage(*SET_LOCAL, "--chat-model", "smollm2").out == (
            "Provider local made: openai-compatible at http://127.0.0.1:8089/v1.\n"
        )
        assert manage("provider", "set", "local", "--batch-size", "8").out == (
            "Provider local changed: batch_size is now 8.\n"
        )
        assert manage("provider", "set", "local", "--batch-size", "8").out == "Provider local: nothing changed.\n"

    def test_set_of_a_new_model_says_what_follows(self):
        manage(*SET_LOCAL)
        ended = manage("provider", "set", "local", "--embedding-model", "bge")
        assert "next sweep re-embeds" in ended.err

    def test_set_passes_every_budget(self):
        manage(
            *SET_LOCAL,
            *("--embedding-timeout-ms", "1000"),
            *("--query-timeout-ms", "1001"),
            *("--request-timeout-ms", "0"),
            *("--stream-idle-timeout-ms", "-1"),
            *("--stream-first-content-timeout-ms", "1004"),
            *("--stream-keepalive-timeout-ms", "1005"),
            *("--stream-lifetime-ms", "1006"),
            *("--turn-wall-ms", "1007"),
            "--accepts-missing-finish",
        )
        provider = Provider.objects.get()
        assert (provider.embedding_timeout_ms, provider.query_timeout_ms) == (1000, 1001)
        assert (provider.request_timeout_ms, provider.stream_idle_timeout_ms) == (0, -1)
        assert (provider.stream_first_content_timeout_ms, provider.stream_keepalive_timeout_ms) == (1004, 1005)
        assert (provider.stream_lifetime_ms, provider.turn_wall_ms) == (1006, 1007)
        assert provider.accepts_missing_finish
        manage("provider", "set", "local", "--stream-first-content-timeout-ms", "unset")
        assert Provider.objects.get().stream_first_content_timeout_ms is None

    @pytest.mark.parametrize("value", ["0", "-1", "1.5", "NaN", "many", "1_0", "", "٣"])
    def test_nonsense_numbers_are_refused_by_name(self, value):
        ended = manage(*SET_LOCAL, f"--max-in-flight={value}")
        assert "max-in-flight" in refused(ended).replace("_", "-")
        assert not Provider.objects.exists()

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (("provider",), "ACTION"),
            (("provider", "make"), "'make'"),
            (("provider", "set"), "name"),
            ((*SET_LOCAL, "--kind", "vllm"), "'vllm'"),
            ((*SET_LOCAL, "--max-inflight", "1"), "--max-inflight"),
            ((*SET_LOCAL, "--api-key-env", "OPENAI_API_KEY"), "SLUICEGATE_KEY_"),
            (("provider", "set", "local"), "base_url"),
            (("provider", "pause", "local"), "provider set"),
        ],
    )
    def test_usage_is_one_line(self, arguments, named):
        assert named in refused(manage(*arguments))

    def test_list_shows_what_counts(self):
        provider = make_provider(name="local", api_key_env="SLUICEGATE_KEY_X")
        make_generation(provider, dimensions=384)
        make_provider(name="remote", kind="gemini", is_paused=True)
        ended = manage("provider", "list")
        header, local, remote = ended.out.splitlines()
        assert header.split()[:2] == ["name", "kind"]
        assert "384" in local
        assert "SLUICEGATE_KEY_X (not set)" in local
        assert "single lane" in local
        assert "unqueued" in remote
        assert "paused" in remote
        assert "remote: calls are neither queued nor capped" in ended.err

    def test_list_as_json_is_one_object_and_nothing_else(self):
        make_provider(name="local")
        (provider,) = manage("provider", "list", "--json").json["providers"]
        assert provider["name"] == "local"
        assert (provider["embedding_timeout_ms"], provider["admission"]) == (300_000, "single lane")

    def test_list_costs_one_query(self, django_assert_num_queries):
        for _ in range(5):
            make_generation(make_provider())
        with django_assert_num_queries(1):
            manage("provider", "list")

    def test_the_first_says_how_to_begin(self):
        assert "provider set" in manage("provider", "list").out
        assert manage("provider", "list", "--json").json == {"providers": []}

    def test_pause_and_resume(self):
        make_provider(name="local")
        assert manage("provider", "pause", "local").out == "Provider local is paused.\n"
        assert "already" in manage("provider", "pause", "local").out
        assert manage("provider", "resume", "local").out == "Provider local is resumed.\n"
        assert "not paused" in manage("provider", "resume", "local").out


class TestTenant:
    def test_add_is_idempotent(self):
        make_provider(name="local")
        add = ("tenant", "add", "acme", "--embedding-provider", "local")
        assert manage(*add).out == "Tenant acme added.\n"
        assert manage(*add).out == "Tenant acme exists already; nothing changed.\n"

    def test_add_without_a_provider_says_what_is_missing(self):
        assert "no embedding provider yet" in manage("tenant", "add", "acme").err

    def test_unknown_providers_are_refused_with_the_known_ones(self):
        make_provider(name="local")
        assert "There is: local." in refused(manage("tenant", "add", "acme", "--chat-provider", "lokal"))

    def test_set_takes_a_provider_and_gives_it_back(self):
        make_provider(name="local")
        make_tenant(slug="acme", embedding_provider=None)
        ended = manage("tenant", "set", "acme", "--embedding-provider", "local")
        assert ended.out == "Tenant acme: embedding_provider is now local.\n"
        assert "re-embeds its repositories" in ended.err
        assert manage("tenant", "set", "acme", "--embedding-provider", "").out == (
            "Tenant acme: embedding_provider is now none.\n"
        )

    def test_list(self, django_assert_num_queries):
        tenant = make_tenant(slug="acme", embedding_provider=make_provider(name="local"))
        make_repository(tenant)
        make_repository(tenant, removed_at=timezone.now())
        registry.issue_key(tenant)
        with django_assert_num_queries(1):
            (listed,) = manage("tenant", "list", "--json").json["tenants"]
        assert listed == {
            "tenant": "acme",
            "name": "",
            "embedding_provider": "local",
            "chat_provider": None,
            "repositories": 1,
            "keys": 1,
            "is_active": True,
        }
        assert manage("tenant", "list").out.splitlines()[1].split() == ["acme", "-", "local", "-", "1", "1", "active"]


class TestKey:
    def test_the_key_is_the_last_word(self):
        tenant = make_tenant(slug="acme")
        ended = manage("key", "issue", "acme", "--label", "editor", "--scope", "search")
        found = registry.authenticate(ended.out.split()[-1])
        assert found is not None
        assert (found.tenant, found.label, found.scopes) == (tenant, "editor", ["search"])
        assert ended.err == ""

    def test_list_and_revoke(self):
        make_tenant(slug="acme")
        key = manage("key", "issue", "acme").out.split()[-1]
        (listed,) = manage("key", "list", "--tenant", "acme", "--json").json["keys"]
        assert key.split("_")[2] not in str(listed)
        assert TenantApiKey.objects.get().digest not in str(listed)
        assert "is revoked" in manage("key", "revoke", listed["prefix"]).out
        assert "already" in manage("key", "revoke", listed["prefix"]).out
        assert registry.authenticate(key) is None

    def test_unknown_names(self):
        assert "tenant 'acme'" in refused(manage("key", "issue", "acme"))
        assert "key list" in refused(manage("key", "revoke", "sgk_unknown"))
        make_tenant(slug="acme")
        assert "'admin'" in refused(manage("key", "issue", "acme", "--scope", "admin"))


class TestRepository:
    def test_add_is_idempotent_and_refuses_another_source(self, tmp_path):
        make_tenant(slug="acme")
        add = ("repository", "add", "acme", "docs", str(tmp_path), "--include", "*.md", "--include", "docs/")
        assert manage(*add).out == f"Repository acme/docs added from {tmp_path}.\n"
        assert Repository.objects.get().include == ["*.md", "docs/"]
        assert manage(*add).out == "Repository acme/docs exists already; nothing changed.\n"
        ended = manage("repository", "add", "acme", "docs", "https://example.com/docs.git")
        assert "repository set acme docs --source" in refused(ended)

    def test_set(self, tmp_path):
        make_repository(make_tenant(slug="acme"), slug="docs", source=str(tmp_path), include=["*.md"])
        ended = manage("repository", "set", "acme", "docs", "--ref", "main", "--include", "", "--disable")
        assert ended.out.startswith("Repository acme/docs: ref is now main")
        repository = Repository.objects.get()
        assert (repository.ref, repository.include, repository.enabled) == ("main", [], False)

    def test_list(self, django_assert_num_queries):
        tenant = make_tenant(slug="acme")
        run = make_run(tenant.embedding_provider)
        for slug in ("app", "docs"):
            repository = make_repository(tenant, slug=slug)
            make_outcome(run, repository, status="deferred", error_code="KB_SOURCE_TIMEOUT", rows=7)
        make_repository(slug="foreign")
        assert "never swept" in manage("repository", "list").out
        with django_assert_num_queries(2):
            listed = manage("repository", "list", "--tenant", "acme", "--json").json["repositories"]
        assert [(one["repository"], one["last_status"], one["rows"]) for one in listed] == [
            ("app", "deferred", 7),
            ("docs", "deferred", 7),
        ]

    @pytest.mark.parametrize(
        ("arguments", "named"),
        [
            (("repository", "add", "nobody", "docs", "/srv"), "no tenant 'nobody'"),
            (("repository", "add", "acme", "docs"), "source"),
            (("repository", "add", "acme", "docs", "ext::sh"), "source"),
            (("repository", "add", "acme", "docs", "/srv", "--cadence-minutes", "0"), "--cadence-minutes"),
            (("repository", "remove", "acme", "docs"), "no repository of tenant acme 'docs'"),
        ],
    )
    def test_usage_is_one_line(self, arguments, named):
        make_tenant(slug="acme")
        assert named in refused(manage(*arguments))


class TestTheCommandLine:
    @pytest.mark.django_db(transaction=True)
    def test_a_refusal_is_one_line_and_exit_status_2(self, process_environment):
        for arguments in (("provider", "set", "local", "--max-in-flight", "1.5"), ("tenant", "remove", "acme")):
            ended = subprocess.run(
                [sys.executable, "manage.py", *arguments],
                cwd=REPOSITORY_ROOT,
                env=process_environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert (ended.returncode, ended.stdout) == (2, "")
            assert ended.stderr.count("\n") == 1, ended.stderr

    def test_help_has_examples(self, capsys):
        assert manage("provider", "set", "--help").status == 0
        assert "manage.py provider set local --base-url" in capsys.readouterr().out
