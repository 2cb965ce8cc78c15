"""One file for each algorithm, with its config and trainer."""
