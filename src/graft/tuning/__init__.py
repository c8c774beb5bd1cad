"""Files about a model on this machine: tuned profiles, learned state, and measured speeds of drafters."""

MIN_PROMPTS = 5  # one prompt in five is for measuring, the others are for learning
