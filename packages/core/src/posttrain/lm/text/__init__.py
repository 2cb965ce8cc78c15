"""Chat templates, tokenization, and the special tokens of a tokenizer."""
