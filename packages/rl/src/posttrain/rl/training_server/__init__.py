"""A server of the training API that the SDK ``tinker`` speaks, for one base model and one user."""
