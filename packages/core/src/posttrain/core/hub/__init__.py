"""The Hugging Face Hub: background uploads and the model card."""

from posttrain.core.hub.card import write_model_card
from posttrain.core.hub.uploads import HubArguments, Uploader, jobs, missing_token

__all__ = ["HubArguments", "Uploader", "jobs", "missing_token", "write_model_card"]
