"""The OpenAPI document is a committed snapshot: a change of the API shows in the diff."""

import json
import os
import pathlib
from typing import Any

import django

SNAPSHOT = pathlib.Path(__file__).resolve().parents[2] / "docs" / "openapi.json"


def schema() -> dict[str, Any]:
    from project.api import api  # here: as a program, this file has to load the apps first

    return api.get_openapi_schema()


def current() -> str:
    return json.dumps(schema(), indent=2, sort_keys=True) + "\n"


def test_the_document_is_the_committed_one():
    assert SNAPSHOT.read_text() == current(), (
        "run `python -m tests.project.test_api_openapi`, and look at the difference"
    )


def test_every_operation_says_what_it_does_and_wants_a_key():
    operations = [
        (path, method, operation)
        for path, methods in schema()["paths"].items()
        for method, operation in methods.items()
    ]
    assert len(operations) == 13
    assert not [(path, method) for path, method, operation in operations if not operation.get("description")]
    assert not [(path, method) for path, method, operation in operations if not operation.get("security")]


if __name__ == "__main__":
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")
    django.setup()
    SNAPSHOT.write_text(current())
