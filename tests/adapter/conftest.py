"""SGLang's published configuration, which requests and their release read."""

import pytest
from sglang.srt.runtime_context import publish, restore_context, snapshot_context
from sglang.srt.server_args import ServerArgs


@pytest.fixture(scope="session")
def plain_server_args():
    """Options of a server with nothing switched on."""
    return ServerArgs(model_path="dummy", device="cpu")


@pytest.fixture(scope="module")
def published_config(plain_server_args):
    """Publish a plain server's configuration for one module."""
    state = snapshot_context()
    publish(plain_server_args, role="scheduler")
    yield
    restore_context(state)
