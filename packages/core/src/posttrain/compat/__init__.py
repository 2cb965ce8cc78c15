"""Names and row formats of transformers and trl."""
