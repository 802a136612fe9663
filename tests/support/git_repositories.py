"""Real git repositories for tests, built by git itself."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

_ENVIRONMENT = {
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_AUTHOR_NAME": "A. Author",
    "GIT_AUTHOR_EMAIL": "author@example.invalid",
    "GIT_COMMITTER_NAME": "A. Author",
    "GIT_COMMITTER_EMAIL": "author@example.invalid",
}


class GitRepository:
    """A repository with a worktree; every change is a commit on the branch that is checked out."""

    def __init__(self, path: Path, *, object_format: str = "sha1") -> None:
        self.path = path
        path.mkdir(parents=True, exist_ok=True)
        self.git("init", "--quiet", "--initial-branch=main", f"--object-format={object_format}")

    def git(self, *arguments: str) -> str:
        """Standard output of git in the worktree, stripped; raises CalledProcessError."""
        command = ["git", "-C", str(self.path), "-c", "protocol.file.allow=always", *arguments]
        environment = os.environ | _ENVIRONMENT
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()

    @property
    def head(self) -> str:
        """The full id of the commit that is checked out."""
        return self.git("rev-parse", "HEAD")

    def write(self, files: Mapping[str, str | bytes]) -> None:
        """Write files into the worktree without committing them."""
        for name, content in files.items():
            target = self.path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content if isinstance(content, bytes) else content.encode())

    def commit(self, files: Mapping[str, str | bytes] | None = None, *, message: str = "change") -> str:
        """Write files, commit everything in the worktree, return the commit's id."""
        self.write(files or {})
        self.git("add", "--all")
        self.git("commit", "--quiet", "--allow-empty", "--message", message)
        return self.head

    def remove(self, *names: str) -> str:
        """Delete files and commit."""
        self.git("rm", "--quiet", "-r", "--", *names)
        return self.commit(message="remove")

    def rename(self, old: str, new: str) -> str:
        """Move a file and commit."""
        (self.path / new).parent.mkdir(parents=True, exist_ok=True)
        self.git("mv", "--", old, new)
        return self.commit(message="rename")

    def branch(self, name: str, *, orphan: bool = False) -> None:
        """Create a branch and check it out; an orphan shares no history and starts with no file."""
        if orphan:
            self.git("checkout", "--quiet", "--orphan", name)
            self.git("rm", "--quiet", "-r", "-f", "--ignore-unmatch", ".")
        else:
            self.git("checkout", "--quiet", "-b", name)

    def checkout(self, name: str) -> None:
        """Check out an existing branch."""
        self.git("checkout", "--quiet", name)

    def rewrite(self, files: Mapping[str, str | bytes]) -> str:
        """Replace the branch's history by one new commit with these files alone, as a force push would."""
        name = self.git("branch", "--show-current")
        self.branch("rewritten", orphan=True)
        commit = self.commit(files, message="rewritten")
        self.git("branch", "--force", name, commit)
        self.checkout(name)
        self.git("branch", "-D", "rewritten")
        return commit

    def tag(self, name: str, *, annotated: bool = False) -> None:
        """Tag the commit that is checked out."""
        self.git("tag", *(("--annotate", "--message", name) if annotated else ()), name)

    def symlink(self, name: str, target: str) -> str:
        """Commit a symbolic link."""
        (self.path / name).symlink_to(target)
        return self.commit(message="link")

    def submodule(self, other: "GitRepository", name: str) -> str:
        """Commit another repository as a submodule."""
        self.git("submodule", "--quiet", "add", "--", str(other.path), name)
        return self.commit(message="submodule")
