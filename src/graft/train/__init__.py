"""Training of draft heads: data generation, the trainer, and the whole recipe with a model card."""
