// The operators that cannot run as CPU kernels on aliases: new tensors, copies, storages, items, convolutions.
#pragma once
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include "kernels.h"
#include "streams.h"

namespace simulated {

using at::IntArrayRef;
using c10::Device;
using c10::SymInt;
using c10::SymIntArrayRef;
using std::optional;

// ---- new tensors ----
constexpr auto SIM_KEYS = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
inline DeviceIndex named(optional<Device> device) {
  if (!device || !device->has_index()) return -1;
  check_device_exists(device->index());
  return device->index();
}

inline at::Tensor empty(IntArrayRef size, optional<at::ScalarType> dtype, optional<at::Layout>, optional<Device> device,
                        optional<bool>, optional<at::MemoryFormat> format) {
  const DeviceSwitch entered(named(device));
  return static_cast<at::Tensor>(
      at::detail::empty_generic(size, &device_allocator, SIM_KEYS, at::dtype_or_default(dtype), format));
}
inline at::Tensor empty_strided(IntArrayRef size, IntArrayRef stride, optional<at::ScalarType> dtype,
                                optional<at::Layout>, optional<Device> device, optional<bool>) {
  const DeviceSwitch entered(named(device));
  return static_cast<at::Tensor>(
      at::detail::empty_strided_generic(size, stride, &device_allocator, SIM_KEYS, at::dtype_or_default(dtype)));
}

// ---- copies ----
inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const InsideKernel nested;
  if (!from.numel() && !to.numel()) return to;
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    Call ends("aten::copy_");
    at::Tensor target = ends.alias(to);
    Call source("aten::copy_");
    target.copy_(source.alias(from));
  }
  const int source = on_device(from) ? from.device().index() : -1, target = on_device(to) ? to.device().index() : -1;
  auto stream = [&](int device) { return key(stream_here(static_cast<DeviceIndex>(device))); };
  py::gil_scoped_acquire gil;
  methods->copied(host_thread(), source >= 0 ? py::object(py::int_(stream(source))) : py::none(),
                  target >= 0 ? py::object(py::int_(stream(target))) : py::none(), id_of(from), id_of(to), non_blocking,
                  bytes_of(to), place_here());
  return to;
}
inline at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

// ---- storages ----
inline const at::Tensor& resize_(const at::Tensor& self, IntArrayRef size, optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  const size_t needed = (c10::multiply_integers(size) + impl->storage_offset()) * impl->itemsize();
  if (needed > self.storage().nbytes()) hooks.resizePrivateUse1Bytes(self.storage(), needed);
  impl->set_sizes_contiguous(size);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}
inline at::Tensor& set_view(at::Tensor& self, Storage storage, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.data() && stride.size() == size.size()) {
    impl->set_sizes_and_strides(size, stride);
  } else {
    impl->set_sizes_contiguous(size);
  }
  return self;
}
inline at::Tensor& set_storage(at::Tensor& self, Storage storage) {
  const auto count = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_view(self, std::move(storage), 0, {count}, {1});
}
inline at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& from) {
  return set_view(self, from.storage(), from.storage_offset(), from.sizes(), from.strides());
}
inline at::Tensor& set_nothing(at::Tensor& self) {
  DataPtr nothing(nullptr, self.device());
  return set_view(self, Storage(Storage::use_byte_size_t(), 0, std::move(nothing), &device_allocator, true), 0, {0}, {1});
}
inline void record_stream(at::Tensor& self, Stream stream) {
  device_allocator.recordStream(self.storage().data_ptr(), stream);
}
inline bool is_pinned(const at::Tensor& self, optional<Device>) { return pinned_block(self) != nullptr; }

// Module.to() keeps its Parameters if their data can be replaced by data on the device, as on CUDA.
inline bool keeps_parameters = true;
inline bool data_can_be_replaced(const at::Tensor& one, const at::Tensor& other) {
  return keeps_parameters || one.key_set() == other.key_set();  // torch's rule for devices of vendors
}

// ---- items ----
inline at::Scalar item(const at::Tensor& self) {
  const InsideKernel nested;
  Call call("aten::item");
  call.take_device(self);
  const at::Tensor alias = call.alias(self);
  call.report();
  call.synchronize();
  return at::_local_scalar_dense(alias);
}

// ---- dropout ----
// torch takes a fused dropout on an accelerator, which rounds differently from the CPU's and has no generator.
inline at::Tensor dropout(const at::Tensor& input, double p, bool train) {
  TORCH_CHECK(p >= 0 && p <= 1, "dropout probability has to be between 0 and 1, but got ", p);
  if (p == 0 || !train || input.numel() == 0) return input;
  if (p == 1) return input.mul(at::zeros({}, input.options()));
  const at::Tensor noise = at::empty_like(input).bernoulli_(1 - p).div_(1 - p);
  return input * noise;
}

// ---- convolutions ----
// torch chooses a kernel by the device, so these ask again, with CPU tensors.
inline at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const optional<at::Tensor>& bias,
                              SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed,
                              SymIntArrayRef output_padding, SymInt groups) {
  const InsideKernel nested;
  Call call("aten::convolution");
  call.take_device(input);
  call.check_device(weight);
  const bool has_bias = bias && bias->defined();
  const at::AutoDispatchBelowADInplaceOrView below;
  const at::Tensor output = at::convolution_symint(
      call.alias(input), call.alias(weight), has_bias ? optional<at::Tensor>(call.alias(*bias)) : std::nullopt, stride,
      padding, dilation, transposed, output_padding, std::move(groups));
  call.flops = convolution_flops(transposed ? input : output, weight);
  at::Tensor result = call.back(output);
  call.report();
  return result;
}
inline std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, SymIntArrayRef stride,
    SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed, SymIntArrayRef output_padding, SymInt groups,
    std::array<bool, 3> mask) {
  const InsideKernel nested;
  Call call("aten::convolution_backward");
  call.take_device(input);
  call.flops = (int{mask[0]} + int{mask[1]}) * convolution_flops(transposed ? input : grad, weight);
  const std::vector<SymInt> bias{transposed ? weight.sym_size(1) * groups : weight.sym_size(0)};
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto [input_grad, weight_grad, bias_grad] = at::convolution_backward_symint(
      call.alias(grad), call.alias(input), call.alias(weight), at::OptionalSymIntArrayRef(bias), stride, padding,
      dilation, transposed, output_padding, groups, mask);
  auto results = std::make_tuple(call.back(input_grad), call.back(weight_grad), call.back(bias_grad));
  call.report();
  return results;
}

}  // namespace simulated
