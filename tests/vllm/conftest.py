"""One vLLM server for all tests of this folder, which ``make test-vllm`` runs, and no other command."""

from __future__ import annotations

import importlib.util
import os

import pytest

if os.environ.get("POSTTRAIN_VLLM") != "1" or importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def running(tmp_path_factory):
    """(address, folder) of a server on `servers.model`."""
    from tests.vllm import servers

    if there := os.environ.get("POSTTRAIN_VLLM_SERVER"):
        port, _, folder = there.partition(":")
        yield f"http://127.0.0.1:{port}", servers.Path(folder)
        return
    folder = tmp_path_factory.mktemp("server")
    with servers.server(servers.save(folder / "model"), servers.FLAGS + servers.LORA) as url:
        yield url, folder


@pytest.fixture
def server(running):
    """(address, folder shared with the server), with the weights that it was started with."""
    from posttrain.rl.generation.server import Server
    from posttrain.rl.generation.transfer import Folder
    from posttrain.rl.generation.weights import Weights
    from tests.vllm import servers

    url, folder = running
    Folder(folder / "initial").send(Weights(servers.model()), [Server(url)], "default")
    return url, folder
