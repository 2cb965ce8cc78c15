"""Rows of datasets to tokens: kinds of datasets, caching, and reports of what was left out."""
