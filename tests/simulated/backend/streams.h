// Streams and events: the guard through which torch reaches them.
#pragma once
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "memory.h"

namespace simulated {

inline std::atomic<int64_t> next_stream{1}, next_event{1};

struct Event {
  int64_t id;
  bool timed;
};

struct SimulatedGuard final : c10::impl::DeviceGuardImplInterface {
  using Device = c10::Device;

  // ---- devices ----
  c10::DeviceType type() const override { return SIM; }
  Device exchangeDevice(Device device) const override {
    const Device before(SIM, current_device);
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return {SIM, current_device}; }
  void setDevice(Device device) const override {
    check_device_exists(device.index());
    current_device = device.index();
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = device.index(); }
  DeviceIndex deviceCount() const noexcept override { return static_cast<DeviceIndex>(num_devices); }
  c10::DeviceCapability getDeviceCapability(Device) const override { return c10::DeviceCapability(); }
  void synchronizeDevice(const DeviceIndex device) const override {
    py::gil_scoped_acquire gil;
    methods->device_synchronized(host_thread(), int{device}, place_here());
  }

  // ---- streams ----
  static DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : current_device; }
  Stream getStream(Device device) const override { return stream_here(index_of(device)); }
  Stream getDefaultStream(Device device) const override { return Stream(Stream::DEFAULT, {SIM, index_of(device)}); }
  Stream getNewStream(Device device, int) const override {
    return Stream(Stream::UNSAFE, {SIM, index_of(device)}, next_stream++);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream exchangeStream(Stream stream) const override {
    const Stream before = stream_here(stream.device_index());
    current_streams[stream.device_index()] = stream.id();
    return before;
  }
  void* getStreamNativeHandle(const Stream stream) const override { return reinterpret_cast<void*>(stream.id()); }
  bool queryStream(const Stream& stream) const override {
    void* event = nullptr;
    record(&event, stream, stream.device_index(), c10::EventFlag::PYTORCH_DEFAULT);
    const bool done = queryEvent(event);
    destroyEvent(event, stream.device_index());
    return done;
  }
  void synchronizeStream(const Stream& stream) const override {
    py::gil_scoped_acquire gil;
    methods->stream_synchronized(host_thread(), key(stream), place_here());
  }
  void recordDataPtrOnStream(const DataPtr& memory, const Stream& stream) const override {
    device_allocator.recordStream(memory, stream);
  }

  // ---- events ----
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag flag) const override {
    if (!*event) *event = new Event{next_event++, flag != c10::EventFlag::PYTORCH_DEFAULT};
    note("recorded", static_cast<Event*>(*event)->id, key(stream));
  }
  void block(void* event, const Stream& stream) const override {
    if (event) note("waited", static_cast<Event*>(event)->id, key(stream));
  }
  bool queryEvent(void* event) const override {
    if (!event) return true;
    py::gil_scoped_acquire gil;
    return methods->event_done(host_thread(), static_cast<Event*>(event)->id).cast<bool>();
  }
  void synchronizeEvent(void* event) const override {
    if (!event) return;
    py::gil_scoped_acquire gil;
    methods->event_synchronized(host_thread(), static_cast<Event*>(event)->id, place_here());
  }
  double elapsedTime(void* start, void* end, const DeviceIndex) const override {
    TORCH_CHECK(start && end, "Both events must be recorded before calculating elapsed time.");
    py::gil_scoped_acquire gil;
    return methods->elapsed_ms(static_cast<Event*>(start)->id, static_cast<Event*>(end)->id).cast<double>();
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    if (!event) return;
    if (observed()) note("event gone", static_cast<Event*>(event)->id);
    delete static_cast<Event*>(event);
  }
};

}  // namespace simulated
