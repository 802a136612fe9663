"""The writer of rows: versions go live whole, vectors are bound once, tenants and generations stay apart."""

import threading

import numpy as np
import pytest
from django.db import IntegrityError, connection, transaction

from embeddings.errors import DimensionMismatch
from embeddings.knowledge import store
from embeddings.knowledge.chunking import Chunk
from embeddings.knowledge.store import Place, ReadFile
from embeddings.models import EmbeddingGeneration, FileVersion, KnowledgeRow, Repository, SourceFile
from tests.support.factories import make_generation, make_outcome, make_repository, make_row, make_run, make_version

pytestmark = [pytest.mark.both_databases, pytest.mark.django_db(transaction=True)]

VECTOR = np.arange(4, dtype=np.float32)


@pytest.fixture
def repository():
    return make_repository()


@pytest.fixture
def generation(repository):
    return make_generation(repository.tenant.embedding_provider)


@pytest.fixture
def place(repository, generation):
    return Place(repository.tenant_id, repository.pk, generation.pk, "rules")


def read(path, *texts, oid="1"):
    chunks = [Chunk(number, number + 1, number + 1, text) for number, text in enumerate(texts)]
    return ReadFile(path, oid, chunks)


def embed(repository, *texts):
    """Gives the pending rows of these texts (or all) their vectors."""
    rows = KnowledgeRow.objects.filter(store.PENDING, repository=repository)
    chosen = rows.filter(text__in=texts) if texts else rows
    return write_vectors(repository, *((row.pk, VECTOR) for row in chosen))


def write_vectors(repository, *rows):
    with transaction.atomic():
        return store.write_vectors(repository.pk, rows)


def mark_pending_undeliverable(repository, reason):
    with transaction.atomic():
        pending = KnowledgeRow.objects.filter(store.PENDING, repository=repository)
        store.mark_undeliverable(repository.pk, [row.pk for row in pending], reason)


def live(repository):
    rows = KnowledgeRow.objects.filter(repository=repository, version__is_live=True)
    return sorted(rows.values_list("text", flat=True))


def touched(repository):
    return Repository.objects.get(pk=repository.pk).knowledge_revision


class TestVersions:
    def test_are_pending_until_every_row_has_its_vector(self, repository, place):
        written = store.write_versions(place, [read("a.py", "x", "y")])
        assert (written.rows, written.reused, live(repository)) == (2, 0, [])
        embed(repository, "x")
        assert live(repository) == []
        embed(repository, "y")
        assert live(repository) == ["x", "y"]

    def test_replace_the_live_one_in_one_go(self, repository, place):
        store.write_versions(place, [read("a.py", "old")])
        embed(repository)
        store.write_versions(place, [read("a.py", "new", "newer", oid="2")])
        embed(repository, "new")
        assert live(repository) == ["old"]
        embed(repository, "newer")
        assert live(repository) == ["new", "newer"]
        assert KnowledgeRow.objects.count() == 2
        assert FileVersion.objects.count() == 1

    def test_take_the_place_of_an_unpublished_predecessor(self, repository, place):
        store.write_versions(place, [read("a.py", "first")])
        store.write_versions(place, [read("a.py", "second", oid="2")])
        assert list(KnowledgeRow.objects.values_list("text", flat=True)) == ["second"]

    def test_what_was_embedded_of_an_unpublished_predecessor_is_kept(self, repository, place):
        store.write_versions(place, [read("a.py", "x", "y")])
        embed(repository, "x")
        assert store.write_versions(place, [read("a.py", "x", "z", oid="2")]).reused == 1

    def test_without_rows_are_live_at_once(self, repository, place):
        store.write_versions(place, [read("empty.py"), ReadFile("image.png", "2", skipped_reason="binary")])
        assert set(FileVersion.objects.values_list("is_live", "row_count", "skipped_reason")) == {
            (True, 0, ""),
            (True, 0, "binary"),
        }

    def test_a_half_made_one_never_goes_live(self, repository, generation):
        row = make_row(make_version(repository, generation))
        write_vectors(repository, (row.pk, VECTOR))
        assert live(repository) == []

    def test_the_database_refuses_two_live_ones(self, repository, generation):
        first = make_version(repository, generation, path="a.py", is_live=True)
        with pytest.raises(IntegrityError), transaction.atomic():
            FileVersion.objects.create(file=first.file, generation=generation, blob_oid="2", is_live=True)

    def test_files_that_are_gone_go_in_every_generation(self, repository, place, generation):
        other = make_generation(generation.provider, model="other")
        for each in (generation, other):
            store.write_versions(
                Place(place.tenant_id, repository.pk, each.pk, "r"), [read("a.py", "x"), read("b", "y")]
            )
        (file_id,) = SourceFile.objects.filter(path="a.py").values_list("pk", flat=True)
        assert store.delete_files(repository.pk, [file_id]) == 2
        assert set(KnowledgeRow.objects.values_list("text", flat=True)) == {"y"}

    def test_each_change_of_what_is_live_is_a_new_revision(self, repository, place):
        before = touched(repository)
        store.write_versions(place, [read("a.py", "x")])
        assert touched(repository) == before
        embed(repository)
        assert touched(repository) > before

    def test_many_files_and_rows_at_once(self, repository, place):
        store.write_versions(
            place, [read(f"{number}.py", *(f"{number} {n}" for n in range(3))) for number in range(700)]
        )
        assert KnowledgeRow.objects.count() == 2_100
        files = list(SourceFile.objects.values_list("pk", flat=True))
        assert store.delete_files(repository.pk, files) == 2_100


class TestKnownVectors:
    def test_a_text_that_the_tenant_has_embedded_costs_nothing(self, repository, place):
        store.write_versions(place, [read("a.py", "x", "y")])
        embed(repository)
        written = store.write_versions(place, [read("copy.py", "x", "y"), read("mixed.py", "y", "z")])
        assert written.reused == 3
        assert live(repository) == ["x", "x", "y", "y"]

    def test_in_another_repository_of_the_tenant_too(self, repository, place):
        store.write_versions(place, [read("a.py", "x")])
        embed(repository)
        sibling = make_repository(repository.tenant)
        written = store.write_versions(Place(place.tenant_id, sibling.pk, place.generation_id, "r"), [read("b", "x")])
        assert written.reused == 1

    def test_another_tenants_are_never_taken(self, repository, place):
        store.write_versions(place, [read("a.py", "x")])
        embed(repository)
        stranger = make_repository()
        written = store.write_versions(
            Place(stranger.tenant_id, stranger.pk, place.generation_id, "r"), [read("b", "x")]
        )
        assert written.reused == 0

    def test_another_generations_are_never_taken(self, repository, place, generation):
        store.write_versions(place, [read("a.py", "x")])
        embed(repository)
        newer = make_generation(generation.provider, model="newer")
        written = store.write_versions(Place(place.tenant_id, repository.pk, newer.pk, "r"), [read("b", "x")])
        assert written.reused == 0


class TestVectors:
    def test_are_bound_once(self, repository, place):
        store.write_versions(place, [read("a.py", "x")])
        row = KnowledgeRow.objects.get()
        assert write_vectors(repository, (row.pk, VECTOR)) == 1
        assert write_vectors(repository, (row.pk, VECTOR + 1)) == 0
        row.refresh_from_db()
        assert np.array_equal(row.vector, VECTOR)

    def test_for_a_row_that_has_gone_are_dropped(self, repository):
        assert write_vectors(repository, (10**9, VECTOR)) == 0

    def test_come_back_as_they_were_written(self, repository, place):
        store.write_versions(place, [read("a.py", "x")])
        exact = np.array([1e-30, -3.1415927, 1e20, 0.1], dtype=np.float32)
        write_vectors(repository, (KnowledgeRow.objects.get().pk, exact))
        assert np.array_equal(KnowledgeRow.objects.get().vector, exact)

    def test_two_batches_of_one_file_at_once_publish_it(self, repository, place):
        """Each alone sees the other's rows pending, unless they take turns at the version."""
        for _ in range(5):
            SourceFile.objects.all().delete()
            store.write_versions(place, [read("a.py", "x", "y", oid="9")])
            together = threading.Barrier(2)

            def write(text, together=together):
                try:
                    together.wait(10)
                    embed(repository, text)
                finally:
                    connection.close()

            threads = [threading.Thread(target=write, args=(text,)) for text in "xy"]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(20)
            assert live(repository) == ["x", "y"]

    def test_the_first_reply_decides_the_dimensions(self, generation):
        EmbeddingGeneration.objects.update(dimensions=None)
        store.learn_dimensions(generation.pk, 8)
        store.learn_dimensions(generation.pk, 8)
        with pytest.raises(DimensionMismatch, match=r"9 .*8"):
            store.learn_dimensions(generation.pk, 9)


class TestUndeliverable:
    def test_rows_have_their_reason_and_their_version_goes_live_without_them(self, repository, place):
        store.write_versions(place, [read("a.py", "x", "y")])
        embed(repository, "x")
        row = KnowledgeRow.objects.get(text="y")
        mark_pending_undeliverable(repository, "the provider answered 400" + "!" * 900)
        row.refresh_from_db()
        assert (len(row.undeliverable_reason), row.vector) == (500, None)
        assert live(repository) == ["x", "y"]

    def test_tried_again_they_are_pending_where_they_stand(self, repository, place):
        store.write_versions(place, [read("a.py", "x")])
        mark_pending_undeliverable(repository, "refused")
        assert store.retry_undeliverable(repository) == 1
        assert KnowledgeRow.objects.filter(store.PENDING).count() == 1
        before = touched(repository)
        embed(repository)
        assert touched(repository) > before


class TestGenerations:
    @pytest.fixture
    def newer(self, repository, place, generation):
        store.write_versions(place, [read("a.py", "x"), read("b.py", "y")])
        embed(repository)
        Repository.objects.update(live_generation=generation)
        made = make_generation(generation.provider, model="newer")
        versions = list(FileVersion.objects.values_list("pk", flat=True))
        store.copy_to_generation(Place(place.tenant_id, repository.pk, made.pk, "rules"), versions)
        return made

    def promote(self, repository, generation):
        return store.promote_generation(Repository.objects.get(pk=repository.pk), generation.pk)

    def test_the_newer_one_is_a_pending_copy(self, newer):
        copies = KnowledgeRow.objects.filter(generation=newer)
        assert list(copies.order_by("text").values_list("text", "vector", "start_line")) == [
            ("x", None, 1),
            ("y", None, 1),
        ]

    def test_is_promoted_only_once_it_is_whole(self, repository, generation, newer):
        embed(repository, "x")
        assert not self.promote(repository, newer)
        assert Repository.objects.get().live_generation == generation
        embed(repository, "y")
        assert self.promote(repository, newer)
        assert Repository.objects.get().live_generation == newer
        assert set(KnowledgeRow.objects.values_list("generation", flat=True)) == {newer.pk}
        assert not self.promote(repository, newer)

    def test_one_that_is_recorded_late_does_not_delete_what_a_newer_run_is_at_work_on(
        self, repository, generation, newer
    ):
        run = make_run(generation.provider, generation=newer)
        make_outcome(run, repository, status="embedding")
        assert not self.promote(repository, generation)
        assert KnowledgeRow.objects.filter(generation=newer).count() == 2
