"""The admin: every page renders, facts cannot be edited, forms obey the registry, actions ask first."""

from datetime import timedelta

import pytest
from django.contrib.auth.models import Permission, User
from django.urls import reverse
from django.utils import timezone

from embeddings import codes, registry
from embeddings.models import (
    EmbeddingTask,
    KnowledgeRow,
    Provider,
    Repository,
    RepositoryOutcome,
    RunCircuit,
    Tenant,
    TenantApiKey,
    TenantRun,
)
from embeddings.states import CircuitState, OutcomeStatus, RunStatus, RunTrigger, TaskState
from tests.support.factories import (
    make_generation,
    make_outcome,
    make_provider,
    make_repository,
    make_row,
    make_run,
    make_task,
    make_tenant,
    make_version,
)

pytestmark = pytest.mark.django_db

MODELS = (
    Provider,
    Tenant,
    TenantApiKey,
    Repository,
    TenantRun,
    RepositoryOutcome,
    EmbeddingTask,
    KnowledgeRow,
)
FACTS = (TenantApiKey, TenantRun, RepositoryOutcome, EmbeddingTask, KnowledgeRow)


@pytest.fixture(autouse=True)
def _a_folder_of_static_files(settings):
    settings.STATIC_ROOT.mkdir(exist_ok=True)


def listing(model):
    return reverse(f"admin:embeddings_{model._meta.model_name}_changelist")


def page(row):
    return reverse(f"admin:embeddings_{row._meta.model_name}_change", args=(row.pk,))


def button(row, name):
    return reverse(f"admin:embeddings_{row._meta.model_name}_{name}", args=(row.pk,))


def press(client, row, name, **values):
    """Presses a button of the row's page and confirms."""
    return client.post(button(row, name), {"_form_submitted": "on"} | values, follow=True)


def tick(client, action, *rows):
    """Ticks rows in their list and chooses an action."""
    ticked = {"action": action, "_selected_action": [row.pk for row in rows]}
    return client.post(listing(type(rows[0])), ticked, follow=True)


@pytest.fixture
def stalled_night():
    """Two tenants; one run whose circuit opened on the first repository and spared the second."""
    provider = make_provider(name="local")
    acme = make_tenant(slug="acme", embedding_provider=provider)
    globex = make_tenant(slug="globex", embedding_provider=provider)
    registry.issue_key(acme, label="editor")
    due = timezone.now() + timedelta(minutes=30)
    docs = make_repository(acme, slug="docs", next_due_at=due, consecutive_failures=2)
    app = make_repository(globex, slug="app", next_due_at=due)
    run = make_run(provider, status=RunStatus.DEFERRED, started_at=timezone.now(), finished_at=timezone.now())
    RunCircuit.objects.filter(run=run).update(
        state=CircuitState.OPEN,
        opened_at=timezone.now(),
        reason_code=codes.CIRCUIT_OPEN,
        source_error_code="OPENAI_COMPATIBLE_REQUEST_TIMEOUT",
        opened_by="acme/docs",
        message="no answer within 300 s",
    )
    stalled = make_outcome(run, docs, status=OutcomeStatus.DEFERRED, error_code=codes.PROVIDER_TIMED_OUT)
    make_outcome(run, app, status=OutcomeStatus.DEFERRED, error_code=codes.CIRCUIT_OPEN)
    make_task(stalled, state=TaskState.FAILED, error_code="OPENAI_COMPATIBLE_REQUEST_TIMEOUT", texts=["a secret text"])
    version = make_version(docs, run.generation, path="src/gate.py")
    make_row(version, text="a secret text")
    make_row(version, undeliverable_reason="refused with 400")
    return run


class TestPages:
    @pytest.mark.parametrize("model", MODELS)
    def test_an_empty_list_says_what_to_do(self, admin_client, model):
        model.objects.all().delete()
        response = admin_client.get(listing(model))
        assert response.status_code == 200
        assert "lightbulb" in response.content.decode()

    @pytest.mark.parametrize("model", MODELS)
    def test_lists_and_pages_render(self, admin_client, stalled_night, model):
        response = admin_client.get(listing(model))
        assert response.status_code == 200
        assert "lightbulb" not in response.content.decode()
        for row in model.objects.all():
            assert admin_client.get(page(row)).status_code == 200

    @pytest.mark.parametrize("model", MODELS)
    def test_a_list_costs_as_many_queries_with_many_rows_as_with_few(
        self, admin_client, stalled_night, model, django_assert_max_num_queries, django_assert_num_queries
    ):
        def count():
            with django_assert_max_num_queries(40) as queries:
                admin_client.get(listing(model))
            return len(queries)

        count()  # content types and the like are remembered
        few = count()
        run = make_run(stalled_night.provider)
        for _ in range(5):
            tenant = make_tenant(embedding_provider=stalled_night.provider)
            registry.issue_key(tenant)
            make_provider()
            outcome = make_outcome(run, make_repository(tenant))
            make_task(outcome)
            make_outcome(make_run(stalled_night.provider), outcome.repository, status=OutcomeStatus.UNCHANGED)
            make_row(make_version(outcome.repository, run.generation))
        assert count() == few

    def test_a_run_s_page_costs_as_many_queries_with_many_outcomes_as_with_few(
        self, admin_client, stalled_night, django_assert_max_num_queries
    ):
        def count():
            with django_assert_max_num_queries(40) as queries:
                admin_client.get(page(stalled_night))
            return len(queries)

        count()
        few = count()
        for _ in range(10):
            make_outcome(stalled_night, status=OutcomeStatus.UNCHANGED)
        assert count() == few

    @pytest.mark.parametrize("model", [Provider, Tenant, Repository])
    def test_adding_renders(self, admin_client, model):
        assert admin_client.get(reverse(f"admin:embeddings_{model._meta.model_name}_add")).status_code == 200

    @pytest.mark.parametrize(
        ("model", "query", "found"),
        [
            (TenantRun, "status__exact=deferred", 1),
            (TenantRun, "status__exact=completed", 0),
            (TenantRun, "circuit__state__exact=open", 1),
            (TenantRun, "circuit__state__exact=closed", 0),
            (TenantRun, "tenant=acme", 1),
            (TenantRun, "tenant=initech", 0),
            (TenantRun, "provider__id__exact={provider}", 1),
            (TenantRun, "q=nothing", 0),
            (RepositoryOutcome, "status__exact=deferred", 2),
            (RepositoryOutcome, f"code={codes.CIRCUIT_OPEN}", 1),
            (RepositoryOutcome, "tenant=globex", 1),
            (RepositoryOutcome, "run__circuit__state__exact=closed", 0),
            (RepositoryOutcome, "q=docs", 1),
            (EmbeddingTask, "state__exact=4", 1),
            (EmbeddingTask, "state__exact=0", 0),
            (EmbeddingTask, "code=OPENAI_COMPATIBLE_REQUEST_TIMEOUT", 1),
            (KnowledgeRow, "state=pending", 1),
            (KnowledgeRow, "state=undeliverable", 1),
            (KnowledgeRow, "state=embedded", 0),
            (KnowledgeRow, "repository=0", 0),
            (KnowledgeRow, "q=gate.py", 2),
            (Repository, "last=deferred", 2),
            (Repository, "last=never", 0),
            (Repository, "last=succeeded", 0),
            (Repository, "enabled__exact=1", 2),
            (Repository, "tenant__embedding_provider__id__exact={provider}", 2),
            (Provider, "kind__exact=ollama", 0),
            (Provider, "is_paused__exact=0", 1),
            (Tenant, "is_active__exact=1", 2),
            (TenantApiKey, "q=editor", 1),
        ],
    )
    def test_filters(self, admin_client, stalled_night, model, query, found):
        response = admin_client.get(f"{listing(model)}?{query.format(provider=stalled_night.provider.pk)}")
        assert response.status_code == 200
        assert len(response.context["cl"].result_list) == found

    def test_removed_repositories_are_not_listed(self, admin_client):
        repository = make_repository(removed_at=timezone.now())
        assert not admin_client.get(listing(Repository)).context["cl"].result_list
        assert admin_client.get(page(repository)).status_code == 302


class TestTheNightPage:
    def test_says_what_stalled_who_was_spared_and_what_comes_next(self, admin_client, stalled_night):
        text = admin_client.get(reverse("admin:index")).content.decode()
        assert "Stalled within the last day" in text
        assert "acme/docs" in text
        assert "globex/app" in text
        assert "Swept next" in text
        assert "Repositories that keep failing" in text
        assert 'id="next-step"' not in text

    def test_the_run_s_page_tells_the_story(self, admin_client, stalled_night):
        text = admin_client.get(page(stalled_night)).content.decode()
        assert "did not answer for acme/docs (OPENAI_COMPATIBLE_REQUEST_TIMEOUT)" in text
        assert "Spared: 1 repository" in text
        assert "globex/app" in text

    def test_a_quiet_run_says_that_it_is_quiet(self, admin_client):
        assert "The circuit is closed" in admin_client.get(page(make_run())).content.decode()

    def test_a_new_installation_says_what_to_do_first(self, admin_client):
        index = reverse("admin:index")
        assert "Add a provider" in admin_client.get(index).content.decode()
        provider = make_provider()
        assert "Add a tenant" in admin_client.get(index).content.decode()
        tenant = make_tenant(embedding_provider=provider)
        assert "Add a git repository" in admin_client.get(index).content.decode()
        make_repository(tenant)
        assert "Sweep: tick repositories" in admin_client.get(index).content.decode()

    def test_costs_a_bounded_number_of_queries(self, admin_client, stalled_night, django_assert_max_num_queries):
        for _ in range(5):
            make_repository(next_due_at=timezone.now(), consecutive_failures=1)
            make_run()
        with django_assert_max_num_queries(25):
            admin_client.get(reverse("admin:index"))

    def test_shows_nothing_to_whoever_may_not_see_runs(self, client, stalled_night):
        client.force_login(User.objects.create_user("clerk", is_staff=True))
        assert "acme" not in client.get(reverse("admin:index")).content.decode()


class TestFacts:
    @pytest.mark.parametrize("model", FACTS)
    def test_cannot_be_added_changed_or_deleted(self, admin_client, stalled_night, model):
        row = model.objects.first()
        before = model.objects.values().get(pk=row.pk)
        assert admin_client.get(reverse(f"admin:embeddings_{model._meta.model_name}_add")).status_code == 403
        assert admin_client.post(page(row), {"status": "completed", "label": "x"}).status_code == 403
        assert admin_client.post(page(row).replace("change", "delete"), {"post": "yes"}).status_code == 403
        assert model.objects.values().get(pk=row.pk) == before

    def test_texts_are_for_superusers(self, admin_client, client, stalled_night):
        rows = [KnowledgeRow.objects.filter(undeliverable_reason="").get(), EmbeddingTask.objects.get()]
        for row in rows:
            assert "a secret text" in admin_client.get(page(row)).content.decode()
        clerk = User.objects.create_user("clerk", is_staff=True)
        clerk.user_permissions.set(Permission.objects.filter(codename__startswith="view_"))
        client.force_login(clerk)
        for row in rows:
            response = client.get(page(row))
            assert response.status_code == 200
            assert "a secret text" not in response.content.decode()

    def test_a_key_s_digest_is_never_shown(self, admin_client, stalled_night):
        key = TenantApiKey.objects.get()
        for url in (page(key), listing(TenantApiKey), page(key.tenant)):
            assert key.digest not in admin_client.get(url).content.decode()


PROVIDER = {
    "name": "local",
    "kind": "openai-compatible",
    "base_url": "HTTP://127.0.0.1:8089/v1/",
    "embedding_model": "minilm",
    "batch_size": 32,
    "batch_characters": 60_000,
    "chunk_characters": 1_200,
    "chunk_tokens": 480,
    "max_in_flight": 1,
    "embedding_timeout_ms": 300_000,
    "query_timeout_ms": 15_000,
    "request_timeout_ms": 120_000,
    "stream_idle_timeout_ms": 120_000,
    "stream_lifetime_ms": 900_000,
    "turn_wall_ms": 3_600_000,
    "generations-TOTAL_FORMS": 0,
    "generations-INITIAL_FORMS": 0,
}


class TestForms:
    def add(self, client, model, values):
        return client.post(reverse(f"admin:embeddings_{model._meta.model_name}_add"), values, follow=True)

    def test_a_provider_is_added_under_the_registry_s_rules(self, admin_client):
        self.add(admin_client, Provider, PROVIDER)
        assert Provider.objects.get().base_url == "http://127.0.0.1:8089/v1"
        response = self.add(
            admin_client, Provider, PROVIDER | {"name": "second", "base_url": "http://localhost:8089/v1"}
        )
        assert "Provider local already uses" in response.content.decode()
        assert Provider.objects.count() == 1

    def test_a_lane_takes_no_cap(self, admin_client):
        response = self.add(admin_client, Provider, PROVIDER | {"max_in_flight": 2})
        assert "max_in_flight must be 1, not 2" in response.content.decode()
        assert not Provider.objects.exists()

    def test_changing_a_provider_leaves_what_the_lane_writes_alone(self, admin_client):
        provider = make_provider(**{name: value for name, value in PROVIDER.items() if "-" not in name})
        busy = timezone.now() + timedelta(hours=1)
        Provider.objects.update(busy_until=busy)
        admin_client.post(page(provider), PROVIDER | {"base_url": provider.base_url, "batch_size": 8})
        provider.refresh_from_db()
        assert (provider.batch_size, provider.busy_until) == (8, busy)

    def test_a_new_model_says_that_the_next_sweep_re_embeds(self, admin_client):
        provider = make_provider(**{name: value for name, value in PROVIDER.items() if "-" not in name})
        response = admin_client.post(page(provider), PROVIDER | {"embedding_model": "bge"}, follow=True)
        assert "next sweep re-embeds" in response.content.decode()

    def test_a_tenant_needs_a_provider_that_embeds(self, admin_client):
        chat_only = make_provider(embedding_model="")
        values = {"slug": "acme", "embedding_provider": chat_only.pk, "is_active": "on"}
        assert "has no embedding model" in self.add(admin_client, Tenant, values).content.decode()
        self.add(admin_client, Tenant, values | {"embedding_provider": make_provider().pk})
        assert Tenant.objects.get().slug == "acme"

    def test_a_repository_is_added_and_changed(self, admin_client, tmp_path):
        values = {
            "tenant": make_tenant(slug="acme").pk,
            "slug": "docs",
            "source": f"file://{tmp_path}",
            "include": "*.md\n\n docs/ ",
            "enabled": "on",
            "cadence_minutes": 30,
        }
        self.add(admin_client, Repository, values)
        repository = Repository.objects.get()
        assert (repository.source, repository.include) == (str(tmp_path), ["*.md", "docs/"])
        again = self.add(admin_client, Repository, values)
        assert "already has a repository docs" in again.content.decode()
        admin_client.post(page(repository), values | {"ref": "main", "include": ""})
        repository.refresh_from_db()
        assert (repository.ref, repository.include) == ("main", [])

    @pytest.mark.parametrize(
        ("values", "said"),
        [
            ({"source": "ext::sh -c id"}, "source"),
            ({"source": "https://user:token@example.com/x.git"}, "user name"),
            ({"ref": "--upload-pack=id"}, "a ref is"),
            ({"slug": "Docs"}, "lower-case"),
        ],
    )
    def test_a_repository_that_git_must_not_be_given(self, admin_client, tmp_path, values, said):
        good = {"tenant": make_tenant().pk, "slug": "docs", "source": str(tmp_path), "cadence_minutes": 30}
        response = self.add(admin_client, Repository, good | values)
        assert said in response.content.decode()
        assert not Repository.objects.exists()


class TestActions:
    def test_a_link_from_elsewhere_does_nothing(self, admin_client):
        provider = make_provider()
        assert admin_client.get(button(provider, "pause_one")).status_code == 200
        assert not Provider.objects.get().is_paused

    def test_a_forged_post_does_nothing(self, admin_user):
        from django.test import Client

        provider = make_provider()
        strict = Client(enforce_csrf_checks=True)
        strict.force_login(admin_user)
        assert strict.post(button(provider, "pause_one"), {"_form_submitted": "on"}).status_code == 403
        assert not Provider.objects.get().is_paused

    def test_pause_and_resume(self, admin_client):
        provider = make_provider()
        tick(admin_client, "pause", provider)
        assert Provider.objects.get().is_paused
        tick(admin_client, "resume", provider)
        assert not Provider.objects.get().is_paused
        press(admin_client, provider, "pause_one")
        assert Provider.objects.get().is_paused
        press(admin_client, provider, "resume_one")
        assert not Provider.objects.get().is_paused

    def test_a_browser_s_button_is_sent_back_to_the_page(self, admin_client):
        provider = make_provider()
        response = admin_client.post(
            button(provider, "pause_one"), {"_form_submitted": "on"}, headers={"HX-Request": "true"}
        )
        assert response.headers["HX-Redirect"] == page(provider)

    def test_a_key_is_shown_once_and_works(self, admin_client):
        tenant = make_tenant()
        response = press(admin_client, tenant, "issue_key", label="editor", scopes=["search"])
        key = response.content.decode().split('id="issued-key">')[1].split("<")[0]
        found = registry.authenticate(key)
        assert found is not None
        assert (found.tenant, found.label, found.scopes) == (tenant, "editor", ["search"])
        assert "no-store" in response.headers["Cache-Control"]
        assert key not in admin_client.get(page(tenant)).content.decode()

    def test_revoke(self, admin_client):
        row, key = registry.issue_key(make_tenant())
        press(admin_client, row, "revoke_one")
        assert registry.authenticate(key) is None
        other, key = registry.issue_key(make_tenant())
        tick(admin_client, "revoke", other)
        assert registry.authenticate(key) is None

    def test_sweep_now_from_repositories_and_tenants(self, admin_client):
        tenant = make_tenant()
        repositories = [make_repository(tenant), make_repository(tenant, enabled=False)]
        tick(admin_client, "sweep", *repositories)
        run = TenantRun.objects.get()
        assert (run.trigger, run.outcomes.get().repository) == (RunTrigger.ADMIN, repositories[0])
        other = make_repository()
        tick(admin_client, "sweep", other.tenant)
        assert TenantRun.objects.first().outcomes.get().repository == other

    def test_sweep_now_says_why_nothing_can_be_swept(self, admin_client):
        response = press(admin_client, make_repository(enabled=False), "sweep_one")
        assert "No repository is enabled" in response.content.decode()
        assert not TenantRun.objects.exists()

    def test_cancel(self, admin_client):
        for cancel in (
            lambda run: tick(admin_client, "cancel", run),
            lambda run: press(admin_client, run, "cancel_one"),
            lambda run: tick(admin_client, "cancel", run.outcomes.get()),
        ):
            run = make_run()
            outcome = make_outcome(run)
            cancel(run)
            outcome.refresh_from_db()
            run.refresh_from_db()
            assert (outcome.status, run.finished_at is not None) == (OutcomeStatus.CANCELLED, True)

    def test_a_finished_run_stays_as_it_is(self, admin_client):
        run = make_run(status=RunStatus.COMPLETED)
        press(admin_client, run, "cancel_one")
        run.refresh_from_db()
        assert run.status == RunStatus.COMPLETED

    def test_retry_undeliverable(self, admin_client):
        repository = make_repository()
        version = make_version(repository, make_generation(repository.tenant.embedding_provider))
        for retry in (
            lambda row: tick(admin_client, "retry", row),
            lambda row: tick(admin_client, "retry_undeliverable", repository),
            lambda row: press(admin_client, repository, "retry_one"),
        ):
            row = make_row(version, undeliverable_reason="refused")
            retry(row)
            row.refresh_from_db()
            assert row.undeliverable_reason == ""

    def test_remove(self, admin_client):
        tenant = make_tenant()
        repository, other = make_repository(tenant), make_repository(tenant)
        press(admin_client, repository, "remove")
        assert Repository.objects.get(pk=repository.pk).removed_at is not None
        press(admin_client, tenant, "remove")
        assert Repository.objects.get(pk=other.pk).removed_at is not None
        assert not Tenant.objects.get(pk=tenant.pk).is_active

    def test_looking_is_not_operating(self, client):
        clerk = User.objects.create_user("clerk", is_staff=True)
        clerk.user_permissions.set(Permission.objects.filter(codename__startswith="view_"))
        client.force_login(clerk)
        run, provider, tenant = make_run(), make_provider(), make_tenant()
        outcome = make_outcome(run)
        for row, name in ((run, "cancel_one"), (provider, "pause_one"), (tenant, "issue_key"), (tenant, "remove")):
            assert press(client, row, name).status_code == 403
        tick(client, "cancel", run)
        outcome.refresh_from_db()
        assert outcome.status == OutcomeStatus.PENDING
        assert not TenantApiKey.objects.exists()
