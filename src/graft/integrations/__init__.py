"""Graft inside other libraries."""
