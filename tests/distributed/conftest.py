from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder that all test processes of this session share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
