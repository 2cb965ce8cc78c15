"""What the installed versions can do, for tests that also run with the oldest ones (`make test-versions`)."""

import importlib.util

import pytest

IS_CURRENT = importlib.util.find_spec("transformers.distributed.expert_parallel") is not None
"""Whether transformers is that of constraints.txt or newer: its behaviour is compared, and it divides matrices."""
compared = pytest.mark.skipif(not IS_CURRENT, reason="compares with transformers 5.23 or newer")
