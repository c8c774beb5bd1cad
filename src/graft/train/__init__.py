"""Training a head: the model's own answers, the trainer, and the recipe with its card."""
