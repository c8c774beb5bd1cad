"""The persistent datastore: the user's own text, indexed once on disk and looked up in microseconds.

`corpus` reads documents, `build` indexes them, `format` defines the files on disk, `lookup` searches them.
"""
