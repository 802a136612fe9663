"""The mutations of the doctor: what it tells, and that it is neither held up nor loud."""

from __future__ import annotations

from tests.mutations.mutation import Mutation

DOCTOR = "tests/embeddings/test_doctor.py"

DOCTOR_MUTATIONS = (
    Mutation(
        "a check that hangs holds the examination up",
        "-",
        "embeddings/doctor/findings.py",
        "self._thread.join(max(0.0, self._deadline - time.monotonic()))",
        "self._thread.join()",
        (DOCTOR, "-k", "hangs"),
    ),
    Mutation(
        "a check that raises says nothing",
        "-",
        "embeddings/doctor/findings.py",
        '            self._found = [error(self._check.name, f"could not be looked at: {type(raised).__name__}")]\n',
        "            self._found = []\n",
        (DOCTOR, "-k", "raises"),
    ),
    Mutation(
        "what stands on a broken database is looked at all the same",
        "-",
        "streaming/doctor.py",
        "    if check_database.name not in broken:\n",
        "    if check_database.name:\n",
        (DOCTOR, "-k", "down"),
    ),
    Mutation(
        "model servers are called unasked",
        "-",
        "streaming/doctor.py",
        "[check_servers] if asks_providers else []",
        "[check_servers]",
        (DOCTOR, "-k", "asked_for"),
    ),
    Mutation(
        "a key is told",
        "-",
        "embeddings/doctor/providers.py",
        'f"{variable} is set here"',
        'f"{os.environ[variable]} is set here"',
        (DOCTOR, "-k", "key"),
    ),
    Mutation(
        "a password in an address is told",
        "-",
        "embeddings/doctor/valkey.py",
        "{url.scheme}://{url.hostname or ''}{port}{url.path}",
        "{settings.REDIS_URL}",
        (DOCTOR, "-k", "password"),
    ),
    Mutation(
        "a queue that no worker takes is no error",
        "-",
        "embeddings/doctor/valkey.py",
        "    is_missed = bool(found) or not settings.EMBEDDED_VALKEY\n",
        "    is_missed = False\n",
        (DOCTOR, "-k", "worker"),
    ),
    Mutation(
        "a lane that nobody drains is well",
        "-",
        "embeddings/doctor/providers.py",
        "    if is_idle and waited > timeout:\n",
        "    if is_idle and waited < timedelta():\n",
        (DOCTOR, "-k", "drains"),
    ),
    Mutation(
        "a run that nobody attends is well",
        "-",
        "embeddings/doctor/sweeps.py",
        "    abandoned = orphaned_runs.orphaned_runs()\n",
        "    abandoned: list[TenantRun] = []\n",
        (DOCTOR, "-k", "attends"),
    ),
)
