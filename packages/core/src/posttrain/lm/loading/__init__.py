"""Models, tokenizers, adapters and quantization by name, and their arguments."""
