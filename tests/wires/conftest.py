"""What the tests of wires share."""

import pytest

from tests.support.provider_server import ProviderServer


@pytest.fixture
def server():
    with ProviderServer() as running:
        yield running
