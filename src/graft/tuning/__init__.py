"""Files about a model on this machine: tuned profiles, learned state, and measured speeds of drafters."""

MIN_PROMPTS = 5  # one prompt in five is for measuring, the others are for learning
NUM_TRIALS = 6  # prompts to measure a speed on: that of a single one says little about others
