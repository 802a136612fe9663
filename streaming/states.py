"""The states of a chat turn (docs/architecture.md, Data and states): queued, running, and one end state for good."""

from django.db.models import TextChoices


class TurnState(TextChoices):
    """The end states carry the values of `streaming.upstream.errors.EndState`: a turn ends as its last attempt did."""

    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    IDLE_TIMEOUT = "idle_timeout"
    LIFETIME_EXCEEDED = "lifetime_exceeded"
    PROVIDER_ERROR = "provider_error"
    PROTOCOL_ERROR = "protocol_error"
    TRANSPORT_ERROR = "transport_error"
    CANCELLED = "cancelled"
    INTERRUPTED = "interrupted"


TURN_UNFINISHED = (TurnState.QUEUED, TurnState.RUNNING)
TURN_ENDED = tuple(state for state in TurnState if state not in TURN_UNFINISHED)


class TurnOrigin(TextChoices):
    """Which door the turn came through."""

    OPENAI = "openai", "OpenAI client"
    NATIVE = "native", "turn API"
    COMMAND = "command"


class TurnStage(TextChoices):
    """What a running turn is doing."""

    RETRIEVING = "retrieving"
    STREAMING = "streaming"
