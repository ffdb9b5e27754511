/* A power of a symmetric positive semidefinite matrix, A^p = V diag(max(w, eps)^p) V', as a PyTorch extension: a
 * kernel, its launch and a C++ wrapper. torch.utils.cpp_extension compiles the whole file with nvcc; torchium.kernel
 * compiles the kernel alone, for a GPU or for the CPU. */
template <typename T> __global__ void scale_columns(const T *vectors, const T *values, T *scaled, int n, T power, T eps)
{
    int column = blockIdx.x * blockDim.x + threadIdx.x, row = blockIdx.y;
    if (column < n) {
        T value = values[column] > eps ? values[column] : eps;
        scaled[(long long)row * n + column] = vectors[(long long)row * n + column] * pow(value, power);
    }
}

#if defined(__CUDACC__) && !defined(__CUDACC_RTC__) /* nvcc, which compiles for the host too */
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <torch/extension.h>

static at::Tensor matrix_power(const at::Tensor &a, double power, double eps)
{
    TORCH_CHECK(a.is_cuda() && a.dim() == 2 && a.size(0) == a.size(1), "expected a square CUDA matrix");
    const c10::cuda::CUDAGuard guard(a.device());
    auto [values, vectors] = at::linalg_eigh(a);
    const at::Tensor v = vectors.contiguous(); /* the solver's are column-major */
    at::Tensor scaled = at::empty_like(v);
    const int n = static_cast<int>(a.size(0)), threads = 256;
    const dim3 blocks((n + threads - 1) / threads, n);
    AT_DISPATCH_FLOATING_TYPES(v.scalar_type(), "matrix_power", [&] {
        scale_columns<scalar_t><<<blocks, threads, 0, c10::cuda::getCurrentCUDAStream()>>>(
            v.data_ptr<scalar_t>(), values.data_ptr<scalar_t>(), scaled.data_ptr<scalar_t>(), n,
            static_cast<scalar_t>(power), static_cast<scalar_t>(eps));
    });
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    return at::matmul(scaled, v.mT());
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module)
{
    module.def("matrix_power", &matrix_power);
}
#endif
