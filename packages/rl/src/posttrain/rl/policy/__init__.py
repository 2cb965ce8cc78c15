"""The policy and its reference: loading, and log-probabilities under them."""
