"""Speculative decoding: proposals, the choice of the tree, acceptance, and learning from each round.

Drafters are in `graft.drafters`; `policies` say with what a round's trees are made.
"""
