"""The states of runs, outcomes, tasks and circuits (docs/architecture.md, Data and states)."""

from django.db.models import IntegerChoices, TextChoices


class ProviderKind(TextChoices):
    OPENAI_COMPATIBLE = "openai-compatible", "OpenAI-compatible"
    OLLAMA = "ollama", "Ollama"
    GEMINI = "gemini", "Gemini"


class RunStatus(TextChoices):
    QUEUED = "queued"
    RUNNING = "running"
    COMPLETED = "completed"
    DEGRADED = "degraded"
    DEFERRED = "deferred"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    CANCELLED = "cancelled"


RUN_UNFINISHED = (RunStatus.QUEUED, RunStatus.RUNNING)


class RunTrigger(TextChoices):
    COMMAND = "command"
    ADMIN = "admin"
    API = "api"
    SCHEDULE = "schedule"


class CircuitState(TextChoices):
    CLOSED = "closed"
    OPEN = "open"


class OutcomeStatus(TextChoices):
    PENDING = "pending"
    SCANNING = "scanning"
    EMBEDDING = "embedding"
    SUCCEEDED = "succeeded"
    UNCHANGED = "unchanged"
    SKIPPED = "skipped"
    DEFERRED = "deferred"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    CANCELLED = "cancelled"


OUTCOME_ACTIVE = (OutcomeStatus.SCANNING, OutcomeStatus.EMBEDDING)
OUTCOME_UNFINISHED = (OutcomeStatus.PENDING, *OUTCOME_ACTIVE)


class TaskPriority(IntegerChoices):
    INTERACTIVE = 0
    BATCH = 1


class TaskState(IntegerChoices):
    """Integers, because the index that admission reads is ordered by state."""

    QUEUED = 0
    DISPATCHED = 1
    ANSWERED = 2
    STORED = 3
    FAILED = 4
    REMOVED = 5


TASK_UNSETTLED = (TaskState.QUEUED, TaskState.DISPATCHED, TaskState.ANSWERED)
