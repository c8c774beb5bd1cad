"""The round's candidates on a GPU: the same trees as the C code of `graft.tree` makes, without asking the host.

Buffers in, buffers out, no synchronisation: all of it may run inside a CUDA graph. It needs torch and Triton, and no
engine. Importing the modules of this folder needs Triton.
"""
