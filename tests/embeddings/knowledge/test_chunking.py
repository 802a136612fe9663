"""Chunks are whole lines, in order, within the limits, at places that syntax allows, in bounded time."""

import os
import random
import resource
import signal
import string
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from embeddings.knowledge import chunking, grammars, syntax
from embeddings.knowledge.chunking import Chunk, ChunkLimits, chunk
from embeddings.knowledge.token_estimate import estimate_tokens, weigh
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[3]
DEFAULT = ChunkLimits()
NAMES = ["a.py", "a.md", "a.json", "a.html", "a.sql", "a.c", "a.txt", "Makefile", "a.yaml"]
# Blank lines and indentation alone would part each of them inside its string.
FUNCTIONS = "\n".join(
    f'def f{number}():\n    s = """\n' + "a line\n\n" * 10 + '"""\n    return s' for number in range(12)
)

awkward = st.text(
    st.one_of(
        st.sampled_from("\n\n\r\x0b\x0c\x1c\x85\u2028\u2029 \t{}()[]:;\"'#-*>`<=,a1_é漢한🎉\u0301\u200b\ufeff"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=400,
)
limits = st.builds(ChunkLimits, max_characters=st.integers(1, 80), max_tokens=st.integers(8, 60))


def check(text: str, limits: ChunkLimits, chunks: list[Chunk]) -> None:
    """Every promise of `chunk` about places and sizes."""
    lines = text.split("\n")
    assert [part.ordinal for part in chunks] == list(range(len(chunks)))
    for part in chunks:
        place = "\n".join(lines[part.start_line - 1 : part.end_line])
        assert part.text == place or (part.start_line == part.end_line and part.text in place)
        assert part.text.strip()
        assert len(part.text) <= limits.max_characters
        assert estimate_tokens(part.text) <= limits.max_tokens
    _check_coverage(lines, chunks)


def _check_coverage(lines: list[str], chunks: list[Chunk]) -> None:
    covered: dict[int, str] = {}
    for part in chunks:
        if part.start_line == part.end_line:
            covered[part.start_line] = covered.get(part.start_line, "") + part.text
        else:
            for number in range(part.start_line, part.end_line + 1):
                assert number not in covered
                covered[number] = lines[number - 1]
    assert list(covered) == sorted(covered)
    for number, line in enumerate(lines, start=1):
        # Blank parts of a line that was cut inside are dropped.
        assert "".join(covered.get(number, "").split()) == "".join(line.split())


class TestEveryText:
    @given(st.sampled_from(NAMES), awkward, limits)
    @settings(max_examples=300, deadline=None)
    @example("a.py", "\n", ChunkLimits(1, 8))
    @example("a.py", "x" * 200, ChunkLimits(50, 8))
    @example("a.txt", "한" * 40, ChunkLimits(80, 8))
    @example("a.txt", "a\r\nb\rc\n\r\n\x0cd", ChunkLimits(3, 8))
    @example("a.md", "\n\n" + "x" * 90 + "\n  \n" + "y" * 90, ChunkLimits(80, 60))
    def test_lines_are_right_and_limits_hold(self, name, text, limits):
        check(text, limits, chunk(name, text, limits))

    @given(awkward, limits, st.lists(st.integers(0, 400), max_size=30))
    @settings(max_examples=300, deadline=None)
    def test_whatever_a_splitter_proposes(self, text, limits, offsets):
        file = chunking._File(text, limits)
        spans = file.joined(file.spans([offset for offset in offsets if offset < len(text)]))
        pieces = [piece for begin, stop in spans for piece in file.pieces(begin, stop)]
        check(text, limits, [Chunk(n, a + 1, b + 1, piece) for n, (a, b, piece) in enumerate(pieces)])

    @pytest.mark.parametrize("grammar", [*grammars._BY_SUFFIX, grammars.TEXT])
    def test_each_grammar_parts_a_text_without_loss(self, grammar):
        text = "é {[(a = 'b')]}\n\n# c: 1\n" * 40
        splitter = grammars.splitter(grammar, 200)
        parts = splitter.chunk_indices(text)
        assert len(parts) > 3
        assert "".join(part for _, part in parts) == text
        assert all(text[offset : offset + len(part)] == part for offset, part in parts)

    def test_real_files_of_this_project(self):
        for path in [*ROOT.glob("embeddings/**/*.py"), *ROOT.glob("*.toml"), *ROOT.glob("docs/**/*.md")]:
            text = path.read_text()
            chunks = chunk(path.name, text, DEFAULT)
            check(text, DEFAULT, chunks)
            assert len(chunks) <= 2 + len(text) // 300


class TestPlaces:
    def test_a_small_file_is_one_chunk_without_its_blank_edges(self):
        assert chunk("a.py", "\n\nx = 1\n\ny = 2\n\n", DEFAULT) == [Chunk(0, 3, 5, "x = 1\n\ny = 2")]

    @pytest.mark.parametrize("text", ["", "\n", " \n\t\r\n\x0c\n", "\u2003" * 5000])
    def test_blank_text_has_no_chunk(self, text):
        assert chunk("a.py", text, DEFAULT) == []

    def test_carriage_returns_stay_in_the_text(self):
        assert chunk("a.txt", "a\r\nb\rc\r\n", DEFAULT) == [Chunk(0, 1, 2, "a\r\nb\rc\r")]

    def test_only_line_feeds_count_as_lines(self):
        text = "a\x0cb\x1cc\u2028d\x85e\n" + "f\n"
        assert chunk("a.txt", text, ChunkLimits(10, 512)) == [
            Chunk(0, 1, 1, "a\x0cb\x1cc\u2028d\x85e"),
            Chunk(1, 2, 2, "f"),
        ]

    def test_functions_are_not_cut_where_they_fit(self):
        chunks = chunk("a.py", FUNCTIONS, ChunkLimits(180, 200))
        assert len(chunks) == 12
        assert all(part.text.startswith("def f") and part.text.endswith("return s") for part in chunks)

    def test_the_twin_without_syntax_cuts_functions(self, monkeypatch):
        monkeypatch.setattr(syntax, "cuts", lambda path, text, capacity: [])
        chunks = chunk("a.py", FUNCTIONS, ChunkLimits(180, 200))
        assert not all(part.text.startswith("def f") for part in chunks)

    def test_markdown_is_cut_at_headings(self):
        sections = [f"## Part {number}\n\n" + "Some words here.\n" * 8 for number in range(9)]
        chunks = chunk("a.md", "\n".join(sections), ChunkLimits(220, 512))
        assert [part.text.splitlines()[0] for part in chunks] == [f"## Part {number}" for number in range(9)]

    def test_a_long_line_is_cut_at_words(self):
        text = "short\n" + "word " * 1000 + "\nshort"
        chunks = chunk("a.txt", text, DEFAULT)
        check(text, DEFAULT, chunks)
        assert [part.start_line for part in chunks] == [1, 2, 2, 2, 2, 2, 3]
        assert all(part.text.startswith("word") for part in chunks[1:-1])

    def test_limits_too_small_for_a_character_are_refused(self):
        for values in ((0, 512), (1200, 7)):
            with pytest.raises(ValueError, match="at least"):
                ChunkLimits(*values)


class TestGrammarOf:
    @pytest.mark.parametrize(
        ("path", "grammar"),
        [
            ("a/b.py", "python"),
            ("A.PY", "python"),
            ("x.tsx", "typescript:language_tsx"),
            ("README.md", grammars.MARKDOWN),
            ("Gemfile", "ruby"),
            ("LICENSE", grammars.TEXT),
            (".py", grammars.TEXT),
            ("a.unknown", grammars.TEXT),
            ("d.py/file", grammars.TEXT),
        ],
    )
    def test_by_name(self, path, grammar):
        assert grammars.grammar_of(path) == grammar


class TestEstimate:
    @pytest.mark.parametrize(
        ("text", "least"),
        # What the WordPiece tokenizer of all-MiniLM-L6-v2 counts.
        [
            ("", 2),
            ("self.assertEqual(response.status_code, 200)", 16),
            ("def get_queryset(self):\n    return super().get_queryset()", 22),
            ("漢字漢字", 6),
            ("한국어", 10),
            ("QUJDREVGR0hJSktMTU5PUFFSU1RVVldYWVo=", 26),
            ("x=e=>t(n,r);var o=1e3;", 21),
            ("0123456789", 9),
        ],
    )
    def test_is_not_below_a_real_tokenizer(self, text, least):
        assert estimate_tokens(text) >= least

    @given(st.lists(awkward, max_size=6))
    def test_units_of_lines_add_up(self, parts):
        lines = "\n".join(parts).split("\n")
        assert weigh("\n".join(lines)) == sum(map(weigh, lines))

    def test_dense_text_is_cut_smaller_than_prose(self):
        prose = "the value of this line is the name of the file\n" * 200
        dense = "".join(random.Random(1).choices(string.punctuation, k=9000))
        assert max(len(part.text) for part in chunk("a", prose, DEFAULT)) > 800
        assert max(len(part.text) for part in chunk("a", dense, DEFAULT)) <= 510


class TestBounds:
    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("a.js", "a+b(" * 250_000),
            ("a.json", "[" * 200_000 + "]" * 200_000),
            ("a.json", "[\n" * 50_000 + "]\n" * 50_000),
            ("a.py", "x\n" * 100_000),
            ("a.md", "- x\n" * 50_000),
            ("a.md", "*_*[`_\n" * 20_000),
            ("a.txt", "漢" * 300_000),
            ("a.css", "a\n" * 20_000),
            ("a.py", "/*\n" * 5_333),
        ],
    )
    def test_pathological_texts_cost_seconds_at_most(self, name, text):
        own, children = time.process_time(), _cpu_of_children()
        chunks = chunk(name, text, DEFAULT)
        syntax._close_idle()
        assert time.process_time() - own < 5
        assert _cpu_of_children() - children < 5
        check(text, DEFAULT, chunks)

    def test_a_text_that_kills_its_parser_leaves_the_next_one_alone(self):
        assert syntax.cuts("a.py", "/*\n" * 5_333, 1200) == []
        assert syntax.cuts("a.py", "def f():\n    return 1\n\n\n" * 100, 1200) != []

    def test_the_twin_without_the_kernels_limit_the_parser_goes_on(self, tmp_path):
        unbounded = tmp_path / "unbounded.py"
        unbounded.write_text(Path(grammars.__file__).read_text().replace("signal.setitimer", "max"))
        command = [sys.executable, "-I", str(unbounded)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            process.stdin.write(b'{"grammar": "python", "capacity": 1200, "bytes": 15999}\n' + b"/*\n" * 5_333)
            process.stdin.flush()
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(1.5)
            process.kill()

    def test_parser_processes_that_were_killed_while_idle_are_replaced(self):
        text = "def f():\n    return 1\n\n\n" * 100
        first = syntax.cuts("a.py", text, 400)
        syntax._idle.append(syntax._Process())
        for process in syntax._idle:
            os.kill(process._process.pid, signal.SIGKILL)
            process._process.wait()
        assert syntax.cuts("a.py", text, 400) == first != []

    @pytest.mark.parametrize(
        "text", [FUNCTIONS, FUNCTIONS + "\nx = 1" * 20_000], ids=["short", "longer than a pipe holds"]
    )
    def test_a_parser_that_is_stopped_costs_its_text_the_syntax_and_no_other(self, text, monkeypatch):
        first = syntax.cuts("a.py", text, 200)
        stopped = _stop_the_idle_parser()
        with monkeypatch.context() as patch:
            patch.setattr(syntax, "_PATIENCE_S", 0.2)
            patch.setattr(syntax, "_WALL_SECONDS_PER_CPU_SECOND", 0)
            assert syntax.cuts("a.py", text, 200) == []
        _eventually_gone(stopped)
        assert syntax.cuts("a.py", text, 200) == first != []

    def test_the_twin_without_a_deadline_the_text_waits_for_the_stopped_parser(self, monkeypatch):
        first = syntax.cuts("a.py", FUNCTIONS, 200)
        stopped = _stop_the_idle_parser()
        monkeypatch.setattr(syntax, "_PATIENCE_S", 3600.0)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(syntax.cuts, "a.py", FUNCTIONS, 200)
            with pytest.raises(TimeoutError):
                asked.result(1.5)
            os.kill(stopped, signal.SIGCONT)
            assert asked.result(30) == first != []

    def test_threads_share_the_processes(self):
        text = "def f():\n    return 1\n\n\n" * 100
        with ThreadPoolExecutor(6) as pool:
            results = list(pool.map(lambda _: chunk("a.py", text, DEFAULT), range(24)))
        assert all(result == results[0] for result in results)
        assert len(syntax._idle) <= syntax._MAX_PROCESSES

    def test_no_process_outlives_its_starter(self):
        script = (
            "import os\nfrom embeddings.knowledge import syntax\n"
            "syntax.cuts('a.py', 'x = 1\\n' * 900, 600)\n"
            "print(syntax._idle[0]._process.pid, flush=True)\nos.kill(os.getpid(), 9)"
        )
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
        _eventually_gone(int(done.stdout))


def _stop_the_idle_parser() -> int:
    """SIGSTOP to the parser that the next text will get; closes the others."""
    while len(syntax._idle) > 1:
        syntax._idle.pop().close()
    pid = syntax._idle[0]._process.pid
    os.kill(pid, signal.SIGSTOP)
    return pid


def _cpu_of_children() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _eventually_gone(pid: int) -> None:
    def is_gone() -> bool:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        return state == "Z"

    eventually(is_gone)
