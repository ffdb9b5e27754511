"""The implementation of torchium.linalg and torchium.elementwise. `ops` has the matrix functions for PyTorch tensors:
they call the C library by `dispatch`, with `gradients` if a gradient is required, or the operators of `operators` under
a compiler or transform. `arrays` has them for NumPy, CuPy and JAX, and `shapes` the shapes of results for both.
`elementwise` runs kernels whose source `elementwise_source` writes.

No module is imported here: `shapes` and `arrays` work without PyTorch.
"""
