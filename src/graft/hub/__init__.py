"""Fetching and loading models: the packaged one, a local folder, or a hub id.

`graft.hub.load.load_model` is the entry point. Nothing here imports torch before a model is needed.
"""
