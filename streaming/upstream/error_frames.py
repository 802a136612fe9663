"""Errors that a provider reports inside its stream, after a 200, in whatever shape (docs/architecture.md, Chat). Pure."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from streaming.upstream.errors import ProviderFrameError
from streaming.upstream.surrogates import without_halves

Json = dict[str, Any]

ERROR_FINISHES = frozenset({"error", "error_finish"})
_WORDS = ("message", "detail", "error_message", "error_msg")
_CODES = ("code", "status", "status_code", "error_code")


def is_error_frame(chunk: Json, *, is_named: bool) -> bool:
    """Whether the object reports an error. Without choices and outside a named event, shapes other than OpenAI's count."""
    if chunk.get("error") or chunk.get("object") == "error":
        return True
    if is_named or chunk.get("choices") is not None:
        return False
    if chunk.get("type") == "error" or any(chunk.get(name) for name in ("detail", "errors", *_WORDS[2:])):
        return True
    return isinstance(chunk.get("message"), str) and (_status_in(chunk) is not None or _name_in(chunk) is not None)


def frame_error(frame: Any, scrub: Callable[[str], str]) -> ProviderFrameError:
    """The error that a frame reports: an object with or without an `error` in it, or plain words."""
    frame = without_halves(frame)
    outer = frame if isinstance(frame, dict) else {"message": _as_words(frame)}
    said = outer.get("error") or outer
    inner = said if isinstance(said, dict) else {"message": _as_words(said)}
    name = _name_in(inner) or (inner["type"] if isinstance(inner.get("type"), str) else None)
    return ProviderFrameError(
        scrub(_message_of(inner)),
        provider_code=scrub(name) if name is not None else None,
        param=scrub(inner["param"]) if isinstance(inner.get("param"), str) else None,
        status=_status_in(inner) or _status_in(outer),
    )


def finish_error(reason: str, choice: Json, said: str, scrub: Callable[[str], str]) -> ProviderFrameError:
    """A failure sent as a finish: the text in place of the answer is its message."""
    error = choice.get("error")
    return frame_error({"error": error if isinstance(error, dict) else {"message": said, "code": reason}}, scrub)


def _message_of(error: Json) -> str:
    words = [said for name in _WORDS if isinstance(said := error.get(name), str)]
    return next(filter(None, words), "") or ("" if words and len(error) == 1 else _as_words(error))


def _as_words(said: Any) -> str:
    return said if isinstance(said, str) else json.dumps(said)


def _name_in(error: Json) -> str | None:
    code = error.get("code")
    return code if isinstance(code, str) and code and not code.isdigit() else None


def _status_in(error: Json) -> int | None:
    return next((found for name in _CODES if (found := _http_status(error.get(name))) is not None), None)


def _http_status(code: Any) -> int | None:
    number = int(code) if isinstance(code, str) and code.isdecimal() and len(code) == 3 else code
    return number if type(number) is int and 400 <= number <= 599 else None
