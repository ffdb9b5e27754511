/* Shampoo's moving average F = beta F + (1 - beta) G G', G of rows x cols, by a thread for each element of F.
 * cpp_extension.py runs it by torchium.kernel and compares it with the same call of the C library. */
__global__ void factor_update(const float *gradient, float *factor, int rows, int cols, float beta)
{
    for (int e = blockIdx.x * blockDim.x + threadIdx.x; e < rows * rows; e += gridDim.x * blockDim.x) {
        const float *a = gradient + (long long)(e / rows) * cols, *b = gradient + (long long)(e % rows) * cols;
        float sum = 0;
        for (int k = 0; k < cols; k++) {
            sum += a[k] * b[k];
        }
        factor[e] = beta * factor[e] + (1 - beta) * sum;
    }
}
