"""What every trainer of language models shares: text, images, attention, the output head, loading, generation."""
