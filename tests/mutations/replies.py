"""The mutations of replies: what a server puts into a stream arrives whole."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

KINDS = "tests/wires/test_reply_kinds.py"

REPLY_MUTATIONS = (
    Mutation(
        "a field that nobody knows is dropped",
        "-",
        "streaming/upstream/deltas.py",
        "if name not in _READ and not is_empty(value)}",
        'if name in ("audio",) and not is_empty(value)}',
        (KINDS, "-k", "any_field"),
    ),
    Mutation(
        "a fresh id begins a tool call",
        "-",
        "streaming/upstream/tool_calls.py",
        "        begins = is_named and (name is not None or index is None)\n",
        "        begins = name is not None\n",
        (KINDS, "-k", "a_tool_call_is_one"),
    ),
    Mutation(
        "a stop replaces any finish reason",
        "-",
        "streaming/upstream/chunks.py",
        'if is_finish and not (reason == "stop" and self.finish_reasons.get(index) in _TELLING_FINISHES):',
        "if is_finish:",
        (KINDS, "-k", "a_later_stop"),
    ),
    Mutation(
        "half an emoji is replaced at once",
        "-",
        "streaming/upstream/surrogates.py",
        'text[-1] <= "\\udbff" and not is_last:',
        'text[-1] <= "\\udbff" and is_last:',
        (KINDS, "-k", "any_field"),
    ),
    Mutation(
        "a stream under another type is a page",
        "-",
        "streaming/upstream/stream_start.py",
        "        if start.startswith(_FIRST_BYTES):\n",
        "        if False:\n",
        (KINDS, "-k", "another_type"),
    ),
    Mutation(
        "a keep-alive in words is no JSON",
        "-",
        "streaming/upstream/chunks.py",
        "        if len(event.data) < _KEEP_ALIVE_MAX and event.data.lower().strip(_PUNCTUATION) in _KEEP_ALIVES:\n",
        "        if not event.data:\n",
        (KINDS, "-k", "keep_alive"),
    ),
    Mutation(
        "an errno word is told under /v1",
        "-",
        "streaming/http/error_words.py",
        '    found = BY_CODE.get(end["error_code"]) or BY_KIND.get(end["error_kind"])\n',
        '    found = end["error_code"]\n',
        (KINDS, "-k", "errno"),
    ),
)
