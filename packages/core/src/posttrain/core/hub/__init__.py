"""The Hugging Face Hub: background uploads and the model card."""

from posttrain.core.hub.card import (
    adapter_arguments,
    framework_versions,
    hyperparameters,
    method_of,
    model_card,
    names,
    results,
    write_model_card,
)
from posttrain.core.hub.uploads import FINISH_TIMEOUT, HubArguments, Upload, Uploader, jobs, missing_token

__all__ = [
    "FINISH_TIMEOUT",
    "HubArguments",
    "Upload",
    "Uploader",
    "adapter_arguments",
    "framework_versions",
    "hyperparameters",
    "jobs",
    "method_of",
    "missing_token",
    "model_card",
    "names",
    "results",
    "write_model_card",
]
