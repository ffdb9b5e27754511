"""What is behind torchium.linalg and torchium.elementwise. `ops` has the matrix functions for PyTorch's tensors: it
calls the C library by `dispatch`, with `gradients` where a gradient is wanted, or the operators that `operators`
declares where a compiler or a transform looks on. `arrays` has them for NumPy, CuPy and JAX, and `shapes` tells the
shapes of results to both. `elementwise` runs the kernels whose source `elementwise_source` writes.

Nothing is imported here: `shapes` and `arrays` do without PyTorch.
"""
