"""What the installed versions can do, for tests that also run with the oldest ones (`make test-versions`)."""

import importlib.util

import pytest
import transformers

IS_PINNED = transformers.__version__.startswith("5.23.")
"""Whether transformers is the version of constraints.txt, with which its behaviour is compared."""
DIVIDES_MATRICES = importlib.util.find_spec("transformers.distributed.expert_parallel") is not None
compared = pytest.mark.skipif(not IS_PINNED, reason="compares with transformers 5.23")
