"""The benchmark: several decoding methods on the same prompts, in one process, counted and timed alike."""
