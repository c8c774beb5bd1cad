"""A round's candidates and trees over flat buffers, without the engine.

`round.DeviceRound` calls the kernels in their order, on the memory that `buffers` describes. They exist twice, with the
same names and arguments, and give the same bits: in C for a CPU (`c_kernels`) and in Triton for a GPU
(`triton_kernels`). Nothing synchronises, so on a GPU all of it may run inside a CUDA graph.
"""
