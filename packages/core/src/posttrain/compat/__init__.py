"""Names, row formats and callbacks of transformers and trl."""
