"""Tuning: files with what was measured and learned about a model on a machine: profiles, learned text, drafters."""
