"""Images and videos of rows: reading, tokens, positions and features."""
