"""What is done to a model before and while it trains: unwrapping, compiling, checkpointing of activations, kernels."""
