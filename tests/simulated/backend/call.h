// One call of an operator: CPU aliases of its device tensors, what it reads and writes, and the way back.
#pragma once
#include <ATen/ATen.h>

#include <unordered_map>

#include "memory.h"

namespace simulated {

inline thread_local int kernels_under_way = 0;
struct InsideKernel {  // the host's own reads of pinned memory are not watched in a kernel
  InsideKernel() { ++kernels_under_way; }
  ~InsideKernel() { --kernels_under_way; }
};

inline bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == SIM; }
inline int64_t bytes_of(const at::Tensor& tensor) { return tensor.numel() * static_cast<int64_t>(tensor.itemsize()); }

struct Call {
  const char* name;
  DeviceIndex device = -1;
  bool has_new_memory = false;
  int64_t nbytes = 0;
  double flops = 0;
  std::vector<int64_t> reads, writes;

  explicit Call(const char* name) : name(name) {}

  // ---- devices ----
  void take_device(const at::Tensor& tensor) {
    if (!on_device(tensor)) return;
    if (device < 0) device = tensor.device().index();
    if (device != tensor.device().index()) refuse(tensor);
  }
  void check_device(const at::Tensor& tensor) const {  // a scalar on the CPU may join
    if (device >= 0 && tensor.defined() && tensor.is_cpu() && tensor.dim() > 0) refuse(tensor);
  }
  void refuse(const at::Tensor& tensor) const {
    TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two devices, sim:",
                static_cast<int>(device), " and ", tensor.device(), "! (when calling ", name, ")");
  }

  // ---- to the CPU ----
  at::Tensor alias(const at::Tensor& tensor, bool written = false) {
    if (!on_device(tensor)) return tensor;
    auto* impl = tensor.unsafeGetTensorImpl();
    at::Tensor out = made(cpu_storage(impl->unsafe_storage()), c10::DispatchKey::CPU, tensor);
    given.emplace(out.unsafeGetTensorImpl(), std::make_pair(out, tensor));
    (written ? writes : reads).push_back(id_of(tensor));
    nbytes += bytes_of(tensor);
    return out;
  }

  // ---- and back ----
  at::Tensor back(const at::Tensor& result) {
    if (!result.defined() || !result.is_cpu()) return result;
    auto known = given.find(result.unsafeGetTensorImpl());
    if (known == given.end()) return wrapped(result);
    settle(known->second.second, result);
    return known->second.second;
  }
  void settle_all() {  // also of out= arguments that the operator does not return
    for (auto& [_, pair] : given) settle(pair.second, pair.first);
  }

  // ---- the report ----
  void report() const {
    if (device < 0) return;
    py::gil_scoped_acquire gil;
    static auto* names = new std::unordered_map<const char*, py::str>();
    const auto label = names->try_emplace(name, name).first->second;
    py::tuple read(reads.size()), written(writes.size());
    for (size_t i = 0; i < reads.size(); ++i) read[i] = reads[i];
    for (size_t i = 0; i < writes.size(); ++i) written[i] = writes[i];
    methods->launch(host_thread(), key(stream_here(device)), label, read, written, nbytes, flops, place_here());
  }
  void synchronize() const {
    if (device < 0) return;
    py::gil_scoped_acquire gil;
    methods->stream_synchronized(host_thread(), key(stream_here(device)), place_here());
  }

 private:
  std::unordered_map<c10::StorageImpl*, Storage> aliases;  // device storage -> CPU storage
  std::unordered_map<c10::StorageImpl*, Storage> origins;  // CPU storage -> device storage
  std::unordered_map<c10::TensorImpl*, std::pair<at::Tensor, at::Tensor>> given;  // CPU alias -> it, its device tensor

  static at::Tensor made(Storage storage, c10::DispatchKey dispatch_key, const at::Tensor& like) {
    auto impl = c10::make_intrusive<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(dispatch_key), like.dtype());
    impl->set_storage_offset(like.storage_offset());
    impl->set_sizes_and_strides(like.sizes(), like.strides());
    at::Tensor out(std::move(impl));
    if (like.is_conj()) out._set_conj(true);
    if (like.is_neg()) out._set_neg(true);
    return out;
  }
  Storage cpu_storage(const Storage& own) {
    auto [found, added] = aliases.try_emplace(own.unsafeGetStorageImpl());
    if (added) {
      DataPtr memory(const_cast<void*>(own.data()), new Storage(own),
                     [](void* held) { delete static_cast<Storage*>(held); }, c10::Device(c10::kCPU));
      found->second = Storage(Storage::use_byte_size_t(), own.nbytes(), std::move(memory), c10::GetAllocator(c10::kCPU),
                              true);
      origins.emplace(found->second.unsafeGetStorageImpl(), own);
    }
    return found->second;
  }
  at::Tensor wrapped(const at::Tensor& result) {
    Storage cpu = result.storage();
    nbytes += bytes_of(result);
    auto found = origins.find(cpu.unsafeGetStorageImpl());
    if (found == origins.end()) {
      has_new_memory = true;
      const size_t n = cpu.nbytes();
      DataPtr memory = n ? device_memory(n, device, nullptr, cpu) : DataPtr(nullptr, c10::Device(SIM, device));
      Storage own(Storage::use_byte_size_t(), n, std::move(memory), &device_allocator, true);
      if (auto* block = block_of(own, &drop_block)) writes.push_back(block->id);
      found = origins.emplace(cpu.unsafeGetStorageImpl(), own).first;
      held.push_back(cpu);
    }
    return made(found->second, c10::DispatchKey::PrivateUse1, result);
  }
  void settle(const at::Tensor& own, const at::Tensor& result) {
    const bool moved = own.storage().data() != result.storage().data();
    if (!moved && own.sizes() == result.sizes() && own.strides() == result.strides()) return;
    if (moved) {  // the kernel gave an out= argument new memory
      auto* impl = own.storage().unsafeGetStorageImpl();
      Storage cpu = result.storage();
      impl->set_data_ptr_noswap(device_memory(cpu.nbytes(), device, nullptr, cpu));
      impl->set_nbytes(cpu.nbytes());
      writes.push_back(id_of(own));
    }
    own.unsafeGetTensorImpl()->set_sizes_and_strides(result.sizes(), result.strides());
  }
  std::vector<Storage> held;  // keeps the keys of `origins` alive
};

}  // namespace simulated
