"""The parts of `make demo` and `make up` that can be tried in a moment; the whole of them is tried by running them."""

import socket
import subprocess

import pytest
from django.contrib.auth import get_user_model

from embeddings.models import Provider
from project.local import demo, first_start, up


def git(repository, *words):
    return subprocess.run(["git", "-C", str(repository), *words], capture_output=True, text=True, check=True).stdout


def test_the_second_repository_has_the_same_commit_wherever_it_is_made(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        demo._make_django_repository(tmp_path / name)
    first, second = (demo._django_path(tmp_path / name) for name in ("a", "b"))
    assert git(first, "rev-parse", "HEAD") == git(second, "rev-parse", "HEAD")
    assert "django/contrib/auth/hashers.py" in git(first, "ls-files").split()
    assert git(first, "status", "--porcelain") == ""


def test_it_is_made_once_and_a_half_made_one_is_made_anew(tmp_path):
    demo._make_django_repository(tmp_path)
    repository = demo._django_path(tmp_path)
    inode = repository.stat().st_ino
    demo._make_django_repository(tmp_path)
    assert repository.stat().st_ino == inode
    (repository / ".git" / "refs" / "heads" / "main").unlink()
    demo._make_django_repository(tmp_path)
    assert git(repository, "rev-list", "--count", "HEAD") == "1\n"


def test_what_another_version_of_the_demo_left_is_forgotten(tmp_path):
    var_dir = tmp_path / "demo"
    demo._begin_anew_if_changed(var_dir)
    (var_dir / "made").write_text(demo._signature(var_dir))
    demo._begin_anew_if_changed(var_dir)
    assert (var_dir / "made").exists()
    (var_dir / "made").write_text("repository add acme other /elsewhere\n")
    demo._begin_anew_if_changed(var_dir)
    assert not list(var_dir.iterdir())


def test_a_checkout_without_commits_is_told_so_in_one_line(tmp_path):
    with pytest.raises(demo.DemoError, match="not a git repository with commits") as caught:
        demo._need_commits(tmp_path)
    assert "\n" not in str(caught.value)
    git(tmp_path, "init", "--quiet")
    with pytest.raises(demo.DemoError, match="not a git repository with commits"):
        demo._need_commits(tmp_path)


def test_a_command_that_fails_ends_the_demo_with_one_line(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("SLUICEGATE_DEMO_DIR", str(tmp_path))

    def play(var_dir):
        stage = demo.Stage(var_dir, demo.local_environment(var_dir))
        stage.manage("no-such-command")

    monkeypatch.setattr(demo, "play", play)
    monkeypatch.setattr("signal.signal", lambda number, handler: None)
    assert demo.main() == 1
    said = capfd.readouterr()
    assert "$ manage.py no-such-command" in said.out
    assert said.err.splitlines()[-1] == "error: `manage.py no-such-command` ended with exit status 1"


@pytest.mark.django_db
def test_the_first_start_makes_an_admin_and_a_provider_once(capsys):
    urls = ("http://127.0.0.1:8000", "http://127.0.0.1:8089/v1")
    first_start.main(urls)
    first = capsys.readouterr().out
    first_start.main(urls)
    second = capsys.readouterr().out
    admin = get_user_model().objects.get()
    assert admin.is_superuser
    assert "http://127.0.0.1:8000/admin/" in first
    password = first.split("password ")[1].split()[0]
    assert admin.check_password(password)
    assert "password" not in second
    assert Provider.objects.get().base_url == "http://127.0.0.1:8089/v1"


@pytest.mark.django_db
def test_the_first_start_leaves_the_providers_that_are_there_alone(capsys):
    Provider.objects.create(name="own", kind="ollama", base_url="http://127.0.0.1:11434", embedding_model="m")
    first_start.main(("http://127.0.0.1:8000", "http://127.0.0.1:8089/v1"))
    assert [provider.name for provider in Provider.objects.all()] == ["own"]


def test_a_taken_port_is_named_before_anything_starts(tmp_path, monkeypatch, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        monkeypatch.setenv("SLUICEGATE_PORT", str(port))
        monkeypatch.setenv("VAR_DIR", str(tmp_path / "var"))
        assert up.main() == 1
    assert f"port {port} on 127.0.0.1 is in use" in capsys.readouterr().err
    assert not (tmp_path / "var").exists()
