"""The emulated device takes the heads that a GPU has kernels for."""

from tests.gpu.conftest import heads_of_16_numbers  # noqa: F401
