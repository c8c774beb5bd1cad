"""Comparing texts: ours with and without trees, and transformers' own."""
