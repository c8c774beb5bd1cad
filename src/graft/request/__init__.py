"""Requests: an answer's tokens, text and statistics while it is decoded, and the batch that it belongs to."""
