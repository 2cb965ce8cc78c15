"""Optimizers that torch does not have, each in a file with its paper. `posttrain.core.optim` knows them by name."""
