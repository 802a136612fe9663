"""Scans of real repositories through whole sweeps: only what changed is read and embedded, what is gone goes."""

import pytest

from embeddings.models import FileVersion, KnowledgeRow, Provider, Repository
from embeddings.runs import scan, sweep
from embeddings.states import OutcomeStatus, RunStatus
from tests.support.factories import make_generation, make_provider
from tests.support.provider_server import containing, hang
from tests.support.sweeps import live_texts, outcome_of, texts

pytestmark = pytest.mark.both_databases


def sent(server):
    return sum(server.texts_seen.values())


@pytest.fixture
def swept(stage):
    """A repository with six texts, embedded."""
    repository = stage.repository("a", *texts("alpha", 6))
    stage.swept(repository)
    assert sent(stage.server) == 6
    return repository


class TestWhatChanged:
    def test_one_changed_file_costs_its_own_text(self, stage, swept):
        stage.git["a"].commit({"002.txt": "changed"})
        outcome = outcome_of(stage.swept(swept), swept)
        assert (outcome.embedded, outcome.rows, sent(stage.server)) == (1, 6, 7)
        assert live_texts(swept)[2] == "changed"

    def test_a_rename_and_a_copy_cost_nothing(self, stage, swept):
        stage.git["a"].rename("001.txt", "moved/001.txt")
        stage.git["a"].commit({"copy.txt": "alpha 3"})
        outcome = outcome_of(stage.swept(swept), swept)
        assert (outcome.reused, outcome.embedded, sent(stage.server)) == (2, 0, 6)
        assert sorted(live_texts(swept)) == sorted([*texts("alpha", 6), "alpha 3"])

    def test_a_deleted_file_goes_at_once(self, stage, swept):
        stage.git["a"].remove("000.txt", "001.txt")
        outcome = outcome_of(stage.swept(swept), swept)
        assert (outcome.status, outcome.deleted) == (OutcomeStatus.SUCCEEDED, 2)
        assert live_texts(swept) == texts("alpha", 6)[2:]

    def test_a_deleted_file_goes_although_the_provider_is_silent(self, stage, swept):
        stage.git["a"].remove("000.txt")
        stage.git["a"].commit({"new.txt": "beta"})
        stage.server.when(containing("beta"), hang())
        stage.swept(swept)
        assert live_texts(swept) == texts("alpha", 6)[1:]

    def test_a_change_that_is_taken_back_before_it_was_embedded(self, stage, swept):
        stage.git["a"].commit({"000.txt": "beta"})
        stage.server.when(containing("beta"), hang())
        stage.swept(swept)
        assert KnowledgeRow.objects.filter(vector=None).count() == 1
        stage.git["a"].commit({"000.txt": "alpha 0"})
        outcome = outcome_of(stage.swept(swept), swept)
        assert (outcome.status, outcome.pending) == (OutcomeStatus.SUCCEEDED, 0)
        assert FileVersion.objects.filter(is_live=False).count() == 0
        assert live_texts(swept) == texts("alpha", 6)

    def test_a_force_push(self, stage, swept):
        stage.git["a"].rewrite({"000.txt": "alpha 0", "only.txt": "gamma"})
        stage.swept(swept)
        assert live_texts(swept) == ["alpha 0", "gamma"]
        assert sent(stage.server) == 7

    def test_another_branch(self, stage, swept):
        stage.git["a"].branch("next")
        stage.git["a"].commit({"000.txt": "on the branch"})
        stage.git["a"].checkout("main")
        Repository.objects.update(ref="next")
        stage.swept(swept)
        assert live_texts(swept)[0] == "on the branch"
        Repository.objects.update(ref="main")
        stage.swept(swept)
        assert live_texts(swept) == texts("alpha", 6)

    def test_an_emptied_repository_keeps_nothing_and_an_unreachable_one_everything(self, stage, swept):
        path = stage.git["a"].path
        path.rename(stage.folder / "away")
        run = stage.swept(swept)
        assert (outcome_of(run, swept).status, run.status) == (OutcomeStatus.DEFERRED, RunStatus.DEFERRED)
        assert len(live_texts(swept)) == 6
        (stage.folder / "away").rename(path)
        stage.git["a"].remove(*(f"{number:03d}.txt" for number in range(6)))
        stage.swept(swept)
        assert live_texts(swept) == []

    def test_include_and_exclude_take_effect(self, stage, swept):
        Repository.objects.update(exclude=["00[0-2].txt"])
        stage.swept(swept)
        assert live_texts(swept) == texts("alpha", 6)[3:]

    def test_other_rules_cut_anew_and_reuse_what_is_the_same(self, stage, swept):
        Provider.objects.update(chunk_characters=900)
        outcome = outcome_of(stage.swept(swept), swept)
        assert (outcome.reused, outcome.embedded, sent(stage.server)) == (6, 0, 6)

    def test_what_cannot_be_read_is_counted_by_its_reason(self, stage, swept):
        stage.git["a"].commit({"binary.dat": b"\x00\x01\x02", "empty.txt": ""})
        stage.git["a"].symlink("link.txt", "000.txt")
        outcome = outcome_of(stage.swept(swept), swept)
        assert (sum(outcome.skipped.values()), outcome.files, outcome.rows) == (2, 7, 6)


class TestResuming:
    def test_only_what_is_missing_is_embedded(self, stage):
        repository = stage.repository("a", *texts("alpha", 10))
        stage.server.when(containing("alpha 4"), hang(), times=1)
        first = stage.swept(repository)
        assert outcome_of(first, repository).embedded == 4
        second = stage.swept(repository)
        outcome = outcome_of(second, repository)
        assert (outcome.status, outcome.embedded) == (OutcomeStatus.SUCCEEDED, 6)
        assert live_texts(repository) == texts("alpha", 10)

    def test_a_scan_that_is_broken_off_leaves_whole_versions(self, stage, monkeypatch):
        repository = stage.repository("a", *texts("alpha", 7))
        monkeypatch.setattr(scan, "_BATCH_FILES", 2)
        real = scan.store.write_versions
        written = []

        def stopping(*arguments):
            if len(written) == 2:
                raise scan.ScanStopped
            written.append(arguments)
            return real(*arguments)

        monkeypatch.setattr(scan.store, "write_versions", stopping)
        run = stage.start(repository)
        sweep.scan_next(run.pk)
        assert FileVersion.objects.exclude(row_count=None).count() == FileVersion.objects.count() == 4
        monkeypatch.setattr(scan.store, "write_versions", real)
        stage.carry_out(run)
        assert live_texts(repository) == texts("alpha", 7)
        assert set(stage.server.texts_seen.values()) == {1}


class TestAnotherModel:
    def change(self, stage, model):
        Provider.objects.filter(pk=stage.provider.pk).update(embedding_model=model, revision=100 + len(model))

    def live_models(self, repository):
        rows = KnowledgeRow.objects.filter(repository=repository, version__is_live=True)
        return set(rows.values_list("generation__model", flat=True))

    def test_everything_is_embedded_anew_without_reading_a_blob(self, stage, swept, monkeypatch):
        self.change(stage, "newer")
        monkeypatch.setattr(scan.GitMirror, "read", None)
        outcome = outcome_of(stage.swept(swept), swept)
        assert (outcome.status, outcome.embedded, sent(stage.server)) == (OutcomeStatus.SUCCEEDED, 6, 12)
        assert self.live_models(swept) == {"newer"}
        assert Repository.objects.get().live_generation.model == "newer"
        assert KnowledgeRow.objects.count() == 6

    def test_the_older_one_answers_until_the_newer_is_whole(self, stage, swept):
        self.change(stage, "newer")
        stage.server.when(containing("alpha 4"), hang(), times=1)
        stage.swept(swept)
        assert Repository.objects.get().live_generation.model == "embed"
        assert KnowledgeRow.objects.filter(generation__model="embed", version__is_live=True).count() == 6
        stage.swept(swept)
        assert Repository.objects.get().live_generation.model == "newer"
        assert self.live_models(swept) == {"newer"}

    def test_back_to_the_older_one_half_way(self, stage, swept):
        self.change(stage, "newer")
        stage.server.when(containing("alpha 4"), hang(), times=1)
        stage.swept(swept)
        self.change(stage, "embed")
        outcome = outcome_of(stage.swept(swept), swept)
        assert (outcome.status, outcome.embedded) == (OutcomeStatus.UNCHANGED, 0)
        assert self.live_models(swept) == {"embed"}
        assert KnowledgeRow.objects.count() == 6

    def test_another_provider(self, stage, swept):
        other = make_provider(base_url=stage.server.address + "/other/v1", embedding_model="embed", batch_size=4)
        type(stage.tenant).objects.update(embedding_provider=other)
        run = stage.swept(swept)
        assert run.provider == other
        assert (outcome_of(run, swept).embedded, Repository.objects.get().live_generation.provider) == (6, other)
        assert make_generation(other).dimensions == 8
