"""The registry's verbs: what they store, and what they refuse (docs/architecture.md, Data and states, Commands)."""

import pytest
from django.utils import timezone

from embeddings import registry
from embeddings.errors import UsageError
from embeddings.models import Provider, Repository, TenantApiKey
from embeddings.registry.base_url import normalise_base_url, same_server
from embeddings.states import OutcomeStatus
from tests.support.factories import (
    make_generation,
    make_outcome,
    make_provider,
    make_repository,
    make_row,
    make_run,
    make_tenant,
    make_version,
)

pytestmark = [pytest.mark.django_db, pytest.mark.both_databases]

URL = "http://127.0.0.1:8089/v1"


def set_local(**values):
    return registry.set_provider("local", {"base_url": URL, "embedding_model": "minilm"} | values)


class TestProviders:
    def test_made_with_the_defaults_of_the_budget_table(self):
        change = set_local()
        provider = Provider.objects.get(name="local")
        assert change.created
        assert change.notes == ()
        assert (provider.kind, provider.max_in_flight, provider.batch_size) == ("openai-compatible", 1, 32)
        assert (provider.embedding_timeout_ms, provider.query_timeout_ms) == (300_000, 15_000)
        assert (provider.request_timeout_ms, provider.stream_idle_timeout_ms) == (120_000, 120_000)
        assert (provider.stream_first_content_timeout_ms, provider.stream_lifetime_ms) == (None, 900_000)

    def test_set_again_changes_only_what_is_given(self):
        set_local(batch_size=8)
        change = registry.set_provider("local", {"chat_model": "smollm2"})
        provider = Provider.objects.get(name="local")
        assert (change.created, change.changed) == (False, ("chat_model",))
        assert (provider.batch_size, provider.chat_model, provider.embedding_model) == (8, "smollm2", "minilm")

    def test_set_again_leaves_what_the_lane_writes_alone(self):
        set_local()
        busy = timezone.now()
        stale = Provider.objects.get(name="local")
        Provider.objects.update(busy_until=busy, is_paused=True)
        stale.batch_size = 8
        registry.save_provider(stale, ("batch_size",))
        provider = Provider.objects.get(name="local")
        assert (provider.busy_until, provider.is_paused, provider.batch_size) == (busy, True, 8)

    def test_every_change_is_a_new_revision_and_no_change_is_none(self):
        set_local()
        first = Provider.objects.get(name="local").revision
        set_local()
        assert Provider.objects.get(name="local").revision == first
        set_local(batch_size=4)
        assert Provider.objects.get(name="local").revision == first + 1

    def test_a_new_server_starts_without_what_was_learned_of_the_old_one(self):
        set_local()
        Provider.objects.update(refuses_base64=True, busy_until=timezone.now())
        set_local(base_url="http://127.0.0.1:9000/v1")
        provider = Provider.objects.get(name="local")
        assert (provider.refuses_base64, provider.busy_until) == (False, None)

    def test_a_new_embedding_model_says_that_the_next_sweep_re_embeds(self):
        set_local()
        change = set_local(embedding_model="bge")
        assert change.changed == ("embedding_model",)
        assert "next sweep re-embeds" in change.notes[0]

    @pytest.mark.parametrize(
        ("values", "retried"),
        [({"batch_size": 4}, True), ({"embedding_model": "bge"}, True), ({"query_timeout_ms": 5_000}, False)],
    )
    def test_a_new_model_or_limit_has_refused_texts_tried_again(self, values, retried):
        provider = set_local().provider
        repository = make_repository(make_tenant(embedding_provider=provider))
        row = make_row(make_version(repository, make_generation(provider)), undeliverable_reason="400: too long")
        other = make_repository()
        foreign = make_row(
            make_version(other, make_generation(other.tenant.embedding_provider)), undeliverable_reason="400"
        )
        change = set_local(**values)
        row.refresh_from_db()
        foreign.refresh_from_db()
        assert (row.undeliverable_reason == "") is retried
        assert ("1 undeliverable rows are tried again by the next sweep." in change.notes) is retried
        assert foreign.undeliverable_reason == "400"

    @pytest.mark.parametrize(
        ("values", "named"),
        [
            ({"max_in_flight": 0}, "max_in_flight"),
            ({"max_in_flight": -1}, "max_in_flight"),
            ({"max_in_flight": 1.5}, "max_in_flight"),
            ({"max_in_flight": float("nan")}, "max_in_flight"),
            ({"max_in_flight": "many"}, "max_in_flight"),
            ({"max_in_flight": "1"}, "max_in_flight"),
            ({"max_in_flight": True}, "max_in_flight"),
            ({"max_in_flight": None}, "max_in_flight"),
            ({"max_in_flight": 2}, "max_in_flight"),
            ({"kind": "vllm"}, "kind"),
            ({"batch_size": 0}, "batch_size"),
            ({"embedding_timeout_ms": 999}, "embedding_timeout_ms"),
            ({"request_timeout_ms": 2**31}, "request_timeout_ms"),
            ({"stream_idle_timeout_ms": 1.5}, "stream_idle_timeout_ms"),
            ({"api_key_env": "OPENAI_API_KEY"}, "api_key_env"),
            ({"api_key_env": "SLUICEGATE_KEY_X\n"}, "api_key_env"),
            ({"embedding_model": ""}, "embedding_model"),
            ({"base_url": ""}, "base_url"),
        ],
    )
    def test_what_cannot_work_is_refused_by_name_and_nothing_is_stored(self, values, named):
        with pytest.raises(UsageError) as refused:
            set_local(**values)
        assert named in str(refused.value)
        assert "\n" not in str(refused.value).strip()
        assert not Provider.objects.exists()

    def test_a_bad_value_beside_a_good_one_changes_neither(self):
        set_local()
        with pytest.raises(UsageError):
            registry.set_provider("local", {"batch_size": 4, "max_in_flight": 2})
        assert Provider.objects.get(name="local").batch_size == 32

    def test_a_cap_above_one_is_for_ollama(self):
        set_local(kind="ollama", base_url="http://127.0.0.1:11434", max_in_flight=3)
        assert Provider.objects.get(name="local").max_in_flight == 3
        with pytest.raises(UsageError, match="max_in_flight must be 1"):
            set_local(kind="openai-compatible")

    @pytest.mark.parametrize(
        "other",
        [
            "http://127.0.0.1:8089/v1",
            "HTTP://127.0.0.1:8089/v1/",
            "http://localhost:8089/v1",
            "http://LOCALHOST.:8089/v1",
            "http://[::1]:8089/v1",
            "http://0.0.0.0:8089/v1",
        ],
    )
    def test_two_providers_on_one_server_are_refused(self, other):
        set_local()
        with pytest.raises(UsageError, match="Provider local already uses"):
            registry.set_provider("second", {"base_url": other, "embedding_model": "minilm"})
        assert Provider.objects.count() == 1

    @pytest.mark.parametrize(
        "other", ["http://127.0.0.1:8090/v1", "https://127.0.0.1:8089/v1", "http://10.0.0.1:8089/v1"]
    )
    def test_another_server_is_not_refused(self, other):
        set_local()
        assert registry.set_provider("second", {"base_url": other, "embedding_model": "minilm"}).created

    def test_a_key_variable_that_is_not_set_is_said(self, monkeypatch):
        assert "SLUICEGATE_KEY_X is not set" in set_local(api_key_env="SLUICEGATE_KEY_X").notes[0]
        monkeypatch.setenv("SLUICEGATE_KEY_X", "secret")
        assert set_local().notes == ()

    def test_a_model_in_use_is_not_taken_away(self):
        set_local(chat_model="smollm2")
        provider = Provider.objects.get(name="local")
        make_tenant(slug="acme", embedding_provider=None, chat_provider=provider)
        with pytest.raises(UsageError, match="Tenant acme uses"):
            set_local(chat_model="")
        set_local(chat_model="other")

    def test_pause_and_resume_say_whether_they_changed_anything(self):
        provider = make_provider()
        answers = [registry.pause_provider(provider), registry.pause_provider(provider)]
        assert answers == [True, False]
        assert Provider.objects.get().is_paused
        answers = [registry.resume_provider(provider), registry.resume_provider(provider)]
        assert answers == [True, False]
        assert not Provider.objects.get().is_paused


class TestBaseUrl:
    @pytest.mark.parametrize(
        ("typed", "stored"),
        [
            ("HTTP://Example.COM:80/v1/", "http://example.com/v1"),
            ("https://example.com:443", "https://example.com"),
            ("https://example.com:8443/V1//", "https://example.com:8443/V1"),
            (" http://[::1]:8089/v1 ", "http://[::1]:8089/v1"),
        ],
    )
    def test_one_spelling(self, typed, stored):
        assert normalise_base_url(typed) == stored

    @pytest.mark.parametrize(
        "typed",
        [
            "",
            "127.0.0.1:8089",
            "ftp://example.com",
            "http://",
            "http:///v1",
            "http://user:secret@example.com/v1",
            "http://@example.com/v1",
            "http://example.com/v1?key=secret",
            "http://example.com/v1?",
            "http://example.com/v1#x",
            "http://example.com:port/v1",
            "http://example.com:99999/v1",
            "http://exa mple.com/v1",
            "http://example.com/\x00",
            "http://example.com/" + "a" * 500,
        ],
    )
    def test_refused_without_repeating_a_secret(self, typed):
        with pytest.raises(UsageError) as refused:
            registry.set_provider("local", {"base_url": typed, "embedding_model": "minilm"})
        assert "base_url" in str(refused.value)
        assert "secret" not in str(refused.value)

    def test_other_loopback_addresses_are_other_servers(self):
        assert not same_server("http://127.0.0.2:1/v1", "http://127.0.0.1:1/v1")


class TestTenants:
    def test_added_once_and_agreeing_afterwards(self):
        provider = make_provider()
        first = registry.add_tenant("acme", {"embedding_provider": provider})
        again = registry.add_tenant("acme", {"embedding_provider": provider})
        assert (first.created, again.created, again.changed) == (True, False, ())

    def test_adding_it_otherwise_is_refused_and_says_how_to_change(self):
        registry.add_tenant("acme", {"embedding_provider": make_provider()})
        with pytest.raises(UsageError, match="tenant set acme --embedding-provider"):
            registry.add_tenant("acme", {"embedding_provider": make_provider()})

    @pytest.mark.parametrize("slug", ["", "Acme", "a/b", "-a", "a" * 64, "a\n", "ä"])
    def test_slugs_are_plain(self, slug):
        with pytest.raises(UsageError, match="slug"):
            registry.add_tenant(slug, {})

    def test_a_provider_without_the_model_is_refused(self):
        with pytest.raises(UsageError, match="has no embedding model"):
            registry.add_tenant("acme", {"embedding_provider": make_provider(embedding_model="")})

    def test_set_changes_what_is_given(self):
        tenant, provider = make_tenant(), make_provider()
        change = registry.set_tenant(tenant, {"chat_provider": provider, "name": ""})
        assert change.changed == ("chat_provider",)

    def test_a_removed_tenant_opens_nothing_and_can_come_back(self):
        tenant = make_tenant(slug="acme")
        _, key = registry.issue_key(tenant)
        registry.remove_tenant(tenant)
        assert registry.authenticate(key) is None
        assert registry.add_tenant("acme", {}).changed == ("is_active",)
        assert registry.authenticate(key) is None


class TestKeys:
    def test_only_the_digest_is_kept(self):
        row, key = registry.issue_key(make_tenant())
        secret = key.split("_")[2]
        assert key.startswith(f"sgk_{row.prefix}_")
        stored = TenantApiKey.objects.values().get()
        assert not any(secret in str(value) for value in stored.values())
        assert len(row.digest) == 64

    def test_opens_as_its_tenant_and_notes_its_use(self):
        tenant = make_tenant()
        _, key = registry.issue_key(tenant)
        found = registry.authenticate(key)
        assert found is not None
        assert found.tenant == tenant
        assert TenantApiKey.objects.get().last_used_at is not None

    def test_a_busy_key_writes_once_a_minute(self, django_assert_num_queries):
        _, key = registry.issue_key(make_tenant())
        with django_assert_num_queries(2):
            registry.authenticate(key)
        with django_assert_num_queries(1):
            registry.authenticate(key)

    def test_anything_else_opens_nothing(self):
        row, key = registry.issue_key(make_tenant())
        _, other = registry.issue_key(make_tenant())
        for wrong in (
            "",
            "sgk",
            "sgk__",
            key[:-1],
            key + "0",
            key.upper(),
            f"sgk_{row.prefix}_",
            f"sgk_{row.prefix}_{other.split('_')[2]}",
            row.digest,
            "sgk_ünknown_ü",
            "sgk_\x00_\x00",
        ):
            assert registry.authenticate(wrong) is None, wrong

    def test_revoked_at_once(self):
        row, key = registry.issue_key(make_tenant())
        answers = [registry.revoke_key(row), registry.revoke_key(row)]
        assert answers == [True, False]
        assert registry.authenticate(key) is None

    def test_scopes_are_all_unless_given(self):
        everything, _ = registry.issue_key(make_tenant())
        search, _ = registry.issue_key(make_tenant(), scopes=["search"])
        assert all(registry.allows(everything, scope) for scope in registry.KeyScope)
        assert [scope for scope in registry.KeyScope if registry.allows(search, scope)] == ["search"]
        with pytest.raises(UsageError, match="There is no scope 'admin'"):
            registry.issue_key(make_tenant(), scopes=["admin"])

    def test_found_by_prefix_or_whole(self):
        row, key = registry.issue_key(make_tenant())
        assert registry.find_key(row.prefix) == registry.find_key(key) == row


class TestRepositories:
    def test_added_once_and_agreeing_afterwards(self, tmp_path):
        tenant = make_tenant()
        first = registry.add_repository(tenant, "docs", str(tmp_path), {"include": ["*.md"]})
        again = registry.add_repository(tenant, "docs", f"file://{tmp_path}", {})
        assert (first.created, again.created) == (True, False)
        assert Repository.objects.get().source == str(tmp_path)

    def test_due_at_once(self, tmp_path):
        registry.add_repository(make_tenant(), "docs", str(tmp_path), {})
        assert Repository.objects.get().next_due_at <= timezone.now()

    def test_another_source_is_refused_and_says_how_to_change(self, tmp_path):
        tenant = make_tenant(slug="acme")
        registry.add_repository(tenant, "docs", str(tmp_path), {})
        with pytest.raises(UsageError, match="repository set acme docs --source"):
            registry.add_repository(tenant, "docs", "https://example.com/docs.git", {})

    def test_one_slug_in_two_tenants_is_two_repositories(self, tmp_path):
        for tenant in (make_tenant(), make_tenant()):
            assert registry.add_repository(tenant, "docs", str(tmp_path), {}).created

    def test_a_removed_slug_can_be_added_anew(self, tmp_path):
        tenant = make_tenant()
        make_repository(tenant, slug="docs", removed_at=timezone.now())
        assert registry.add_repository(tenant, "docs", str(tmp_path), {}).created

    def test_a_directory_that_is_not_there_is_said(self, tmp_path):
        change = registry.add_repository(make_tenant(), "docs", str(tmp_path / "nowhere"), {})
        assert "There is no directory" in change.notes[0]

    @pytest.mark.parametrize(
        ("slug", "source", "values", "named"),
        [
            ("Docs", "https://example.com/docs.git", {}, "slug"),
            ("docs", "ext::sh -c id", {}, "source"),
            ("docs", "--upload-pack=id", {}, "source"),
            ("docs", "https://user:secret@example.com/docs.git", {}, "source"),
            ("docs", "https://example.com/docs.git", {"ref": "--exec=id"}, "ref"),
            ("docs", "https://example.com/docs.git", {"ref": "a" * 251}, "ref"),
            ("docs", "https://example.com/docs.git", {"include": [""]}, "include"),
            ("docs", "https://example.com/docs.git", {"include": "*.py"}, "include"),
            ("docs", "https://example.com/docs.git", {"exclude": ["*.py"] * 201}, "exclude"),
            ("docs", "https://example.com/docs.git", {"exclude": ["\n"]}, "exclude"),
            ("docs", "https://example.com/docs.git", {"cadence_minutes": 0}, "cadence_minutes"),
        ],
    )
    def test_what_cannot_work_is_refused_by_name(self, slug, source, values, named):
        with pytest.raises(UsageError) as refused:
            registry.add_repository(make_tenant(), slug, source, values)
        assert f"{named}: " in str(refused.value)
        assert "secret" not in str(refused.value)
        assert not Repository.objects.exists()

    def test_local_paths_only_under_the_source_roots(self, tmp_path, settings):
        settings.SOURCE_ROOTS = (tmp_path / "open",)
        (tmp_path / "open").mkdir()
        (tmp_path / "closed").mkdir()
        registry.add_repository(make_tenant(), "docs", str(tmp_path / "open"), {})
        with pytest.raises(UsageError, match="SOURCE_ROOTS"):
            registry.add_repository(make_tenant(), "docs", str(tmp_path / "open/../closed"), {})

    def test_set_makes_it_due_where_the_sweep_would_see_other_files(self, tmp_path):
        repository = make_repository(source=str(tmp_path))
        registry.set_repository(repository, {"cadence_minutes": 5})
        assert Repository.objects.get().next_due_at is None
        change = registry.set_repository(repository, {"ref": "main"})
        assert change.changed == ("ref",)
        assert Repository.objects.get().next_due_at is not None

    def test_set_leaves_what_a_sweep_writes_alone(self, tmp_path):
        repository = make_repository(source=str(tmp_path))
        Repository.objects.update(indexed_revision="abc", consecutive_failures=3)
        registry.set_repository(repository, {"ref": "main"})
        stored = Repository.objects.get()
        assert (stored.indexed_revision, stored.consecutive_failures, stored.ref) == ("abc", 3, "main")

    def test_removing_cancels_what_is_unfinished_and_can_be_done_once(self):
        repository = make_repository()
        outcome = make_outcome(make_run(repository.tenant.embedding_provider), repository)
        answers = [registry.remove_repository(repository), registry.remove_repository(repository)]
        outcome.refresh_from_db()
        assert answers == [True, False]
        assert outcome.status == OutcomeStatus.CANCELLED
        with pytest.raises(UsageError, match="no repository"):
            registry.find_repository(repository.tenant, repository.slug)

    def test_removing_a_tenant_removes_its_repositories_and_nobody_else_s(self):
        mine, other = make_repository(), make_repository()
        assert registry.remove_tenant(mine.tenant) == 1
        assert list(Repository.objects.filter(removed_at=None)) == [other]


class TestNames:
    def test_unknown_names_list_what_there_is(self):
        make_tenant(slug="acme", embedding_provider=make_provider(name="local"))
        with pytest.raises(UsageError, match=r"no provider 'x'. There is: local."):
            registry.find_provider("x")
        with pytest.raises(UsageError, match=r"no tenant 'x'. There is: acme."):
            registry.find_tenant("x")

    def test_the_first_of_its_kind_says_how_to_make_one(self):
        with pytest.raises(UsageError, match="provider set"):
            registry.find_provider("x")
        with pytest.raises(UsageError, match="repository add"):
            registry.find_repository(make_tenant(), "x")

    def test_a_repository_is_never_found_by_its_slug_alone(self):
        make_repository(slug="docs")
        with pytest.raises(UsageError, match="tenant/repository"):
            registry.select_repositories(repositories=["docs"])
        other = make_tenant(slug="other")
        with pytest.raises(UsageError, match="no repository of tenant other 'docs'"):
            registry.find_repository(other, "docs")

    def test_a_sweep_takes_all_that_can_be_swept(self):
        tenant = make_tenant(slug="acme")
        wanted = [make_repository(tenant, slug="app"), make_repository(tenant, slug="docs")]
        make_repository(tenant, slug="off", enabled=False)
        make_repository(tenant, slug="gone", removed_at=timezone.now())
        make_repository(make_tenant(embedding_provider=None))
        make_repository(make_tenant(is_active=False))
        assert registry.select_repositories() == wanted
        assert registry.select_repositories(tenants=["acme"]) == wanted
        assert registry.select_repositories(repositories=["acme/docs"]) == wanted[1:]

    def test_tenants_and_repositories_add_up(self):
        first, second, third = (make_repository(make_tenant(slug=slug), slug="docs") for slug in "abc")
        assert registry.select_repositories(["a"], ["b/docs", "a/docs"]) == [first, second]
        assert third not in registry.select_repositories(["a"], ["b/docs"])

    def test_nothing_to_sweep_says_what_to_do(self):
        with pytest.raises(UsageError, match="tenant add"):
            registry.select_repositories()
        tenant = make_tenant(slug="acme", embedding_provider=None)
        with pytest.raises(UsageError, match="repository add"):
            registry.select_repositories()
        repository = make_repository(tenant, slug="docs")
        with pytest.raises(UsageError, match="tenant set acme --embedding-provider"):
            registry.select_repositories()
        with pytest.raises(UsageError, match="tenant set acme --embedding-provider"):
            registry.select_repositories(repositories=["acme/docs"])
        registry.set_tenant(tenant, {"embedding_provider": make_provider()})
        Repository.objects.filter(pk=repository.pk).update(enabled=False)
        with pytest.raises(UsageError, match="repository set acme docs --enable"):
            registry.select_repositories()

    def test_finding_many_by_tenant_costs_as_few_queries_as_one(self, django_assert_max_num_queries):
        tenant = make_tenant(slug="acme")
        for _ in range(10):
            make_repository(tenant)
        with django_assert_max_num_queries(3):
            chosen = registry.select_repositories(tenants=["acme"])
            assert {repository.tenant.embedding_provider for repository in chosen} == {tenant.embedding_provider}
