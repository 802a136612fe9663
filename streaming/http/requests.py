"""Schemas of the clients' requests: fields used here are checked, all others are passed on unchanged."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from django.http import HttpRequest
from ninja import Schema
from pydantic import BeforeValidator, ConfigDict, Field, StrictBool
from pydantic_core import PydanticCustomError

# These fields control the reply here; the provider does not get them.
_OWN_FIELDS = frozenset({"model", "stream"})
_OWN_FIELDS_OF_TURNS = _OWN_FIELDS | {"knowledge", "conversation"}
CHOICES_MAX = 16
TEXTS_MAX = 2048


class StreamOptions(Schema):
    model_config = ConfigDict(extra="allow")

    include_usage: StrictBool | None = None


class Message(Schema):
    """One message. Unknown fields are passed on to the provider."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64, strict=True)]
    content: str | list[dict[str, Any]] | None = None


class ChatParameters(Schema):
    """The fields of every chat request; any further parameter is passed on to the provider."""

    model_config = ConfigDict(extra="allow")

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    n: Annotated[int, Field(ge=1, le=CHOICES_MAX, strict=True)] | None = None


class ChatCompletionRequest(ChatParameters):
    """`POST /v1/chat/completions`."""

    model: Annotated[str, Field(min_length=1, max_length=300, strict=True)]
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True


class NewTurnRequest(ChatParameters):
    """`POST /api/chat/turns`: by default with the tenant's own model, over its knowledge.

    `conversation` is an id or "new": the prompt starts with the conversation's completed turns.
    """

    model: Annotated[str, Field(min_length=1, max_length=300, strict=True)] | None = None
    knowledge: StrictBool = True
    conversation: str | None = None


def _texts_only(value: Any) -> Any:
    """Checks the input and returns it unchanged. Pydantic's own errors would name the members of the union."""
    texts = value if isinstance(value, list) else [value]
    if any(isinstance(text, int | list) for text in texts):
        raise PydanticCustomError(
            "tokens",
            "Send texts: tokens are numbers of another model's tokenizer. "
            "In LangChain's OpenAIEmbeddings, set check_embedding_ctx_length=False.",
        )
    if not 1 <= len(texts) <= TEXTS_MAX or not all(isinstance(text, str) and text for text in texts):
        raise PydanticCustomError("texts", f"Send a text, or a list of 1 to {TEXTS_MAX} texts, none of them empty.")
    return value


class EmbeddingRequest(Schema):
    """`POST /v1/embeddings`. Texts only: a token list belongs to another model's tokenizer."""

    model_config = ConfigDict(extra="allow")

    model: Annotated[str, Field(min_length=1, max_length=300, strict=True)]
    input: Annotated[
        Annotated[str, Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=TEXTS_MAX)],
        BeforeValidator(_texts_only),
    ]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None

    @property
    def texts(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else list(self.input)


def completion_for_provider(request: HttpRequest) -> dict[str, Any]:
    """The request as sent, with unknown fields, without the fields that only control the reply."""
    return _without(request, _OWN_FIELDS)


def turn_for_provider(request: HttpRequest) -> dict[str, Any]:
    """The same for the turn API, without its own fields."""
    return _without(request, _OWN_FIELDS_OF_TURNS)


def _without(request: HttpRequest, own: frozenset[str]) -> dict[str, Any]:
    sent = {name: value for name, value in json.loads(request.body).items() if name not in own}
    if isinstance(options := sent.pop("stream_options", None), dict):
        # The provider is always asked for its usage.
        options.pop("include_usage", None)
        sent |= {"stream_options": options} if options else {}
    return sent
