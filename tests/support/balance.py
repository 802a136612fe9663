"""A pytest plugin that balances the halves of a parallel run: files are handed out whole, the longest first.

How long each file took is read from `seconds_by_file.json`, which `pytest --record-seconds` writes. A file without a record
goes first.
"""

import json
from collections import defaultdict
from pathlib import Path

import pytest

RECORD = Path(__file__).with_name("seconds_by_file.json")


def pytest_addoption(parser):
    parser.addoption("--record-seconds", action="store_true", help=f"write each file's seconds to {RECORD.name}")


def pytest_configure(config):
    # pytest-xdist would put the files with the most tests first.
    config.option.loadscopereorder = False
    if config.getoption("record_seconds") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondsByFile(), "seconds-by-file")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    seconds = json.loads(RECORD.read_text())
    items.sort(key=lambda item: -seconds.get(item.nodeid.partition("::")[0], float("inf")))


class SecondsByFile:
    """Sums set-up, call and tear-down of the tests of each file, rounded to a tenth of a second."""

    def __init__(self):
        self._seconds = defaultdict(float)

    def pytest_runtest_logreport(self, report):
        self._seconds[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self):
        rounded = {file: round(seconds, 1) for file, seconds in sorted(self._seconds.items())}
        RECORD.write_text(json.dumps(rounded, indent=2) + "\n")
