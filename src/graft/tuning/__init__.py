"""Tuning: files with what was measured and learned about a model on a machine: profiles, learned text, drafters."""

MIN_PROMPTS = 5  # one of so many prompts is for measuring, the others are for learning
