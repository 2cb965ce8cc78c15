"""Transactional checkpoints with a manifest and without pickle."""
