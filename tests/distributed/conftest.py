from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def shared(tmp_path_factory, worker_id):
    """A folder that all test processes of this session share."""
    base = tmp_path_factory.getbasetemp()
    return base if worker_id == "master" else base.parent
