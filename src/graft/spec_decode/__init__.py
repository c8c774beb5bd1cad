"""Speculative decoding: proposers, candidates, the draft tree, acceptance, and what is learned from each round.

`proposers` add candidate tokens, `policies` decide which of them a round verifies.
"""
