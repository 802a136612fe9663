"""The mutation proof (`make mutations`) stays true to the tree: each text stands once, and the named tests exist."""

import pytest

from tests.mutations import page
from tests.mutations.__main__ import ROOT, Result, mutated, table
from tests.mutations.catalogue import MUTATIONS
from tests.mutations.mutation import Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_each_breaks_one_place_and_names_tests_that_exist(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text()
    broken = mutated(text, mutation)
    assert broken != text
    compile(broken, mutation.file, "exec")
    files = [word for word in mutation.tests if word.startswith("tests/")]
    assert files
    for file, _, name in (word.partition("::") for word in files):
        assert not name or f"class {name}" in (ROOT / file).read_text()


def test_names_are_unlike() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


def test_text_that_does_not_stand_once_is_refused() -> None:
    mutation = Mutation("name", "-", "file", "old", "new", ())
    for text in ("", "old old"):
        with pytest.raises(ValueError, match="not once"):
            mutated(text, mutation)


def test_the_table() -> None:
    shown = table([Result(MUTATIONS[0], "seen", "test_x.py::test_y", 1.0)])
    assert f"| {MUTATIONS[0].name} | G1 |" in shown


def test_the_page_of_the_last_run_has_each_with_the_test_that_saw_it() -> None:
    rows = [line.split(" | ") for line in page.rows().values()]
    assert [row[0][2:] for row in rows] == [mutation.name for mutation in MUTATIONS]
    assert {row[3] for row in rows} == {"seen"}
    for row in rows:
        file, _, test = row[4].strip("` |").rpartition("::")
        assert f"def {test}(" in (ROOT / "tests" / file.partition("::")[0]).read_text()
