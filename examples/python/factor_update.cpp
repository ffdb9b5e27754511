/* PyTorch's side of a call into the C library: factor_update, Shampoo's moving average F = beta F + (1 - beta) G G'.
 *
 * A tch_tensor only describes memory, so nothing is copied: data, sizes and strides are those of the tensor. Built by
 * cpp_extension.py; no CUDA header is needed, since the library finds its CUDA module by itself. */
#include <map>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <torchium/torchium.h>

static void must(tch_status status)
{
    TORCH_CHECK(status == TCH_OK, tch_status_name(status), ": ", tch_last_error());
}

/* A context is used by one thread at a time, so each thread has its own for each device. They end with the process. */
static tch_context *context_of(const at::Tensor &tensor, int64_t stream)
{
    static thread_local std::map<std::string, tch_context *> contexts;
    tch_context *&context = contexts[tensor.device().str()];
    if (!context) {
        must(tch_context_create(tensor.device().str().c_str(), &context));
    }
    if (tensor.is_cuda()) {
        must(tch_context_set_stream(context, reinterpret_cast<void *>(stream)));
    }
    return context;
}

static tch_tensor describe(const at::Tensor &tensor)
{
    TORCH_CHECK_TYPE(tensor.scalar_type() == at::kFloat, "expected float32, got ", tensor.scalar_type());
    tch_tensor view = tch_tensor_view(tensor.data_ptr(), TCH_FLOAT32, static_cast<int32_t>(tensor.dim()),
                                      const_cast<int64_t *>(tensor.sizes().data()));
    view.strides = const_cast<int64_t *>(tensor.strides().data());
    if (tensor.is_cuda()) {
        view.device = {TCH_DEVICE_CUDA, tensor.get_device()};
    }
    return view;
}

static void factor_update(const at::Tensor &factor, const at::Tensor &gradient, double beta, int64_t stream)
{
    tch_tensor f = describe(factor), g = describe(gradient);
    must(tch_gram(context_of(factor, stream), 1 - beta, &g, 0, beta, &f));
}

TORCH_LIBRARY(torchium_example, library)
{
    library.def("factor_update(Tensor(a!) factor, Tensor gradient, float beta, int stream) -> ()", &factor_update);
}
