"""Why a turn is not taken, as one tree: each with a machine code, and the field of the request that it speaks of."""

from __future__ import annotations

from embeddings.errors import SluicegateError


class TurnRefused(SluicegateError):
    """The turn was not taken. `param` names the request's field, where one is at fault."""

    code = "TURN_REFUSED"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnknownModel(TurnRefused):
    """The tenant has no such model."""

    code = "model_not_found"


class UnknownConversation(TurnRefused):
    """The tenant has no such conversation."""

    code = "conversation_not_found"


class InvalidRequest(TurnRefused):
    """A field of the request makes no sense."""

    code = "invalid_request"


class TooManyTurns(TurnRefused):
    """The tenant has as many unfinished turns as it may have."""

    code = "too_many_turns"
