"""What Sluicegate keeps of chat (docs/architecture.md, Data and states). `streaming.turns.transitions` writes the states."""

from __future__ import annotations

import uuid

from django.db import models
from django.utils import timezone

from embeddings.models import Provider, Tenant
from streaming.states import TURN_UNFINISHED, TurnOrigin, TurnStage, TurnState


class Conversation(models.Model):
    """A thread of turns of one tenant: a turn in it is asked after the turns that completed before it."""

    public_id = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    tenant = models.ForeignKey(Tenant, models.PROTECT, related_name="conversations")
    title = models.CharField(max_length=200, blank=True)
    created_at = models.DateTimeField(default=timezone.now, editable=False)

    def __str__(self) -> str:
        return self.title or str(self.public_id)


class ChatTurn(models.Model):
    """One chat request and its streamed answer.

    `request` is the OpenAI request as it was sent, without the fields that say how to deliver the answer. `choices` are
    `{"index", "message", "finish_reason"}` as in a chat completion, kept with whatever text there was at any end.
    `reply_fields` are the provider's own beside them; `provider_code` and `error_param` are its words for an error.
    """

    public_id = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    tenant = models.ForeignKey(Tenant, models.PROTECT, related_name="turns")
    provider = models.ForeignKey(Provider, models.PROTECT, related_name="turns")
    conversation = models.ForeignKey(Conversation, models.PROTECT, null=True, blank=True, related_name="turns")
    origin = models.CharField(max_length=10, choices=TurnOrigin, default=TurnOrigin.NATIVE)
    model = models.CharField(max_length=200)
    uses_knowledge = models.BooleanField(default=False)
    request = models.JSONField()
    choices = models.JSONField(default=list)
    sources = models.JSONField(default=list)
    usage = models.JSONField(null=True, blank=True)
    reply_fields = models.JSONField(default=dict, db_default=models.Value({}, models.JSONField()), blank=True)
    state = models.CharField(max_length=20, choices=TurnState, default=TurnState.QUEUED)
    stage = models.CharField(max_length=20, choices=TurnStage, blank=True)
    error_code = models.CharField(max_length=64, blank=True)
    error_kind = models.CharField(max_length=40, blank=True)
    error_status = models.PositiveSmallIntegerField(null=True, blank=True)
    error_detail = models.CharField(max_length=1000, blank=True)
    # With a default of the database: workers of the release before insert turns without these columns.
    provider_code = models.CharField(max_length=100, blank=True, default="", db_default="")
    error_param = models.CharField(max_length=100, blank=True, default="", db_default="")
    retry_after_ms = models.PositiveIntegerField(null=True, blank=True)
    claim_token = models.CharField(max_length=32, blank=True)
    lease_expires_at = models.DateTimeField(null=True, blank=True)
    cancel_requested_at = models.DateTimeField(null=True, blank=True)
    rung_at = models.DateTimeField(null=True, blank=True, editable=False)
    created_at = models.DateTimeField(default=timezone.now)
    started_at = models.DateTimeField(null=True, blank=True)
    first_content_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-id"]
        indexes = [
            models.Index(fields=["tenant", "state"], name="turn_of_tenant"),
            # The unfinished are few whatever the table holds: limits, readers and beat look at them alone.
            models.Index(fields=["state", "id"], condition=models.Q(state__in=TURN_UNFINISHED), name="turn_unfinished"),
            models.Index(fields=["ended_at"], name="turn_ended"),
        ]

    def __str__(self) -> str:
        return str(self.public_id)

    @property
    def has_ended(self) -> bool:
        return self.state not in TURN_UNFINISHED

    @property
    def answer(self) -> str:
        """The text of the first choice."""
        return str(self.choices[0]["message"].get("content") or "") if self.choices else ""


class ChatAttempt(models.Model):
    """One call to the provider within a turn, from 1. Times in milliseconds count from `started_at`."""

    turn = models.ForeignKey(ChatTurn, models.CASCADE, related_name="attempts")
    number = models.PositiveSmallIntegerField()
    started_at = models.DateTimeField()
    ended_at = models.DateTimeField(null=True, blank=True)
    first_content_at = models.DateTimeField(null=True, blank=True)
    first_content_ms = models.PositiveIntegerField(null=True, blank=True)
    longest_gap_ms = models.PositiveIntegerField(null=True, blank=True)
    chunks = models.PositiveIntegerField(default=0)
    bytes = models.PositiveBigIntegerField(default=0)
    end_state = models.CharField(max_length=20, choices=TurnState, blank=True)
    error_kind = models.CharField(max_length=40, blank=True)
    transport_code = models.CharField(max_length=40, blank=True)

    class Meta:
        ordering = ["number"]
        constraints = [models.UniqueConstraint(fields=["turn", "number"], name="attempt_per_number")]

    def __str__(self) -> str:
        return f"attempt {self.number}"
