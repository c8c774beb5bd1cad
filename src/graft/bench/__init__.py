"""The benchmark: many ways of decoding the same prompts, in one process, counted and timed alike."""
