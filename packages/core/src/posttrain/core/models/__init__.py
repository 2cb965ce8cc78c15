"""Loading models, adapters, the output head, attention over packed rows, and weight averaging."""
