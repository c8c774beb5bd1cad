"""Triton kernels, by what they are for. Importing one of them needs Triton."""
