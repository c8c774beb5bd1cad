"""Graft inside other people's stacks."""
