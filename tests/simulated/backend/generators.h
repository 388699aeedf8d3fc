// Generators, and the hooks by which torch finds generators, pinned memory and devices.
#pragma once
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "memory.h"

namespace simulated {

// Holds a CPU generator, which the kernels get: equal seeds give the random numbers of a CPU.
struct SimulatedGenerator final : c10::GeneratorImpl {
  at::Generator cpu;
  SimulatedGenerator(DeviceIndex device, at::Generator cpu)
      : GeneratorImpl(c10::Device(SIM, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(std::move(cpu)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override { return new SimulatedGenerator(device().index(), cpu.clone()); }
};

inline at::Generator new_generator(DeviceIndex device) {
  return at::make_generator<SimulatedGenerator>(device, at::detail::createCPUGenerator(c10::default_rng_seed_val));
}

inline const at::Generator& default_generator(DeviceIndex device) {
  static const auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (int index = 0; index < MOST_DEVICES; ++index) made->push_back(new_generator(static_cast<DeviceIndex>(index)));
    return made;
  }();
  return all->at(device < 0 ? current_device : device);
}

struct SimulatedHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return static_cast<DeviceIndex>(num_devices); }
  void setCurrentDevice(DeviceIndex device) const override { current_device = device; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    const DeviceIndex before = current_device;
    if (device >= 0) current_device = device;
    return before;
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* pointer) const override { return points_to_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  c10::Device getDeviceFromPtr(void*) const override { return {SIM, current_device}; }
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return new_generator(device < 0 ? current_device : device);
  }
  void resizePrivateUse1Bytes(const Storage& storage, size_t nbytes) const override {
    const DeviceSwitch entered(storage.device().index());
    DataPtr fresh = device_allocator.allocate(nbytes);
    if (fresh && storage.data()) std::memcpy(fresh.get(), storage.data(), std::min(nbytes, storage.nbytes()));
    auto* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(nbytes);
  }
};
inline SimulatedHooks hooks;

}  // namespace simulated
