"""What a field of a config may be: its old names, its units, and whether it is secret."""
