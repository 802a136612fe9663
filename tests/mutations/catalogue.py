"""The mutations. Each replaces text that must stand exactly once in its file, and names the tests that should see it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """One mechanism broken: `old` becomes `new` in `file`, and of `tests` (pytest's own words) one must fail."""

    name: str
    guarantee: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


KINDS = "tests/test_local_kinds.py"
CONTRACT = f"{KINDS}::TestOneContractServesBothLocalKinds"
CAP_TWO = f"{KINDS}::TestCapTwo"
ADMISSION = "tests/test_admission.py"
SLOT = f"{ADMISSION}::TestTheSlotBelongsToTheCall"
QUEUE = "tests/test_task_queue.py"
CASES = "tests/test_embedding_cases.py"
GUARANTEES = "tests/test_guarantees.py"
NOTIFY_THEN_FREE = """    notify_provider_timeout(error, on_provider_timeout)
    return durably(lambda: task_queue.fail(task, code, str(error)))
"""
FREE_THEN_NOTIFY = """    freed = durably(lambda: task_queue.fail(task, code, str(error)))
    notify_provider_timeout(error, on_provider_timeout)
    return freed
"""
FREE_ALONE = """    return durably(lambda: task_queue.fail(task, code, str(error)))
"""
SPARE_QUEUED = "    task_queue.remove_queued(code, run=run_id)\n"

MUTATIONS = (
    # --- the timeout contract ---------------------------------------------------------------------------------------
    Mutation(
        "the lane drops its notification", "G1", "embeddings/lane.py", NOTIFY_THEN_FREE, FREE_ALONE, (f"{CONTRACT}",)
    ),
    Mutation(
        "admission drops its notification",
        "G1",
        "embeddings/admission.py",
        NOTIFY_THEN_FREE,
        FREE_ALONE,
        (f"{CONTRACT}",),
    ),
    Mutation(
        "the lane notifies after the slot is free",
        "G2",
        "embeddings/lane.py",
        NOTIFY_THEN_FREE,
        FREE_THEN_NOTIFY,
        (CONTRACT,),
    ),
    Mutation(
        "admission notifies after the slot is free",
        "G2",
        "embeddings/admission.py",
        NOTIFY_THEN_FREE,
        FREE_THEN_NOTIFY,
        (CONTRACT,),
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
        ("tests/test_timeouts.py",),
    ),
    Mutation(
        "the predicate takes any TimeoutError",
        "G5",
        "embeddings/timeouts.py",
        "    return type(code) is str and",
        "    return isinstance(error, TimeoutError) or type(code) is str and",
        ("tests/test_timeouts.py",),
    ),
    Mutation(
        "an intermediate busy reply notifies the owner",
        "G4",
        "embeddings/drain.py",
        "            task_queue.requeue_busy(task, patience_ms, str(error))\n",
        "            (self.controls.on_provider_timeout_for(task) or print)(error)\n"
        "            task_queue.requeue_busy(task, patience_ms, str(error))\n",
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
        "embeddings/drain.py",
        "        code = error.code if isinstance(error, SluicegateError) else codes.STORE_FAILED\n"
        "        task_queue.fail(task, code, str(error))\n",
        "        self._fail(task, error)\n",
        (f"{KINDS}::TestG5WhatOpensNothing", "tests/test_circuit_matrix.py"),
    ),
    Mutation(
        "Gemini gets a finish",
        "-",
        "embeddings/unqueued.py",
        "finish = None\n",
        "from embeddings.admission import finish\n",
        ("tests/test_gemini.py::TestNoGate",),
    ),
    # --- the circuit --------------------------------------------------------------------------------------------------
    Mutation(
        "opening forgets to remove the queued tasks",
        "G2",
        "embeddings/outcomes.py",
        SPARE_QUEUED,
        "",
        (f"{CAP_TWO}", GUARANTEES),
    ),
    Mutation(
        "opening leaves the run dispatching",
        "G2",
        "embeddings/outcomes.py",
        "    TenantRun.objects.filter(pk=run_id).update(dispatch_allowed=False)\n",
        "",
        (CAP_TWO, GUARANTEES),
    ),
    Mutation(
        "opening takes what is at the provider with it",
        "G7",
        "embeddings/outcomes.py",
        SPARE_QUEUED,
        SPARE_QUEUED + "    task_queue.cancel_dispatched(code, run=run_id)\n",
        (CAP_TWO, GUARANTEES),
    ),
    Mutation(
        "A is given the circuit's code",
        "G3",
        "embeddings/circuit.py",
        "code=codes.PROVIDER_TIMED_OUT,",
        "code=codes.CIRCUIT_OPEN,",
        (CONTRACT,),
    ),
    Mutation(
        "a holder that lost its lease opens the circuit",
        "G2",
        "embeddings/lane.py",
        "    if not task_queue.is_held(task):\n        return False\n",
        "",
        ("tests/test_lane.py",),
    ),
    # --- ways back into the queue -------------------------------------------------------------------------------------
    Mutation(
        "a busy requeue skips dispatch_allowed",
        "G2",
        "embeddings/task_queue.py",
        "        allowed = task.run_id is None or lock_run(task.run_id).dispatch_allowed\n",
        "        allowed = True\n",
        (CAP_TWO, QUEUE),
    ),
    Mutation(
        "a stopping worker gives back whatever the run says",
        "G2",
        "embeddings/task_queue.py",
        "        if task.run_id is not None and not lock_run(task.run_id).dispatch_allowed:\n",
        "        if False:\n",
        (QUEUE, GUARANTEES),
    ),
    Mutation(
        "a lost lease goes back whatever the run says",
        "G2",
        "embeddings/task_queue.py",
        "        allowed = run_id is None or lock_run(run_id).dispatch_allowed\n",
        "        allowed = True\n",
        (QUEUE, GUARANTEES),
    ),
    Mutation(
        "a put skips dispatch_allowed",
        "G2",
        "embeddings/task_queue.py",
        "    if not run.dispatch_allowed:\n        raise DispatchNotAllowed\n",
        "",
        (QUEUE, GUARANTEES),
    ),
    Mutation(
        "a split is put whatever the run says",
        "G2",
        "embeddings/knowledge/batches.py",
        "        if run.dispatch_allowed:\n            _put_halves",
        "        if True:\n            _put_halves",
        (CAP_TWO, GUARANTEES),
    ),
    # --- slots, tokens, leases ----------------------------------------------------------------------------------------
    Mutation(
        "the dispatch token is ignored",
        "G9",
        "embeddings/task_statements.py",
        'HELD = "WHERE id = %(task)s AND dispatch_token = %(token)s AND state IN (1, 2)"',
        'HELD = "WHERE id = %(task)s AND state IN (1, 2)"',
        (f"{QUEUE}::TestFencing",),
    ),
    Mutation(
        "a lease is lost at once",
        "G9",
        "embeddings/task_statements.py",
        "    waits = (ahead_ms, settings.LEASE_MS, -settings.LANE_BATCH_MAX_WAIT_MS)\n",
        "    waits = (ahead_ms, -1, -settings.LANE_BATCH_MAX_WAIT_MS)\n",
        (f"{QUEUE}::TestLosing", f"{ADMISSION}::TestTheCapIsReadAnew"),
    ),
    Mutation(
        "the slot goes with its caller",
        "G7",
        "embeddings/task_queue.py",
        "filter(state=TaskState.DISPATCHED, **where).update(\n        state=TaskState.REMOVED,",
        "filter(state=TaskState.DISPATCHED, **where).update(\n        slot=None,\n        state=TaskState.REMOVED,",
        (SLOT,),
    ),
    Mutation(
        "a cancelled caller's call is broken off",
        "G7",
        "embeddings/admission.py",
        "cancels_calls = False",
        "cancels_calls = True",
        (SLOT,),
    ),
    Mutation(
        "vectors that come after a cancel are dropped",
        "G7",
        "embeddings/admission.py",
        "keeps_late_replies = True",
        "keeps_late_replies = False",
        (SLOT,),
    ),
    Mutation(
        "the slot of a cancelled call that fails is kept",
        "G7",
        "embeddings/drain.py",
        "        # Where the task was cancelled meanwhile, its slot went with none of these.\n"
        "        task_queue.release_slot(call.task)\n",
        "",
        (SLOT,),
    ),
    Mutation(
        "admission lets one more through than its cap",
        "G7",
        "embeddings/admission.py",
        "    return cap\n",
        "    return cap + 1\n",
        (f"{ADMISSION}::TestTheCapIsReadAnew", f"{ADMISSION}::TestTheCapIsAPositiveWholeNumber"),
    ),
    Mutation(
        "a cap that makes no sense is taken",
        "-",
        "embeddings/admission.py",
        "    if type(cap) is not int or cap < 1:\n",
        "    if cap is None:\n",
        (f"{ADMISSION}::TestTheCapIsAPositiveWholeNumber",),
    ),
    Mutation(
        "a drain rings nobody for a slot that stands idle",
        "-",
        "embeddings/drain.py",
        "        if task is not None and task_queue.stands_idle(self.provider.pk):\n",
        "        if False:\n",
        (f"{ADMISSION}::TestSeveralAtOnce",),
    ),
    Mutation(
        "a follower drains with one hand",
        "-",
        "embeddings/follow.py",
        ", at_most=_DRAINS_MAX)",
        ")",
        (f"{ADMISSION}::TestSeveralAtOnce",),
    ),
    # --- what a server answers ----------------------------------------------------------------------------------------
    Mutation(
        "no control text is sent before a row is condemned",
        "-",
        "embeddings/drain.py",
        "            is_texts_own = batches.has_landed(root) or self._control_lands(call, root)\n",
        "            is_texts_own = True\n",
        (CASES, "-k", "refused or error"),
    ),
    Mutation(
        "Retry-After is ignored",
        "-",
        "embeddings/drain.py",
        "    wished = BUSY_DEFAULT_MS if error.retry_after_ms is None else error.retry_after_ms\n",
        "    wished = 0\n",
        (f"{CASES}::TestResuming",),
    ),
    Mutation(
        "vectors are placed by their order in the reply",
        "-",
        "embeddings/providers/replies.py",
        "    if all(index is None for index in indices):\n",
        "    if True:\n",
        ("tests/test_replies.py", CASES, "-k", "order or indices or 20"),
    ),
    Mutation(
        "the count of vectors is not checked",
        "-",
        "embeddings/providers/replies.py",
        "    if len(embeddings) != expected:\n",
        "    if False:\n",
        ("tests/test_replies.py",),
    ),
    Mutation(
        "numbers that are not finite are bound",
        "-",
        "embeddings/providers/replies.py",
        "    if not np.isfinite(bound).all():\n",
        "    if False:\n",
        ("tests/test_replies.py",),
    ),
    Mutation(
        "a reply of other dimensions is stored",
        "-",
        "embeddings/knowledge/store.py",
        "    if settled != found:\n",
        "    if False:\n",
        (CASES, "-k", "dimensions"),
    ),
    Mutation(
        "a redirect is followed",
        "-",
        "embeddings/providers/transport.py",
        "follow_redirects=False",
        "follow_redirects=True",
        ("tests/test_provider_openai_compatible.py::TestWhatLeaves", "tests/test_ollama.py::TestAnswers"),
    ),
    Mutation(
        "proxies of the environment are taken",
        "-",
        "embeddings/providers/transport.py",
        "transport=self._bounded, trust_env=False",
        "trust_env=True",
        ("tests/test_provider_openai_compatible.py::TestWhatLeaves", "tests/test_ollama.py::TestWhatLeaves"),
    ),
    Mutation(
        "the SDK retries by itself",
        "G4",
        "embeddings/providers/openai_compatible.py",
        "max_retries=0",
        "max_retries=1",
        ("tests/test_provider_openai_compatible.py::TestAnswers",),
    ),
    Mutation(
        "our own pool is taken for the provider's silence",
        "G5",
        "embeddings/providers/transport.py",
        "    if any(isinstance(cause, httpx2.PoolTimeout) for cause in causes):\n",
        "    if False:\n",
        ("tests/test_provider_openai_compatible.py::TestTransportErrors",),
    ),
    Mutation(
        "our own loop is taken for the provider's silence",
        "G5",
        "embeddings/providers/transport.py",
        "        if lag > LOOP_LAG_MAX_S:\n",
        "        if False:\n",
        ("tests/test_provider_openai_compatible.py::TestAnswers", f"{KINDS}::TestG5WhatOpensNothing"),
    ),
    # --- generations --------------------------------------------------------------------------------------------------
    Mutation(
        "queued batches of a former model are dispatched",
        "-",
        "embeddings/task_statements.py",
        "(r.dispatch_allowed AND g.model = p.embedding_model)",
        "r.dispatch_allowed",
        ("tests/test_model_change.py", QUEUE),
    ),
    Mutation(
        "another model's vectors are taken for known",
        "-",
        "embeddings/knowledge/store.py",
        "            tenant=tenant_id,\n            generation=generation_id,\n            text_hash__in",
        "            tenant=tenant_id,\n            text_hash__in",
        ("tests/test_model_change.py", "tests/test_store.py"),
    ),
    Mutation(
        "another tenant's vectors are taken for known",
        "G12",
        "embeddings/knowledge/store.py",
        "            tenant=tenant_id,\n            generation=generation_id,\n            text_hash__in",
        "            generation=generation_id,\n            text_hash__in",
        ("tests/test_store.py", CASES, "-k", "tenant"),
    ),
    Mutation(
        "refused rows stay refused when the provider changes",
        "-",
        "embeddings/registry/providers.py",
        "    return _retry_undeliverable(provider) if fields & _WHAT_IS_TAKEN else 0\n",
        "    return 0\n",
        ("tests/test_undeliverable.py",),
    ),
)
