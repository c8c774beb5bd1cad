"""Speculative decoding: proposals, the choice of the tree, acceptance, and learning from each round.

`proposers` add candidate tokens, `policies` decide which of them a round verifies.
"""
