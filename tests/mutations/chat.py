"""The mutations of chat: turns, their log, and who may see them."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

TURN = "tests/streaming/turns/test_transitions.py"
EVENTS = "tests/streaming/log/test_events.py"
TURN_API = "tests/streaming/http/test_chat_api.py"
TENANTS = "tests/embeddings/registry/test_access.py"
CLIENT = "tests/streaming/http/test_openai_client.py"
STREAMS = "tests/wires/test_streaming_cases.py"

CHAT_MUTATIONS = (
    Mutation(
        "a reader ends with its database",
        "G14",
        "streaming/turns/follow.py",
        "        except Error as error:\n",
        "        except ZeroDivisionError as error:\n",
        ("tests/guarantees/test_database_away_chat.py", "-k", "streams_on"),
    ),
    Mutation(
        "a hang-up is forgotten while the database is away",
        "G14",
        "streaming/turns/transitions.py",
        "    return retry_on_database_error(lambda: request_cancel(turn), END_WITHIN_S)\n",
        "    return request_cancel(turn)\n",
        ("tests/guarantees/test_database_away_chat.py", "-k", "hang_up"),
    ),
    Mutation(
        "silence never runs a budget out",
        "G10",
        "streaming/upstream/watchdog.py",
        "        elif now < self._due:\n",
        "        elif True:\n",
        ("tests/streaming/upstream/test_watchdog.py",),
    ),
    Mutation(
        "a hang-up leaves the turn running",
        "G10",
        "streaming/http/replies.py",
        "            in_background(transitions.request_cancel_surely, self._turn)\n",
        "            pass\n",
        (CLIENT, "-k", "hang_up_closes"),
    ),
    Mutation(
        "a cancel is not seen by the worker",
        "G10",
        "streaming/turns/claims.py",
        "            each.cancel()\n",
        "            pass\n",
        (TURN, TURN_API, "-k", "cancel"),
    ),
    Mutation(
        "a retry follows what was delivered",
        "G11",
        "streaming/turns/turn_run.py",
        "                delivered=result.delivered,\n",
        "                delivered=False,\n",
        (STREAMS, "-k", "51"),
    ),
    Mutation(
        "a message that comes twice is run twice",
        "G11",
        "streaming/turns/transitions.py",
        "    queued = ChatTurn.objects.filter(pk=turn.pk, state=TurnState.QUEUED)\n",
        "    queued = ChatTurn.objects.filter(pk=turn.pk)\n",
        (TURN,),
    ),
    Mutation(
        "whoever has lost the claim may still end the turn",
        "G11",
        "streaming/turns/transitions.py",
        "pk=held.turn_id, claim_token=held.token, state=TurnState.RUNNING)",
        "pk=held.turn_id, state=TurnState.RUNNING)",
        (TURN,),
    ),
    Mutation(
        "a log is read without its fence",
        "G11",
        "streaming/turns/orphaned_turns.py",
        "    _add(client, key, events.FENCE_SEQ, events.encode(events.FENCE, 0, {}))\n",
        "",
        (EVENTS,),
    ),
    Mutation(
        "the writer goes on after a lost connection without looking",
        "G11",
        "streaming/log/writer.py",
        "        for log in list(self._logs):\n            await self._resume(log)\n",
        "",
        (EVENTS,),
    ),
    Mutation(
        "turns are counted without a lock or a bound",
        "-",
        "streaming/turns/transitions.py",
        " >= settings.CHAT_TURNS_PER_TENANT:\n",
        " < 0:\n",
        (TURN,),
    ),
    Mutation(
        "a turn is found without its tenant",
        "G12",
        "streaming/http/turn_requests.py",
        ".filter(tenant=tenant, public_id=public_id)",
        ".filter(public_id=public_id)",
        (TENANTS,),
    ),
    Mutation(
        "a turn's token reads every turn",
        "G12",
        "streaming/http/turn_requests.py",
        " if named == str(public_id) else None",
        " if named else None",
        (TURN_API, "-k", "token"),
    ),
    Mutation(
        "a conversation is found without its tenant",
        "G12",
        "streaming/turns/conversations.py",
        ".get(tenant=tenant, public_id=UUID(wanted))",
        ".get(public_id=UUID(wanted))",
        (TURN, "-k", "conversation"),
    ),
    Mutation(
        "a tenant cancels all outcomes of a run",
        "G12",
        "embeddings/reports/tenant_runs.py",
        ".filter(run=run, repository__tenant=tenant)",
        ".filter(run=run)",
        (TENANTS,),
    ),
    Mutation(
        "a run is shown to whoever asks",
        "G12",
        "embeddings/reports/tenant_runs.py",
        ".filter(pk__in=mine)",
        ".all()",
        (TENANTS,),
    ),
)
