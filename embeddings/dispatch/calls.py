"""One embedding call that is out: what was sent for which task, and what came of it."""

from __future__ import annotations

import concurrent.futures
import logging
from dataclasses import dataclass
from threading import Event

from embeddings.dispatch.batches import Batch
from embeddings.dispatch.task_queue import Dispatched
from embeddings.errors import ProviderError
from embeddings.models import EmbeddingTask
from embeddings.providers.base import EmbeddingProvider, RawReply
from embeddings.states import TaskState
from embeddings.timeouts import ProviderTimeoutError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Call:
    """A dispatched task's call; `left` is set once its request is out, `future` ends with the reply or a typed error."""

    task: Dispatched
    batch: Batch
    adapter: EmbeddingProvider
    future: concurrent.futures.Future[RawReply]
    left: Event

    @property
    def is_suspect(self) -> bool:
        """Whether a refusal could condemn a text: a half of a refused batch, or a batch of one text."""
        is_alone = len(self.batch.texts) == 1
        return not self.task.is_interactive and (is_alone or self.task.split_from_id is not None)

    def result(self) -> RawReply:
        """The reply of a call that has ended. Raises ProviderError or ProviderTimeoutError, and nothing else."""
        try:
            return self.future.result()
        except (ProviderError, ProviderTimeoutError):
            raise
        except Exception as error:
            # Whatever else the client raises for these texts ends their task: left alone, it would be tried for ever.
            logger.exception("embedding task %s: the call could not be made", self.task.id)
            raise ProviderError(f"the call could not be made: {type(error).__name__}") from error


class GivenUp(Exception):
    """The call was given up on purpose; the task's row says why."""


def was_removed(task: Dispatched) -> bool:
    """Whether the task was cancelled while its call was out."""
    return EmbeddingTask.objects.filter(pk=task.id, state=TaskState.REMOVED, dispatch_token=task.token).exists()
