"""Speculative decoding itself: proposers, pool, the tree, acceptance, and what is learned of them.

`policies` decide what a round's tree is, `proposers` what there is to choose from.
"""
