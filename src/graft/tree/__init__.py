"""Token trees: the pool of candidates, its ranking, and the trees that are verified. The work is done in C."""
