"""Triton kernels: attention, matrix products, layers, top-k and the acceptance walk. Importing one needs Triton."""
