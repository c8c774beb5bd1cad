"""Where models come from: the packaged one, a local folder, or a hub id.

`graft.hub.load.load_model` is the way in; nothing here imports torch until a model is really needed.
"""
