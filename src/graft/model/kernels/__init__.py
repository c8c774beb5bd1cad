"""Triton kernels: attention, matrix products, layers, top-k and the EAGLE-3 head. Importing one needs Triton."""
