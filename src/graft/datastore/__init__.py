"""The datastore: an index of the user's own text on disk, searched in microseconds.

`corpus` reads documents, `build` indexes them, `format` defines the files, `lookup` searches them.
"""
