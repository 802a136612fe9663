"""What the documents say of the code is true of this commit."""

from __future__ import annotations

import re

import pytest

from tests.conftest import REPOSITORY_ROOT

README = (REPOSITORY_ROOT / "README.md").read_text()
ARCHITECTURE = (REPOSITORY_ROOT / "docs" / "architecture.md").read_text()
SETTINGS = (REPOSITORY_ROOT / "project" / "settings.py").read_text()


def read_variables() -> list[str]:
    return sorted(set(re.findall(r'_env\.\w+\(\s*"([A-Z_]+)"', SETTINGS)))


@pytest.mark.parametrize("variable", read_variables())
def test_the_readme_lists_every_setting(variable):
    assert f"`{variable}`" in README


def test_every_link_of_the_readme_leads_somewhere():
    targets = re.findall(r"\]\(((?!https?:)[^)#]+)\)", README)
    assert targets
    assert [target for target in targets if not (REPOSITORY_ROOT / target).exists()] == []


def test_every_test_that_the_architecture_names_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?(?:::(\w+))?`", ARCHITECTURE)
    assert len(named) > 20
    missing = [
        "::".join(filter(None, (path, *names)))
        for path, *names in named
        if not (REPOSITORY_ROOT / path).exists()
        or any(name not in (REPOSITORY_ROOT / path).read_text() for name in names if name)
    ]
    assert missing == []


def test_the_timeout_codes_stand_as_literals_in_one_module():
    codes = re.compile(r"""["'](PROVIDER_TIMEOUT|OPENAI_COMPATIBLE_REQUEST_TIMEOUT|ETIMEDOUT|ESOCKETTIMEDOUT)["']""")
    holders = {
        str(path.relative_to(REPOSITORY_ROOT))
        for app in ("embeddings", "streaming", "project")
        for path in (REPOSITORY_ROOT / app).rglob("*.py")
        if codes.search(path.read_text())
    }
    assert holders == {"embeddings/timeouts.py"}


def test_the_architecture_is_read_in_one_sitting():
    assert len(ARCHITECTURE.split()) <= 3_500


def test_pages_are_wrapped():
    pages = [REPOSITORY_ROOT / "docs" / "architecture.md", *(REPOSITORY_ROOT / "docs" / "decisions").glob("*.md")]
    long = [
        f"{page.name}: {line}"
        for page in pages
        for line in page.read_text().splitlines()
        if len(line) > 120 and not line.startswith(("|", "  |", "http"))
    ]
    assert long == []


def test_every_section_that_a_docstring_names_exists():
    """`docs/architecture.md, Data and states, ChatTurn`: headings, or terms in bold."""
    headings = set(re.findall(r"^#+ (.+)$", ARCHITECTURE, re.MULTILINE)) | set(
        re.findall(r"\*\*(.+?)\*\*", ARCHITECTURE)
    )
    named = {
        section.strip()
        for app in ("embeddings", "streaming", "project")
        for path in (REPOSITORY_ROOT / app).rglob("*.py")
        for sections in re.findall(r"docs/architecture\.md, ([A-Z][\w ,]+)\)", path.read_text())
        for section in re.split(r", | and (?=[A-Z])", sections)
    }
    assert named
    assert sorted(named - headings) == []
