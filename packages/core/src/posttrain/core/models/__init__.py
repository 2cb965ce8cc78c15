"""What is done to a model: loading, adapters, the output head, attention over packed rows, averages of weights."""
