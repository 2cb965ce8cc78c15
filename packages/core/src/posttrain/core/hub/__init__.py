"""The Hugging Face Hub: background uploads and the model card."""
