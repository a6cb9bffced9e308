"""Training on a GPU: CUDA context, CUDA graphs, precision and memory format, fast kernels."""
