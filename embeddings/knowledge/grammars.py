"""Grammars by file name, and the process that finds cuts with them (docs/architecture.md, Sweep).

Run as a script, this module answers requests on standard input. It is a process of its own because a parser's error recovery
has no bound (16 KB of nonsense kept the Python grammar busy for 50 s) and cannot be interrupted from inside: here
the kernel ends the process when a text has used up its CPU time. It imports nothing of this project.
"""

import importlib
import json
import signal
import sys
from functools import lru_cache
from pathlib import PurePosixPath
from typing import BinaryIO

from semantic_text_splitter import CodeSplitter, MarkdownSplitter, TextSplitter

MARKDOWN = "markdown"
TEXT = "text"

_BY_SUFFIX = {
    "bash": "bash sh zsh bats ksh",
    "c": "c h",
    "c_sharp": "cs csx",
    "cpp": "cc cpp cxx c++ hh hpp hxx h++ inl ipp cu cuh ino",
    "css": "css",
    "go": "go",
    "html": "html htm xhtml",
    "java": "java",
    "javascript": "js jsx mjs cjs",
    "json": "json jsonc geojson webmanifest ipynb",
    "php:language_php": "php phtml",
    "python": "py pyi pyw",
    "ruby": "rb rake gemspec ru",
    "rust": "rs",
    "sql": "sql",
    "toml": "toml",
    "typescript:language_tsx": "tsx",
    "typescript:language_typescript": "ts mts cts",
    "yaml": "yaml yml",
    MARKDOWN: "md markdown mdx mdown",
}
_GRAMMAR_OF_SUFFIX = {f".{suffix}": grammar for grammar, suffixes in _BY_SUFFIX.items() for suffix in suffixes.split()}
_GRAMMAR_OF_NAME = {
    "Rakefile": "ruby",
    "Gemfile": "ruby",
    "Cargo.lock": "toml",
    "poetry.lock": "toml",
    "Pipfile": "toml",
}

# About ten times the cost of well-formed text.
_CPU_SECONDS = 0.25
_CPU_SECONDS_PER_BYTE = 2e-6


def cpu_limit_s(size: int) -> float:
    """The CPU time a text of `size` bytes may use."""
    return _CPU_SECONDS + _CPU_SECONDS_PER_BYTE * size


def grammar_of(path: str) -> str:
    """The grammar for a file name; TEXT if none is known."""
    name = PurePosixPath(path)
    return _GRAMMAR_OF_NAME.get(name.name) or _GRAMMAR_OF_SUFFIX.get(name.suffix.lower(), TEXT)


@lru_cache(maxsize=64)
def splitter(grammar: str, capacity: int) -> CodeSplitter | MarkdownSplitter | TextSplitter:
    """A splitter into parts of two thirds of `capacity` up to `capacity` characters."""
    limits = (max(1, capacity * 2 // 3), capacity)
    if grammar == MARKDOWN:
        return MarkdownSplitter(limits, trim=False)
    if grammar == TEXT:
        return TextSplitter(limits, trim=False)
    module, _, function = grammar.partition(":")
    language = getattr(importlib.import_module(f"tree_sitter_{module}"), function or "language")
    return CodeSplitter(language(), limits, trim=False)


def answer_requests(requests: BinaryIO, answers: BinaryIO) -> None:
    """Answers each request with a JSON line of offsets.

    A request is a JSON line with `grammar`, `capacity` and `bytes` (the length of the text), followed by the text.
    """
    while header := requests.readline():
        request = json.loads(header)
        text = requests.read(request["bytes"]).decode("utf-8")
        part_of = splitter(request["grammar"], request["capacity"])
        signal.setitimer(signal.ITIMER_PROF, cpu_limit_s(request["bytes"]))
        offsets = [offset for offset, _ in part_of.chunk_indices(text)]
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(json.dumps(offsets).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    answer_requests(sys.stdin.buffer, sys.stdout.buffer)
