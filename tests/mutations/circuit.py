"""The mutations of what a provider's silence does: the timeout contract, the circuit, and the ways back into the queue."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

KINDS = "tests/guarantees/test_local_kinds.py"
CONTRACT = f"{KINDS}::TestOneContractServesBothLocalKinds"
CAP_TWO = f"{KINDS}::TestCapTwo"
QUEUE = "tests/embeddings/dispatch/test_task_queue.py"
GUARANTEES = "tests/guarantees/test_circuit_opens.py"
DECIDED = "tests/guarantees/test_decided_means_over.py"
ADMISSION = "embeddings/dispatch/admission.py"
NOTIFY_THEN_FREE = """        if self.notifies:
            notify_provider_timeout(error, on_provider_timeout)
        return task_queue.fail(task, code, str(error))
"""
FREE_THEN_NOTIFY = """        freed = task_queue.fail(task, code, str(error))
        if self.notifies:
            notify_provider_timeout(error, on_provider_timeout)
        return freed
"""
LANE = 'cap=_one, order="fair", slot_belongs_to_call=False, notifies='
NATIVE = 'cap=_positive, order="fifo", slot_belongs_to_call=True, notifies='
GEMINI = 'cap=_any_number, order="fifo", slot_belongs_to_call=False, notifies='
REMOVE_QUEUED = "    task_queue.remove_queued(code, run=run_id)\n"

CIRCUIT_MUTATIONS = (
    # --- the timeout contract -----------------------------------------------------------------------------------------
    Mutation("the lane drops its notification", "G1", ADMISSION, f"{LANE}True", f"{LANE}False", (f"{CONTRACT}",)),
    Mutation(
        "native admission drops its notification", "G1", ADMISSION, f"{NATIVE}True", f"{NATIVE}False", (CONTRACT,)
    ),
    Mutation(
        "a finish notifies after the slot is free", "G2", ADMISSION, NOTIFY_THEN_FREE, FREE_THEN_NOTIFY, (CONTRACT,)
    ),
    Mutation(
        "a callback's exception surfaces",
        "G6",
        "embeddings/timeouts.py",
        "    except Exception as raised:",
        "    except KeyError as raised:",
        (CONTRACT,),
    ),
    Mutation(
        "the predicate takes codes by their beginning",
        "G5",
        "embeddings/timeouts.py",
        "type(code) is str and code in PROVIDER_TIMEOUT_CODES",
        "type(code) is str and code.startswith(tuple(PROVIDER_TIMEOUT_CODES))",
        ("tests/embeddings/test_timeouts.py",),
    ),
    Mutation(
        "the predicate takes any TimeoutError",
        "G5",
        "embeddings/timeouts.py",
        "    return type(code) is str and",
        "    return isinstance(error, TimeoutError) or type(code) is str and",
        ("tests/embeddings/test_timeouts.py",),
    ),
    Mutation(
        "an intermediate busy reply notifies the owner",
        "G4",
        "embeddings/dispatch/drain.py",
        "        task_queue.requeue_busy(task, pause_ms, str(error))\n",
        "        (mine.controls.on_provider_timeout_for(task) or print)(error)\n"
        "        task_queue.requeue_busy(task, pause_ms, str(error))\n",
        (f"{KINDS}::TestG5WhatOpensNothing", CAP_TWO),
    ),
    Mutation(
        "the first failure of a call is final",
        "G4",
        "embeddings/providers/retries.py",
        "            if pause_s is None:\n                raise",
        "            raise",
        (f"{KINDS}::TestG4OnlyTheFinalFailureCounts",),
    ),
    Mutation(
        "an error of the store is taken for the provider's",
        "G5",
        "embeddings/dispatch/drain.py",
        'could not be stored", task.id)\n            _fail_late(task, error)\n',
        'could not be stored", task.id)\n            _fail(mine, task, error)\n',
        (f"{KINDS}::TestG5WhatOpensNothing", "tests/guarantees/test_circuit_matrix.py"),
    ),
    Mutation(
        "Gemini notifies",
        "-",
        ADMISSION,
        f"{GEMINI}False",
        f"{GEMINI}True",
        ("tests/embeddings/providers/test_gemini.py::TestNoQueue",),
    ),
    # --- the circuit --------------------------------------------------------------------------------------------------
    Mutation(
        "opening forgets to remove the queued tasks",
        "G2",
        "embeddings/runs/transitions.py",
        REMOVE_QUEUED,
        "",
        (f"{CAP_TWO}", GUARANTEES),
    ),
    Mutation(
        "opening leaves the run dispatching",
        "G2",
        "embeddings/runs/transitions.py",
        "    TenantRun.objects.filter(pk=run_id).update(dispatch_allowed=False)\n    if connection",
        "    if connection",
        (CAP_TWO, GUARANTEES),
    ),
    Mutation(
        "opening takes what is at the provider with it",
        "G7",
        "embeddings/runs/transitions.py",
        REMOVE_QUEUED,
        REMOVE_QUEUED + "    task_queue.cancel_dispatched(code, run=run_id)\n",
        (CAP_TWO, GUARANTEES),
    ),
    Mutation(
        "A is given the circuit's code",
        "G3",
        "embeddings/runs/circuit.py",
        "code=codes.PROVIDER_TIMED_OUT,",
        "code=codes.CIRCUIT_OPEN,",
        (CONTRACT,),
    ),
    Mutation(
        "a holder that lost its lease opens the circuit",
        "G2",
        ADMISSION,
        "        if not task_queue.is_held(task):\n            return False\n",
        "",
        ("tests/embeddings/dispatch/test_lane.py",),
    ),
    # --- ways back into the queue -------------------------------------------------------------------------------------
    Mutation(
        "a busy requeue skips dispatch_allowed",
        "G2",
        "embeddings/dispatch/task_queue.py",
        "        if refused := refusal(task.run_id, task.outcome_id):\n            return TaskState.REMOVED",
        "        if refused := '':\n            return TaskState.REMOVED",
        (CAP_TWO, QUEUE),
    ),
    Mutation(
        "a stopping worker gives back whatever the run says",
        "G2",
        "embeddings/dispatch/task_queue.py",
        "        if refused := refusal(task.run_id, task.outcome_id):\n            return remove_held",
        "        if refused := '':\n            return remove_held",
        (QUEUE, GUARANTEES),
    ),
    Mutation(
        "a lost lease goes back whatever the run says",
        "G2",
        "embeddings/dispatch/task_queue.py",
        "        if refused := refusal(run_id, outcome_id):\n",
        "        if refused := '':\n",
        (QUEUE, GUARANTEES),
    ),
    Mutation(
        "a put skips dispatch_allowed",
        "G2",
        "embeddings/dispatch/task_queue.py",
        "    if refusal(outcome.run_id, outcome.pk):\n        raise DispatchNotAllowed\n",
        "",
        (QUEUE, GUARANTEES),
    ),
    Mutation(
        "a split is put whatever the run says",
        "G2",
        "embeddings/dispatch/batches.py",
        "        refused = task_queue.refusal(outcome.run_id, outcome.pk)\n",
        "        refused = ''\n",
        (CAP_TWO, GUARANTEES),
    ),
    # --- decided means over -------------------------------------------------------------------------------------------
    Mutation(
        "a task is queued for an outcome that is decided",
        "G13",
        "embeddings/dispatch/task_queue.py",
        '    return "" if is_undecided else codes.OUTCOME_DECIDED\n',
        '    return ""\n',
        (DECIDED,),
    ),
    Mutation(
        "a task of a decided outcome is dispatched",
        "G13",
        "embeddings/dispatch/task_statements.py",
        " AND o.status IN {UNDECIDED}",
        "",
        (DECIDED,),
    ),
    Mutation(
        "beat leaves stranded tasks queued",
        "G13",
        "embeddings/tasks.py",
        "    task_queue.remove_stranded()\n",
        "",
        (DECIDED,),
    ),
    Mutation(
        "a changed model wakes no run",
        "G13",
        "embeddings/registry/providers.py",
        '    if "embedding_model" in fields:',
        '    if "no such field" in fields:',
        ("tests/guarantees/test_processes.py::TestAModelThatChangesInMidRun",),
    ),
)
