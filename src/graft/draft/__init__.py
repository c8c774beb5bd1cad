"""Drafters: small networks that guess what the target will say next. One folder a kind."""
