"""Sources and refs: what git may be given, and that a refusal repeats no secret."""

import os

import pytest

from embeddings.knowledge.address import validate_ref, validate_source
from embeddings.knowledge.source import SourceRefused
from tests.support.git_repositories import GitRepository


@pytest.mark.parametrize(
    "source",
    [
        "https://example.org/team/repo.git",
        "https://example.org:8443/team/repo",
        "https://[::1]:8443/x",
        "ssh://git@example.org/team/repo.git",
        "ssh://example.org:2222/team/repo.git",
        "git@example.org:team/repo.git",
        "example.org:team/repo.git",
        "/srv/git/with space/repo",
    ],
)
def test_accepted_as_they_are(source):
    assert validate_source(source, None) == source
    assert validate_source(f"  {source}\n", None) == source


@pytest.mark.parametrize(
    ("source", "normalised"),
    [
        ("file:///srv/git/a%20b", "/srv/git/a b"),
        ("file://localhost/srv/git", "/srv/git"),
        ("/srv//git/../x/", "/srv/x"),
        ("repo", "{cwd}/repo"),
        ("./a:b", "{cwd}/a:b"),
    ],
)
def test_local_sources_become_absolute_paths(source, normalised):
    assert validate_source(source, None) == normalised.format(cwd=os.getcwd())


@pytest.mark.parametrize(
    "source",
    [
        "",
        "   ",
        "x" * 1001,
        "-oProxyCommand=id",
        "--upload-pack=id",
        "ext::sh -c id",
        "fd::17",
        "http://example.org/x",
        "git://example.org/x",
        "ftp://example.org/x",
        "HTTPS+x://example.org/x",
        "https://user:s3cret@example.org/x",
        "https://s3cret@example.org/x",
        "https://@example.org/x",
        "ssh://git:s3cret@example.org/x",
        "ssh://-oProxyCommand=s3cret/x",
        "ssh://-s3cret@example.org/x",
        "-s3cret@example.org:x",
        "git:s3cret@example.org:x",
        "git@-s3cret:x",
        "git@example.org:-s3cret",
        "https://example.org/x?token=s3cret",
        "https://example.org/x#s3cret",
        "https://example.org",
        "https:///x",
        "https://[::1/x",
        "https://example.org:port/x",
        "file://elsewhere/srv/git",
        "file:///srv/%00s3cret",
        "/srv/a\x00s3cret",
        "/srv/a\ns3cret",
        "https://example.org/\x1b[31m",
        "https://exa mple.org/x",
    ],
)
def test_refused_in_one_line_that_repeats_nothing(source):
    with pytest.raises(SourceRefused) as error:
        validate_source(source, None)
    assert error.value.code == "KB_SOURCE_REFUSED"
    message = str(error.value)
    assert message
    assert message.isprintable()
    assert "s3cret" not in message


class TestRoots:
    def test_only_under_a_root(self, tmp_path):
        inside, outside = tmp_path / "root" / "repo", tmp_path / "rooted"
        for directory in (inside, outside):
            directory.mkdir(parents=True)
        assert validate_source(str(inside), [tmp_path / "other", tmp_path / "root"]) == str(inside)
        for source in (outside, tmp_path / "root" / ".." / "rooted", "/"):
            with pytest.raises(SourceRefused):
                validate_source(str(source), [tmp_path / "root"])

    def test_no_roots_is_nowhere_and_urls_need_none(self, tmp_path):
        with pytest.raises(SourceRefused):
            validate_source(str(tmp_path), [])
        assert validate_source("https://example.org/x", [])

    def test_links_are_followed_before_they_are_judged(self, tmp_path):
        root = tmp_path / "root"
        root.mkdir()
        (tmp_path / "secret").mkdir()
        (root / "link").symlink_to(tmp_path / "secret")
        (root / "loop").symlink_to(root / "loop")
        with pytest.raises(SourceRefused):
            validate_source(str(root / "link"), [root])
        assert validate_source(str(root / "loop"), [root])

    def test_a_root_that_is_a_link(self, tmp_path):
        (tmp_path / "real" / "repo").mkdir(parents=True)
        (tmp_path / "root").symlink_to(tmp_path / "real")
        assert validate_source(str(tmp_path / "real" / "repo"), [tmp_path / "root"])

    def test_a_git_file_or_link_may_not_point_out_of_the_roots(self, tmp_path):
        secret = GitRepository(tmp_path / "secret")
        root = tmp_path / "root"
        (root / "pointer").mkdir(parents=True)
        (root / "pointer" / ".git").write_text(f"gitdir: {secret.path}/.git\n")
        (root / "linked").mkdir()
        (root / "linked" / ".git").symlink_to(secret.path / ".git")
        for name in ("pointer", "linked"):
            with pytest.raises(SourceRefused):
                validate_source(str(root / name), [root])
            assert validate_source(str(root / name), [tmp_path])


@pytest.mark.parametrize("ref", ["", "main", "feature/x-1", "v1.2.3", "refs/heads/main", "ab" * 20, "0" * 64, "é"])
def test_refs_accepted(ref):
    assert validate_ref(f" {ref} ") == ref


@pytest.mark.parametrize(
    "ref",
    [
        *("-x", "--all", "a b", "a..b", "a~1", "a^", "a:b", "a?", "a*", "a[", "a\\", "/a", "a/", "a.", ".a", "a/.b"),
        *("a.lock", "a.lock/b", "@", "a@{1}", "a//b", "a\x00b", "a\nb", "x" * 1001),
    ],
)
def test_refs_refused(ref):
    with pytest.raises(SourceRefused):
        validate_ref(ref)


def test_a_commit_id_is_lower_case():
    assert validate_ref("AB" * 20) == "ab" * 20
