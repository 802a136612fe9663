"""Chat requests as clients send them: what we read of them is checked, and everything else is passed on as it stands."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from ninja import Schema
from pydantic import ConfigDict, Field, StrictBool

# How the answer is delivered is our business, and is not asked of the provider as the client asked it.
_DELIVERY = frozenset({"model", "stream", "stream_options"})
CHOICES_MAX = 16


class StreamOptions(Schema):
    model_config = ConfigDict(extra="allow")

    include_usage: StrictBool = False


class Message(Schema):
    """One message. Fields that a provider knows and we do not are passed on."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64, strict=True)]
    content: str | list[dict[str, Any]] | None = None


class ChatParameters(Schema):
    """What every chat request has; any further parameter of a chat completion is passed on to the provider."""

    model_config = ConfigDict(extra="allow")

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096)]
    n: Annotated[int, Field(ge=1, le=CHOICES_MAX, strict=True)] | None = None

    def for_provider(self) -> dict[str, Any]:
        """The request, without what says how to deliver the answer."""
        given = self.model_dump(mode="json", exclude_unset=True)
        return {name: value for name, value in given.items() if name not in _DELIVERY | self.own_fields()}

    @classmethod
    def own_fields(cls) -> frozenset[str]:
        return frozenset()


class ChatCompletionRequest(ChatParameters):
    """`POST /v1/chat/completions`."""

    model: Annotated[str, Field(min_length=1, max_length=300, strict=True)]
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class NewTurnRequest(ChatParameters):
    """`POST /api/chat/turns`: the tenant's model, unless one is named; over its knowledge, unless told otherwise.

    `conversation` is the id of one, or "new": the turn is asked after those that completed in it.
    """

    model: Annotated[str, Field(min_length=1, max_length=300, strict=True)] | None = None
    knowledge: StrictBool = True
    conversation: str | None = None

    @classmethod
    def own_fields(cls) -> frozenset[str]:
        return frozenset({"knowledge", "conversation"})


class EmbeddingRequest(Schema):
    """`POST /v1/embeddings`. Texts only: token lists are another model's language."""

    model_config = ConfigDict(extra="allow")

    model: Annotated[str, Field(min_length=1, max_length=300, strict=True)]
    input: (
        Annotated[str, Field(min_length=1, strict=True)]
        | Annotated[list[Annotated[str, Field(min_length=1, strict=True)]], Field(min_length=1, max_length=2048)]
    )
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None

    @property
    def texts(self) -> list[str]:
        return [self.input] if isinstance(self.input, str) else list(self.input)
