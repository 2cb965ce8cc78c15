"""Writes that survive a loss of power, free space, and errors that name what could not be written."""
