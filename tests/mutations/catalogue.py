"""All mutations, in the order of their table."""

from __future__ import annotations

from tests.mutations.calls import CALL_MUTATIONS
from tests.mutations.chat import CHAT_MUTATIONS
from tests.mutations.circuit import CIRCUIT_MUTATIONS
from tests.mutations.clients import CLIENT_MUTATIONS
from tests.mutations.connections import CONNECTION_MUTATIONS
from tests.mutations.dispatch import DISPATCH_MUTATIONS
from tests.mutations.doctor import DOCTOR_MUTATIONS
from tests.mutations.mutation import Mutation
from tests.mutations.replies import REPLY_MUTATIONS

MUTATIONS: tuple[Mutation, ...] = (
    *CIRCUIT_MUTATIONS,
    *CALL_MUTATIONS,
    *CHAT_MUTATIONS,
    *CONNECTION_MUTATIONS,
    *DOCTOR_MUTATIONS,
    *DISPATCH_MUTATIONS,
    *REPLY_MUTATIONS,
    *CLIENT_MUTATIONS,
)
