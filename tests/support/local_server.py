"""The real local models, and their server for the tests of one module."""

import pytest

from project.local import model_files
from project.local.model_server import CHECKOUT, ModelServer

MODELS = model_files.models_dir(CHECKOUT / "var")


@pytest.fixture(scope="module")
def local_server():
    model_files.prepare(MODELS, lambda line: None)
    with ModelServer(MODELS) as running:
        yield running
