"""Reading a git source: what is fetched, what it costs, what is refused, and what a failure may not do."""

import fcntl
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from embeddings.knowledge import git as git_module
from embeddings.knowledge.source import (
    GitMirror,
    RevisionMissing,
    Skip,
    Snapshot,
    SourceEmpty,
    SourceRefused,
    SourceStopped,
    SourceTimeout,
    SourceUnreachable,
    decode,
    matches,
)
from tests.support.git_repositories import GitRepository
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[3]
FETCH = """
import sys
from pathlib import Path
from embeddings.knowledge.source import GitMirror
print("started", flush=True)
print(GitMirror(Path(sys.argv[1]), sys.argv[2], source_roots=None).fetch().revision)
"""


@pytest.fixture
def repository(tmp_path):
    return GitRepository(tmp_path / "origin")


@pytest.fixture
def mirror(tmp_path, repository):
    def build(ref: str = "", source: str | None = None, **options) -> GitMirror:
        options.setdefault("source_roots", None)
        return GitMirror(tmp_path / "mirrors" / "one.git", source or str(repository.path), ref, **options)

    return build


@pytest.fixture
def calls(monkeypatch, tmp_path):
    """The git commands that were started, in order."""
    started = []
    real = subprocess.Popen

    def start(arguments, **options):
        started.append(next(word for word in arguments[1:] if not word.startswith(("-", "/"))))
        return real(arguments, **options)

    monkeypatch.setattr(git_module.subprocess, "Popen", start)
    return started


def paths(snapshot: Snapshot) -> list[str]:
    return [entry.path for entry in snapshot.entries]


def contents(mirror: GitMirror, snapshot: Snapshot) -> dict[str, bytes]:
    blobs = [entry for entry in snapshot.entries if entry.kind != "submodule"]
    read = mirror.read(entry.oid for entry in blobs)
    return {entry.path: content for entry, (oid, content) in zip(blobs, read, strict=True) if entry.oid == oid}


class TestSnapshot:
    def test_lists_the_committed_tree_and_reads_its_blobs(self, repository, mirror):
        commit = repository.commit({"a.py": "x = 1\n", "docs/b c.md": "# é\n", "empty": ""})
        one = mirror()
        snapshot = one.fetch()
        assert snapshot.revision == commit
        assert [(entry.path, entry.size, entry.kind) for entry in snapshot.entries] == [
            ("a.py", 6, "file"),
            ("docs/b c.md", 5, "file"),
            ("empty", 0, "file"),
        ]
        assert contents(one, snapshot) == {"a.py": b"x = 1\n", "docs/b c.md": "# é\n".encode(), "empty": b""}

    def test_uncommitted_changes_do_not_count(self, repository, mirror):
        repository.commit({"a": "committed"})
        repository.write({"a": "not committed", "b": "new"})
        one = mirror()
        assert contents(one, one.fetch()) == {"a": b"committed"}

    def test_follows_changes_renames_and_deletions(self, repository, mirror):
        repository.commit({"a": "1", "b": "2"})
        first = mirror().fetch()
        repository.rename("a", "sub/a")
        repository.remove("b")
        second = mirror().fetch()
        assert paths(second) == ["sub/a"]
        assert second.entries[0].oid == first.entries[0].oid

    def test_a_commit_without_files_is_an_empty_tree(self, repository, mirror):
        repository.commit({"a": "1"})
        mirror().fetch()
        commit = repository.remove("a")
        assert mirror().fetch() == Snapshot(commit, ())

    def test_links_and_submodules_are_named_not_followed(self, tmp_path, repository, mirror):
        other = GitRepository(tmp_path / "other")
        other.commit({"inner": "1"})
        repository.symlink("link", "/etc/passwd")
        repository.submodule(other, "module")
        kinds = {entry.path: entry.kind for entry in mirror().fetch().entries}
        assert kinds == {".gitmodules": "file", "link": "symlink", "module": "submodule"}

    def test_odd_names_are_always_the_same_text(self, repository, mirror):
        repository.commit({"new\nline": "1", "quote\"'\\": "2", "-n": "3"})
        with open(os.fsencode(repository.path) + b"/caf\xe9", "wb") as file:
            file.write(b"4")
        with open(repository.path / "caf\\xe9", "wb") as file:
            file.write(b"5")
        repository.commit()
        one = mirror()
        snapshot = one.fetch()
        assert sorted(paths(snapshot)) == ["-n", "caf\\xe9", "new\nline", "quote\"'\\"]
        assert one.fetch() == snapshot
        "".join(paths(snapshot)).encode("utf-8")

    def test_sha256_repositories(self, tmp_path, mirror):
        modern = GitRepository(tmp_path / "modern", object_format="sha256")
        commit = modern.commit({"a": "1"})
        one = mirror(source=str(modern.path))
        snapshot = one.fetch()
        assert (len(commit), snapshot.revision) == (64, commit)
        assert contents(one, snapshot) == {"a": b"1"}

    def test_a_file_url_and_a_bare_repository(self, tmp_path, repository, mirror):
        commit = repository.commit({"a": "1"})
        repository.git("clone", "--quiet", "--bare", ".", str(tmp_path / "bare.git"))
        assert mirror(source=f"file://{tmp_path}/bare.git").fetch().revision == commit

    def test_a_shallow_source_and_a_linked_worktree(self, tmp_path, repository, mirror):
        repository.commit({"a": "1"})
        commit = repository.commit({"a": "2"})
        repository.git("clone", "--quiet", "--depth=1", f"file://{repository.path}", str(tmp_path / "shallow"))
        assert mirror(source=str(tmp_path / "shallow")).fetch().revision == commit
        repository.git("worktree", "add", "--quiet", "-b", "side", str(tmp_path / "side"))
        assert mirror(source=str(tmp_path / "side"), source_roots=[tmp_path]).fetch().revision == commit

    def test_a_repository_of_another_user(self, repository, mirror):
        commit = repository.commit({"a": "1"})
        if os.geteuid() == 0:
            subprocess.run(["chown", "-R", "12345:12345", str(repository.path)], check=True)
        assert mirror().fetch().revision == commit


class TestRef:
    def test_follows_the_default_branch_when_it_changes(self, repository, mirror):
        repository.commit({"a": "1"})
        mirror().fetch()
        repository.branch("trunk")
        commit = repository.commit({"a": "2"})
        assert mirror().fetch().revision == commit

    def test_branch_tag_full_name_and_commit_id(self, repository, mirror):
        old = repository.commit({"a": "1"})
        repository.tag("light")
        repository.tag("noted", annotated=True)
        repository.branch("feature/x")
        new = repository.commit({"a": "2"})
        repository.checkout("main")
        repository.commit({"a": "3"})
        for ref, commit in {
            "feature/x": new,
            "refs/heads/feature/x": new,
            "light": old,
            "noted": old,
            "refs/tags/noted": old,
            old: old,
            old.upper(): old,
        }.items():
            assert mirror(ref).fetch().revision == commit, ref

    def test_a_branch_comes_before_a_tag_of_its_name(self, repository, mirror):
        repository.commit({"a": "1"})
        repository.tag("both")
        repository.branch("both")
        commit = repository.commit({"a": "2"})
        assert mirror("both").fetch().revision == commit

    def test_force_push_and_branch_switch(self, repository, mirror):
        repository.commit({"a": "1", "b": "1"})
        mirror("main").fetch()
        commit = repository.rewrite({"c": "1"})
        snapshot = mirror("main").fetch()
        assert (snapshot.revision, paths(snapshot)) == (commit, ["c"])
        repository.branch("other", orphan=True)
        repository.commit({"d": "1"})
        assert paths(mirror("other").fetch()) == ["d"]
        assert paths(mirror("main").fetch()) == ["c"]

    @pytest.mark.parametrize("ref", ["absent", "refs/heads/absent", "ab" * 20, "abc1234"])
    def test_a_missing_ref_is_its_own_error(self, repository, mirror, ref):
        repository.commit({"a": "1"})
        with pytest.raises(RevisionMissing) as error:
            mirror(ref).fetch()
        assert error.value.code == "KB_SOURCE_REVISION_MISSING"

    def test_a_tag_of_something_else_than_a_commit(self, repository, mirror):
        repository.commit({"a": "1"})
        repository.git("tag", "blob", repository.git("rev-parse", "HEAD:a"))
        with pytest.raises(RevisionMissing):
            mirror("blob").fetch()

    def test_an_empty_repository_says_so(self, repository, mirror):
        with pytest.raises(SourceEmpty) as error:
            mirror().fetch()
        assert error.value.code == "KB_SOURCE_EMPTY"

    def test_a_default_branch_without_commit_is_not_an_empty_repository(self, repository, mirror):
        repository.commit({"a": "1"})
        repository.git("symbolic-ref", "HEAD", "refs/heads/unborn")
        with pytest.raises(RevisionMissing) as error:
            mirror().fetch()
        assert not isinstance(error.value, SourceEmpty)


class TestCost:
    def test_an_unchanged_source_transfers_nothing(self, repository, mirror, calls):
        repository.commit({"a": "1"})
        first = mirror().fetch()
        assert "fetch" in calls
        calls.clear()
        assert mirror().fetch() == first
        assert calls == ["ls-remote", "rev-parse", "ls-tree"]

    def test_only_the_asked_blobs_are_read(self, repository, mirror):
        repository.commit({f"file{number}": str(number) for number in range(50)})
        one = mirror()
        snapshot = one.fetch()
        wanted = [snapshot.entries[7].oid, snapshot.entries[3].oid]
        assert [oid for oid, _ in one.read(iter(wanted))] == wanted

    def test_reading_is_lazy_and_ends_its_process(self, repository, mirror):
        repository.commit({"a": "1", "b": "2"})
        one = mirror()
        snapshot = one.fetch()
        asked = []

        def oids():
            for entry in snapshot.entries:
                asked.append(entry.path)
                yield entry.oid

        reading = one.read(oids())
        next(reading)
        assert asked == ["a"]
        reading.close()

    def test_large_blobs_come_whole(self, repository, mirror):
        content = os.urandom(3_000_000)
        repository.commit({"large": content, "small": "1"})
        one = mirror()
        assert contents(one, one.fetch()) == {"large": content, "small": b"1"}


class TestFailure:
    def test_a_source_that_is_gone_is_unreachable_not_empty(self, tmp_path, repository, mirror):
        repository.commit({"a": "1"})
        first = mirror().fetch()
        repository.path.rename(tmp_path / "away")
        with pytest.raises(SourceUnreachable) as error:
            mirror().fetch()
        assert error.value.code == "KB_SOURCE_UNREACHABLE"
        (tmp_path / "away").rename(repository.path)
        assert mirror().fetch() == first

    def test_a_directory_that_is_no_repository(self, tmp_path, mirror):
        (tmp_path / "plain").mkdir()
        with pytest.raises(SourceUnreachable):
            mirror(source=str(tmp_path / "plain")).fetch()

    def test_a_closed_port(self, mirror):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        with pytest.raises(SourceUnreachable) as error:
            mirror(source=f"https://127.0.0.1:{port}/x.git").fetch()
        assert "\n" not in str(error.value)
        assert len(str(error.value)) <= 400

    def test_a_silent_server_ends_at_the_deadline_with_its_whole_group(self, mirror, monkeypatch):
        groups = []
        real = subprocess.Popen

        def start(*arguments, **options):
            process = real(*arguments, **options)
            groups.append(process.pid)
            return process

        monkeypatch.setattr(git_module.subprocess, "Popen", start)
        with socket.create_server(("127.0.0.1", 0)) as server:
            url = f"https://127.0.0.1:{server.getsockname()[1]}/x.git"
            started = time.monotonic()
            with pytest.raises(SourceTimeout) as error:
                mirror(source=url, deadline_seconds=0.4).fetch()
        assert error.value.code == "KB_SOURCE_TIMEOUT"
        assert time.monotonic() - started < 5
        for group in groups:
            eventually(lambda group=group: not _group_lives(group))

    def test_the_twin_a_kill_of_the_leader_alone_leaves_its_children(self, mirror, monkeypatch):
        groups = []
        monkeypatch.setattr(git_module.os, "killpg", lambda pid, number: (groups.append(pid), os.kill(pid, number)))
        with socket.create_server(("127.0.0.1", 0)) as server:
            url = f"https://127.0.0.1:{server.getsockname()[1]}/x.git"
            with pytest.raises(SourceTimeout):
                mirror(source=url, deadline_seconds=0.4).fetch()
            assert _group_lives(groups[0])
            os.kill(-groups[0], signal.SIGKILL)

    def test_stops_when_asked(self, mirror):
        with socket.create_server(("127.0.0.1", 0)) as server:
            url = f"https://127.0.0.1:{server.getsockname()[1]}/x.git"
            asked = threading.Event()
            threading.Timer(0.2, asked.set).start()
            with pytest.raises(SourceStopped):
                mirror(source=url, should_stop=asked.is_set).fetch()

    def test_reading_stops_when_asked(self, repository, mirror):
        repository.commit({"a": "1", "b": "2"})
        stop = threading.Event()
        one = mirror(should_stop=stop.is_set)
        reading = one.read([entry.oid for entry in one.fetch().entries])
        next(reading)
        stop.set()
        with pytest.raises(SourceStopped):
            next(reading)

    def test_the_lock_is_waited_for_until_the_deadline(self, repository, mirror, tmp_path):
        repository.commit({"a": "1"})
        mirror().fetch()
        with open(tmp_path / "mirrors" / "one.git.lock", "w") as holder:
            fcntl.flock(holder, fcntl.LOCK_EX)
            with pytest.raises(SourceTimeout):
                mirror(deadline_seconds=0.2).fetch()
        assert mirror().fetch()

    def test_a_git_whose_parent_was_killed_is_waited_for(self, repository, mirror, tmp_path):
        commit = repository.commit({"a": "1"})
        directory = tmp_path / "mirrors" / "one.git"
        with socket.create_server(("127.0.0.1", 0)) as server:
            url = f"https://127.0.0.1:{server.getsockname()[1]}/x.git"
            command = [sys.executable, "-c", FETCH, str(directory), url]
            with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
                connection, _ = server.accept()
                process.kill()
            with connection, pytest.raises(SourceTimeout):
                mirror(deadline_seconds=0.3).fetch()
        assert mirror().fetch().revision == commit

    def test_many_processes_fetch_at_once(self, repository, mirror, tmp_path):
        commit = repository.commit({f"file{number}": str(number) for number in range(40)})
        command = [sys.executable, "-c", FETCH, str(tmp_path / "mirrors" / "one.git"), str(repository.path)]
        started = [subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(4)]
        assert [process.communicate()[0].split() for process in started] == [["started", commit]] * 4


class TestBrokenMirror:
    @pytest.mark.parametrize("damage", ["packs", "head", "refs", "everything", "is_file", "config"])
    def test_is_made_anew(self, repository, mirror, tmp_path, damage):
        repository.commit({f"file{number}": str(number) * 100 for number in range(30)})
        first = mirror().fetch()
        _damage(tmp_path / "mirrors" / "one.git", damage)
        one = mirror()
        assert one.fetch() == first
        assert len(contents(one, first)) == 30

    def test_a_lost_blob_is_an_error_once_and_healed_by_the_next_fetch(self, repository, mirror, tmp_path):
        repository.commit({"a": "1" * 100, "b": "2"})
        one = mirror()
        snapshot = one.fetch()
        _remove_objects(tmp_path / "mirrors" / "one.git")
        with pytest.raises(SourceUnreachable):
            list(one.read(entry.oid for entry in snapshot.entries))
        assert one.fetch() == snapshot
        assert len(contents(one, snapshot)) == 2

    def test_leftovers_of_a_kill_do_not_stop_a_fetch(self, repository, mirror, tmp_path):
        repository.commit({"a": "1"})
        mirror().fetch()
        directory = tmp_path / "mirrors" / "one.git"
        (directory / "shallow.lock").write_text("")
        (directory / "refs" / "sluicegate" / "head.lock").write_text("")
        (directory / "objects" / "pack" / "tmp_pack_x").write_text("half")
        (tmp_path / "mirrors" / "one.git.new").mkdir()
        commit = repository.commit({"a": "2"})
        assert mirror().fetch().revision == commit
        assert not list(directory.rglob("*.lock"))
        assert not list(directory.rglob("tmp_*"))

    def test_a_fetch_killed_at_any_moment_is_completed_by_the_next(self, repository, mirror, tmp_path):
        commit = repository.commit({f"file{number}": os.urandom(20_000) for number in range(100)})
        directory = tmp_path / "mirrors" / "one.git"
        for milliseconds in (5, 25, 60, 120):
            command = [sys.executable, "-c", FETCH, str(directory), str(repository.path)]
            with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
                process.stdout.readline()
                threading.Timer(milliseconds / 1000, process.kill).start()
            one = mirror()
            snapshot = one.fetch()
            assert snapshot.revision == commit
            assert len(contents(one, snapshot)) == 100
            shutil.rmtree(directory)


class TestIsolation:
    def test_hooks_and_configuration_of_outside_are_not_read(self, repository, mirror, tmp_path, monkeypatch):
        repository.commit({"a": "1"})
        trap, home = tmp_path / "trap", tmp_path / "home"
        hook = tmp_path / "hooks" / "reference-transaction"
        hook.parent.mkdir()
        hook.write_text(f"#!/bin/sh\ntouch {trap}\n")
        hook.chmod(0o755)
        home.mkdir()
        (home / ".gitconfig").write_text(f'[core]\n hooksPath = {hook.parent}\n[url "/nowhere"]\n insteadOf = /\n')
        monkeypatch.setenv("HOME", str(home))
        monkeypatch.setenv("GIT_DIR", "/nowhere")
        monkeypatch.setenv("GIT_CONFIG_PARAMETERS", "'core.hookspath=/nowhere'")
        monkeypatch.setenv("GIT_TRACE", str(trap))
        assert mirror().fetch()
        assert not trap.exists()

    @pytest.mark.parametrize("url", ["http://127.0.0.1:1/x", "git://127.0.0.1/x", "ext::sh -c id", "ftp://h/x"])
    def test_git_itself_refuses_other_protocols(self, url):
        with pytest.raises(git_module.GitFailed) as error:
            git_module.Git(10).run("ls-remote", "--", url)
        assert "not allowed" in error.value.message

    def test_errors_are_one_bounded_line_without_secrets(self, monkeypatch):
        monkeypatch.setenv("HOME", "/home/someone")
        message = git_module.scrub(b"fatal: https://user:secret@host/x\n\x1b[31m/home/someone/.ssh/id\n" + b"x" * 300)
        assert "secret" not in message
        assert "someone" not in message
        assert message.isprintable()
        assert len(git_module.scrub(b"y" * 5000)) == 400

    def test_roots_are_checked_when_the_mirror_is_made(self, tmp_path, repository, mirror):
        with pytest.raises(SourceRefused):
            mirror(source_roots=[tmp_path / "elsewhere"])


class TestDecode:
    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            (b"", ""),
            ("žluťoučký 漢字 한국어 🎉\r\n".encode(), "žluťoučký 漢字 한국어 🎉\r\n"),
            (b"\xef\xbb\xbfmarked", "marked"),
            ("wide".encode("utf-16"), "wide"),
            ("prix : 5 €".encode("cp1252"), Skip.NOT_DECODABLE),
            (b"\x89PNG\r\n\x1a\n\x00\x00\xff", Skip.BINARY),
            (b"a\x00b", Skip.NUL),
            ("a\0b".encode("utf-16"), Skip.NUL),
            (b"\xff\xfe\x00", Skip.BINARY),
            (b"\xed\xa0\x80", Skip.NOT_DECODABLE),
            (b"x" * 101, Skip.TOO_LARGE),
            (b"x" * 100, "x" * 100),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", Skip.LFS_POINTER),
        ],
    )
    def test_text_or_the_reason(self, content, expected):
        assert decode(content, 100) == expected

    def test_reasons_are_no_text(self):
        assert not any(isinstance(reason, str) for reason in Skip)
        assert Skip.NOT_DECODABLE.value == "not_decodable"


class TestMatches:
    @pytest.mark.parametrize(
        ("path", "include", "exclude", "wanted"),
        [
            ("a/b.py", [], [], True),
            ("a/b.py", ["*.py"], [], True),
            ("a/b.md", ["*.py"], [], False),
            ("src/x/y.c", ["src/**"], [], True),
            ("lib/src/y.c", ["src/**"], [], False),
            ("lib/src/y.c", ["src/"], [], True),
            ("setup.py", ["/setup.py"], [], True),
            ("a/setup.py", ["/setup.py"], [], False),
            ("a/b.py", ["*.py"], ["a/"], False),
            ("a/b.py", ["*.py", "*.md"], ["*.md"], True),
            ("vendor/x.js", [], ["vendor/", "*.min.js"], False),
            ("vendor/ours/x.js", [], ["vendor/**", "!vendor/ours/**"], True),
            ("new\nline", ["*"], [], True),
        ],
    )
    def test_patterns_are_those_of_gitignore(self, path, include, exclude, wanted):
        assert matches(path, include, exclude) is wanted


def _group_lives(group: int) -> bool:
    try:
        os.kill(-group, 0)
    except ProcessLookupError:
        return False
    return True


def _damage(directory: Path, damage: str) -> None:
    if damage == "packs":
        _remove_objects(directory)
    elif damage == "head":
        (directory / "HEAD").write_text("nonsense")
    elif damage == "refs":
        shutil.rmtree(directory / "refs")
    elif damage == "config":
        (directory / "config").write_text("[[[")
    else:
        shutil.rmtree(directory)
        if damage == "is_file":
            directory.write_text("")


def _remove_objects(directory: Path) -> None:
    shutil.rmtree(directory / "objects")
    (directory / "objects").mkdir()
