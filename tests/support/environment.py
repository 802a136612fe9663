"""Loaded before Django's settings (`-p tests.support.environment`): gives every test process an environment of its own.

Nothing of the machine's environment reaches the tests: a VAR_DIR of their own, no keys, no proxies, no outside servers.
`TEST_DATABASE_URL` (set by `tests.support.postgres`) is the one way in: the database that the run is tried on.
"""

import atexit
import os
import shutil
import tempfile

_SCRUBBED = ("DATABASE_URL", "REDIS_URL", "SECRET_KEY", "SOURCE_ROOTS", "DEBUG", "ALLOWED_HOSTS", "LOG_LEVEL")
for name in list(os.environ):
    if name in _SCRUBBED or name.startswith(("SLUICEGATE_KEY_", "OPENAI_")) or name.lower().endswith("_proxy"):
        del os.environ[name]

var_dir = tempfile.mkdtemp(prefix="sluicegate-tests-")
atexit.register(shutil.rmtree, var_dir, ignore_errors=True)
os.environ["VAR_DIR"] = var_dir
os.environ["PYTHONWARNINGS"] = "ignore"
if database_url := os.environ.get("TEST_DATABASE_URL"):
    os.environ["DATABASE_URL"] = database_url
