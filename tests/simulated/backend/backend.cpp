// A simulated accelerator "sim" on PrivateUse1. Device memory is host memory, and every kernel is the CPU's: it runs at
// once, on CPU aliases. Launches, copies, allocations, events and waits are reported to a Python observer.
#include <ATen/autocast_mode.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>

#include "host.h"
#include "own_kernels.h"
#include "streams.h"

namespace simulated {

REGISTER_ALLOCATOR(SIM, &device_allocator);
C10_REGISTER_GUARD_IMPL(PrivateUse1, SimulatedGuard);

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage_storage_offset", set_view);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("set_", set_nothing);
  library.impl("record_stream", record_stream);
  library.impl("_has_compatible_shallow_copy_type", data_can_be_replaced);
  library.impl("_local_scalar_dense", item);
  library.impl("dropout", dropout);
  library.impl("convolution_overrideable", convolution);
  library.impl("convolution_backward_overrideable", convolution_backward);
}
TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) { library.impl("dropout", dropout); }
TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&boxed_kernel>());
}
// A copy resolves conjugates and negatives itself; torch's fallback would clone the source, and a clone is a copy.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

// Runs a function of CPU tensors on aliases of device tensors, as one launch.
std::vector<at::Tensor> as_launch(const char* name, const std::vector<at::Tensor>& inputs, const py::function& run) {
  const InsideKernel nested;
  Call call(name);
  std::vector<at::Tensor> aliases, outputs;
  for (const auto& tensor : inputs) call.take_device(tensor);
  for (const auto& tensor : inputs) aliases.push_back(call.alias(tensor));
  for (const auto& tensor : run(aliases).cast<std::vector<at::Tensor>>()) outputs.push_back(call.back(tensor.detach()));
  call.report();
  return outputs;
}

void start(py::object observer, int devices, std::vector<std::string> folders_not_shown) {
  num_devices = devices;
  hidden_folders = std::move(folders_not_shown);
  observe_with(std::move(observer));
  at::RegisterPrivateUse1HooksInterface(&hooks);
}

}  // namespace simulated

namespace at::native {  // attention takes the kernel that it takes on a CPU

int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                         double dropout, bool causal, std::optional<double> scale, bool grouped) {
  simulated::Call call("aten::_fused_sdp_choice");
  auto alias = [&](const Tensor& tensor) { return call.alias(tensor).set_requires_grad(tensor.requires_grad()); };
  std::optional<Tensor> own_mask = mask && mask->defined() ? std::optional(call.alias(*mask)) : std::nullopt;
  return at::_fused_sdp_choice(alias(query), alias(key), alias(value), own_mask, dropout, causal, scale, grouped);
}
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &choose_attention)

}  // namespace at::native

namespace at::autocast {  // the rules of CUDA's autocast

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SINGLE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define CHOSEN(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(SINGLE)
  AT_FORALL_FP32_SET_OPT_DTYPE(CHOSEN)
  AT_FORALL_PROMOTE(WIDEST)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
}

}  // namespace at::autocast

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  using namespace simulated;
  module.def("start", &simulated::start);
  module.def("register_kernels", &register_kernels);
  module.def("take_log", &take_log);
  module.def("frames_of", &frames_of);
  module.def("place_here", &place_here);
  module.def("host_thread", &host_thread);
  module.def("default_generator", [](int device) { return default_generator(static_cast<DeviceIndex>(device)); });
  module.def("block_of", &id_of);
  module.def("pinned_block", [](const at::Tensor& tensor) { return pinned_block(tensor) ? id_of(tensor) : 0; });
  module.def("learn_slices",
             [](const at::Tensor& slice) { slice_deleter = slice.storage().data_ptr().get_deleter(); });
  module.def("keep_parameters", [](bool keep) { keeps_parameters = keep; });
  module.def("as_launch", &as_launch);
}
