"""Training of draft heads and draft models. `recipe` has the stages in order."""
