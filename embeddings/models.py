"""The tables of the knowledge base and its sweeps (docs/architecture.md, Data and states).

Models hold facts and constraints. Transitions are compare-and-set functions in `embeddings.runs`, `embeddings.dispatch`
and `knowledge.store`. Facts (runs, outcomes, tasks) protect the rows they refer to, and no deletion cascades into them.
"""

from __future__ import annotations

import uuid
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.core.validators import MaxValueValidator, MinValueValidator, RegexValidator
from django.db import models
from django.db.models import Q
from django.utils import timezone

from embeddings.states import (
    OUTCOME_UNFINISHED,
    CircuitState,
    OutcomeStatus,
    ProviderKind,
    RunStatus,
    RunTrigger,
    TaskPriority,
    TaskState,
)
from embeddings.vectors import VectorField

_slug = RegexValidator(
    r"^[a-z0-9][a-z0-9._-]{0,62}\Z", "Use 1 to 63 lower-case letters, digits, dots, dashes or underscores."
)
_milliseconds = [MinValueValidator(1_000), MaxValueValidator(2**31 - 1)]
_budget = [MinValueValidator(-(2**31)), MaxValueValidator(2**31 - 1)]


def a_lease_from_now() -> datetime:
    """When the first lease of a new row ends."""
    return timezone.now() + timedelta(milliseconds=settings.LEASE_MS)


class Provider(models.Model):
    """A configured model server. Secrets stay in the environment: `api_key_env` names the variable."""

    name = models.CharField(max_length=63, unique=True, validators=[_slug])
    kind = models.CharField(max_length=20, choices=ProviderKind, default=ProviderKind.OPENAI_COMPATIBLE)
    base_url = models.CharField(max_length=500, unique=True)
    embedding_model = models.CharField(max_length=200, blank=True)
    chat_model = models.CharField(max_length=200, blank=True)
    api_key_env = models.CharField(
        max_length=100,
        blank=True,
        validators=[
            RegexValidator(r"^SLUICEGATE_KEY_[A-Z0-9_]+\Z", "The variable's name must match SLUICEGATE_KEY_*.")
        ],
    )
    batch_size = models.PositiveIntegerField(default=32, validators=[MinValueValidator(1), MaxValueValidator(2048)])
    batch_characters = models.PositiveIntegerField(default=60_000, validators=[MinValueValidator(1)])
    chunk_characters = models.PositiveIntegerField(
        default=1_200, validators=[MinValueValidator(100), MaxValueValidator(100_000)]
    )
    chunk_tokens = models.PositiveIntegerField(
        default=480, validators=[MinValueValidator(16), MaxValueValidator(100_000)]
    )
    max_in_flight = models.IntegerField(default=1, validators=[MinValueValidator(1), MaxValueValidator(64)])
    embedding_timeout_ms = models.PositiveIntegerField(default=300_000, validators=_milliseconds)
    query_timeout_ms = models.PositiveIntegerField(default=15_000, validators=_milliseconds)
    request_timeout_ms = models.IntegerField(default=120_000, validators=_budget)
    stream_idle_timeout_ms = models.IntegerField(default=120_000, validators=_budget)
    stream_first_content_timeout_ms = models.IntegerField(null=True, blank=True, validators=_budget)
    stream_keepalive_timeout_ms = models.IntegerField(null=True, blank=True, validators=_budget)
    stream_lifetime_ms = models.IntegerField(default=900_000, validators=_budget)
    turn_wall_ms = models.IntegerField(default=3_600_000, validators=_budget)
    accepts_missing_finish = models.BooleanField(default=False)
    is_paused = models.BooleanField(default=False)
    refuses_base64 = models.BooleanField(default=False, editable=False)
    busy_until = models.DateTimeField(null=True, blank=True, editable=False)
    overtaken_since = models.DateTimeField(null=True, blank=True, editable=False)
    revision = models.PositiveIntegerField(default=0, editable=False)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    def __str__(self) -> str:
        return self.name

    def save(self, *args: Any, **kwargs: Any) -> None:
        """Increments the revision, so that processes that use the previous configuration read it again."""
        self.revision += 1
        super().save(*args, **kwargs)


class EmbeddingGeneration(models.Model):
    """One embedding model of one provider: vectors of different generations are never compared."""

    provider = models.ForeignKey(Provider, models.PROTECT, related_name="generations")
    model = models.CharField(max_length=200)
    dimensions = models.PositiveIntegerField(null=True, blank=True)
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["provider", "model"], name="generation_per_model")]

    def __str__(self) -> str:
        return f"{self.model} ({self.dimensions or 'unknown'} dimensions)"


class Tenant(models.Model):
    """An owner of repositories; nothing of one tenant is ever visible to another."""

    slug = models.CharField(max_length=63, unique=True, validators=[_slug])
    name = models.CharField(max_length=200, blank=True)
    embedding_provider = models.ForeignKey(
        Provider, models.PROTECT, null=True, blank=True, related_name="embedding_tenants"
    )
    chat_provider = models.ForeignKey(Provider, models.PROTECT, null=True, blank=True, related_name="chat_tenants")
    is_active = models.BooleanField(default=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    def __str__(self) -> str:
        return self.slug


class TenantApiKey(models.Model):
    """A tenant's key for the endpoints: shown once when issued, only its digest is stored."""

    tenant = models.ForeignKey(Tenant, models.CASCADE, related_name="api_keys")
    prefix = models.CharField(max_length=16, unique=True)
    digest = models.CharField(max_length=64)
    label = models.CharField(max_length=100, blank=True)
    scopes = models.JSONField(default=list, blank=True)
    created_at = models.DateTimeField(default=timezone.now)
    last_used_at = models.DateTimeField(null=True, blank=True)
    revoked_at = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return f"{self.prefix}… ({self.tenant})"


class Repository(models.Model):
    """One git source of one tenant; its identity is `tenant/slug`, never the slug alone."""

    tenant = models.ForeignKey(Tenant, models.PROTECT, related_name="repositories")
    slug = models.CharField(max_length=63, validators=[_slug])
    source = models.CharField(max_length=1000)
    ref = models.CharField(max_length=250, blank=True)
    include = models.JSONField(default=list, blank=True)
    exclude = models.JSONField(default=list, blank=True)
    enabled = models.BooleanField(default=True)
    cadence_minutes = models.PositiveIntegerField(default=30, validators=[MinValueValidator(1)])
    indexed_revision = models.CharField(max_length=64, blank=True, editable=False)
    live_generation = models.ForeignKey(
        EmbeddingGeneration, models.PROTECT, null=True, blank=True, editable=False, related_name="+"
    )
    knowledge_revision = models.PositiveBigIntegerField(default=0, editable=False)
    consecutive_failures = models.PositiveIntegerField(default=0, editable=False)
    next_due_at = models.DateTimeField(null=True, blank=True)
    removed_at = models.DateTimeField(null=True, blank=True, editable=False)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    class Meta:
        verbose_name_plural = "repositories"
        constraints = [
            models.UniqueConstraint(
                fields=["tenant", "slug"], condition=Q(removed_at=None), name="repository_per_tenant_slug"
            )
        ]

    def __str__(self) -> str:
        return f"{self.tenant}/{self.slug}"


class TenantRun(models.Model):
    """One sweep over tenant repositories that share one embedding provider."""

    public_id = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    provider = models.ForeignKey(Provider, models.PROTECT, related_name="runs")
    generation = models.ForeignKey(EmbeddingGeneration, models.PROTECT, related_name="+")
    status = models.CharField(max_length=12, choices=RunStatus, default=RunStatus.QUEUED)
    trigger = models.CharField(max_length=10, choices=RunTrigger, default=RunTrigger.COMMAND)
    concurrency = models.PositiveIntegerField(default=2, validators=[MinValueValidator(1)])
    dispatch_allowed = models.BooleanField(default=True)
    created_at = models.DateTimeField(default=timezone.now)
    started_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)
    cancel_requested_at = models.DateTimeField(null=True, blank=True)
    alive_until = models.DateTimeField(default=a_lease_from_now)

    class Meta:
        ordering = ["-id"]
        indexes = [models.Index(fields=["status"], name="run_status")]

    def __str__(self) -> str:
        return str(self.public_id)


class RunCircuit(models.Model):
    """A run's circuit: closed at birth, opened at most once by a final provider timeout, gone with its run."""

    run = models.OneToOneField(TenantRun, models.CASCADE, related_name="circuit")
    state = models.CharField(max_length=6, choices=CircuitState, default=CircuitState.CLOSED)
    opened_at = models.DateTimeField(null=True, blank=True)
    reason_code = models.CharField(max_length=64, blank=True)
    source_error_code = models.CharField(max_length=64, blank=True)
    opened_by = models.CharField(max_length=130, blank=True)
    message = models.CharField(max_length=500, blank=True)

    def __str__(self) -> str:
        return self.state


class RepositoryOutcome(models.Model):
    """What one run did for one repository; decided once. Tenant and slug are copied as text, to outlive their rows."""

    run = models.ForeignKey(TenantRun, models.PROTECT, related_name="outcomes")
    repository = models.ForeignKey(Repository, models.PROTECT, related_name="outcomes")
    tenant_slug = models.CharField(max_length=63)
    repository_slug = models.CharField(max_length=63)
    status = models.CharField(max_length=12, choices=OutcomeStatus, default=OutcomeStatus.PENDING)
    error_code = models.CharField(max_length=64, blank=True)
    source_error_code = models.CharField(max_length=64, blank=True)
    error_detail = models.CharField(max_length=1000, blank=True)
    revision = models.CharField(max_length=64, blank=True)
    files = models.PositiveIntegerField(default=0)
    rows = models.PositiveIntegerField(default=0)
    embedded = models.PositiveIntegerField(default=0)
    reused = models.PositiveIntegerField(default=0)
    pending = models.PositiveIntegerField(default=0)
    deleted = models.PositiveIntegerField(default=0)
    undeliverable = models.PositiveIntegerField(default=0)
    skipped = models.JSONField(default=dict)
    provider_calls = models.PositiveIntegerField(default=0)
    scan_token = models.CharField(max_length=32, blank=True)
    scan_lease_expires_at = models.DateTimeField(null=True, blank=True)
    scan_losses = models.PositiveIntegerField(default=0)
    last_dispatched_at = models.DateTimeField(null=True, blank=True)
    # Totals and schedule are written after the decision, in another transaction: opening a circuit decides many outcomes
    # at once.
    is_recorded = models.BooleanField(default=False)
    started_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["id"]
        constraints = [
            models.UniqueConstraint(fields=["run", "repository"], name="outcome_per_run_repository"),
            models.UniqueConstraint(
                fields=["repository"],
                condition=Q(status__in=OUTCOME_UNFINISHED),
                name="one_unfinished_outcome_per_repository",
            ),
        ]
        # The lane asks for a tenant's latest dispatch at each admission.
        indexes = [models.Index(fields=["tenant_slug", "last_dispatched_at"], name="outcome_turn_of_tenant")]

    def __str__(self) -> str:
        return f"{self.tenant_slug}/{self.repository_slug}"


class EmbeddingTask(models.Model):
    """One durable unit of embedding work: a batch of pending rows, or the texts of one interactive caller."""

    provider = models.ForeignKey(Provider, models.PROTECT, related_name="tasks")
    generation = models.ForeignKey(EmbeddingGeneration, models.PROTECT, related_name="+")
    priority = models.PositiveSmallIntegerField(choices=TaskPriority, default=TaskPriority.BATCH)
    run = models.ForeignKey(TenantRun, models.PROTECT, null=True, blank=True, related_name="tasks")
    outcome = models.ForeignKey(RepositoryOutcome, models.PROTECT, null=True, blank=True, related_name="tasks")
    # The original batch, from which refused batches were split.
    split_from = models.ForeignKey("self", models.SET_NULL, null=True, blank=True, related_name="halves")
    texts = models.JSONField(null=True, blank=True)
    text_count = models.PositiveIntegerField(default=0)
    vectors = models.JSONField(null=True, blank=True)
    state = models.PositiveSmallIntegerField(choices=TaskState, default=TaskState.QUEUED)
    slot = models.PositiveSmallIntegerField(null=True, blank=True)
    error_code = models.CharField(max_length=64, blank=True)
    error_detail = models.CharField(max_length=1000, blank=True)
    attempts = models.PositiveIntegerField(default=0)
    losses = models.PositiveIntegerField(default=0)
    control_passed = models.BooleanField(default=False)
    busy_requeues = models.PositiveIntegerField(default=0)
    busy_since = models.DateTimeField(null=True, blank=True)
    expires_at = models.DateTimeField(null=True, blank=True)
    dispatch_token = models.CharField(max_length=32, blank=True)
    lease_expires_at = models.DateTimeField(null=True, blank=True)
    queued_at = models.DateTimeField(default=timezone.now)
    dispatched_at = models.DateTimeField(null=True, blank=True)
    settled_at = models.DateTimeField(null=True, blank=True)
    call_ended_at = models.DateTimeField(null=True, blank=True)
    call_ended_by = models.CharField(max_length=20, blank=True)

    class Meta:
        constraints = [
            # The database itself refuses to dispatch more tasks than there are slots.
            models.UniqueConstraint(fields=["provider", "slot"], name="one_task_per_slot")
        ]
        indexes = [
            # Partial: what is unsettled, or has a slot, is little, however long the history of settled tasks is.
            models.Index(
                fields=["provider", "state", "priority", "id"], condition=Q(settled_at=None), name="task_unsettled"
            ),
            models.Index(fields=["provider", "slot"], condition=Q(slot__isnull=False), name="task_with_slot"),
            models.Index(fields=["priority", "settled_at"], condition=Q(settled_at__isnull=False), name="task_settled"),
            models.Index(fields=["outcome", "state"], name="task_of_outcome"),
        ]

    def __str__(self) -> str:
        return f"task {self.pk}"


class SourceFile(models.Model):
    """A path of a repository that has, or had, a version."""

    repository = models.ForeignKey(Repository, models.CASCADE, related_name="files")
    path = models.CharField(max_length=4096)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["repository", "path"], name="file_per_path")]

    def __str__(self) -> str:
        return self.path


class FileVersion(models.Model):
    """One content of one file in one generation, chunked under `rules`; `row_count` is null until all rows are written."""

    file = models.ForeignKey(SourceFile, models.CASCADE, related_name="versions")
    generation = models.ForeignKey(EmbeddingGeneration, models.PROTECT, related_name="+")
    blob_oid = models.CharField(max_length=64)
    row_count = models.PositiveIntegerField(null=True, blank=True)
    is_live = models.BooleanField(default=False)
    rules = models.CharField(max_length=60, blank=True)
    skipped_reason = models.CharField(max_length=40, blank=True)
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        constraints = [
            models.UniqueConstraint(
                fields=["file", "generation"], condition=Q(is_live=True), name="one_live_version_per_generation"
            ),
            models.UniqueConstraint(
                fields=["file", "generation"], condition=Q(is_live=False), name="one_pending_version_per_generation"
            ),
        ]

    def __str__(self) -> str:
        return f"{self.file} {self.blob_oid[:8]}"


class KnowledgeRow(models.Model):
    """One chunk of one file version: text, place (lines from 1, inclusive), and its vector once embedded."""

    tenant = models.ForeignKey(Tenant, models.PROTECT, related_name="+")
    repository = models.ForeignKey(Repository, models.CASCADE, related_name="rows")
    version = models.ForeignKey(FileVersion, models.CASCADE, related_name="rows")
    generation = models.ForeignKey(EmbeddingGeneration, models.PROTECT, related_name="+")
    ordinal = models.PositiveIntegerField()
    start_line = models.PositiveIntegerField()
    end_line = models.PositiveIntegerField()
    text = models.TextField()
    text_hash = models.BinaryField(max_length=16)
    vector = VectorField(null=True, blank=True)
    task = models.ForeignKey(EmbeddingTask, models.SET_NULL, null=True, blank=True, related_name="rows")
    undeliverable_reason = models.CharField(max_length=500, blank=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["version", "ordinal"], name="row_per_ordinal")]
        indexes = [
            models.Index(fields=["tenant", "generation", "text_hash"], name="row_text_hash"),
            models.Index(
                fields=["repository", "id"],
                condition=Q(vector=None, undeliverable_reason=""),
                name="row_pending",
            ),
        ]

    def __str__(self) -> str:
        return f"{self.version} #{self.ordinal}"
