"""What a vLLM server loads from this package: a way to receive weights that needs no GPU.

vLLM finds `register` by the entry point ``vllm.general_plugins`` wherever posttrain-rl is installed beside it. Then
``--weight-transfer-config '{"backend": "gloo"}'`` starts a server whose workers receive weights over gloo.
"""

from __future__ import annotations

BACKEND = "gloo"


def register() -> None:
    """Make `BACKEND` known to vLLM. vLLM calls this in each of its processes, in some of them twice."""
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    try:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "posttrain.rl.generation.vllm_worker", "GlooWeightTransferEngine"
        )
    except ValueError:  # it is known already
        pass
