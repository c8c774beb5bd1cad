"""The persistent datastore: text of the user's own, indexed once on disk and looked up in microseconds.

`corpus` finds documents, `build` makes an index of them, `layout` is what lies on disk, `store` looks it up.
"""
