// Device memory and pinned memory: both are host memory. New memory is filled with NaN.
#pragma once
#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <cstdlib>
#include <cstring>
#include <map>

#include "report.h"

namespace simulated {

using c10::DataPtr;
using c10::DeviceIndex;
using c10::Storage;
using c10::Stream;
using c10::StreamId;

constexpr int MOST_DEVICES = 64;
constexpr int64_t ROUNDING = 512;  // the caching allocator of CUDA counts in blocks of 512 bytes
inline int num_devices = 4;
inline thread_local DeviceIndex current_device = 0;
inline thread_local std::array<StreamId, MOST_DEVICES> current_streams{};
inline std::atomic<int64_t> next_block{1};

inline void check_device_exists(DeviceIndex device) {
  TORCH_CHECK(device >= 0 && device < num_devices, "sim: invalid device ordinal ", static_cast<int>(device),
              "; there are ", num_devices, " devices");
}

inline Stream stream_here(DeviceIndex device) {
  return Stream(Stream::UNSAFE, c10::Device(SIM, device), current_streams[device]);
}

struct DeviceSwitch {  // enters a device for the lifetime of the object
  explicit DeviceSwitch(DeviceIndex device) : before(current_device) {
    if (device >= 0) current_device = device;
  }
  ~DeviceSwitch() { current_device = before; }
  DeviceIndex before;
};

// ---- blocks ----
struct Block {
  int64_t id;
  void* memory;      // null if the CPU storage holds the memory
  Storage kernels;   // the CPU storage of a kernel's output
  DeviceIndex device;  // -1: pinned
  int64_t nbytes;
};

struct Figures {
  std::mutex lock;
  int64_t live = 0, peak = 0, count = 0, peak_count = 0, allocated = 0, freed = 0, requested = 0;
  void add(int64_t nbytes) {
    std::lock_guard<std::mutex> guard(lock);
    live += nbytes;
    allocated += nbytes;
    ++count;
    ++requested;
    peak = std::max(peak, live);
    peak_count = std::max(peak_count, count);
  }
  void drop(int64_t nbytes) {
    std::lock_guard<std::mutex> guard(lock);
    live -= nbytes;
    freed += nbytes;
    --count;
  }
};
inline std::array<Figures, MOST_DEVICES> figures;

inline int64_t rounded(int64_t nbytes) { return (nbytes + ROUNDING - 1) / ROUNDING * ROUNDING; }

inline void* filled(size_t nbytes) {
  void* memory = std::aligned_alloc(64, (nbytes + 64) / 64 * 64);
  std::memset(memory, 0xff, nbytes);  // NaN in each floating-point type
  return memory;
}

inline void drop_block(void* context) {
  auto* block = static_cast<Block*>(context);
  if (block->device >= 0) figures[block->device].drop(block->nbytes);
  if (observed()) note("freed", block->id, PyGILState_Check() ? place_here() : -1);
  std::free(block->memory);
  delete block;
}

inline DataPtr device_memory(size_t nbytes, DeviceIndex device, void* memory, Storage kernels) {
  auto* block = new Block{next_block++, memory, std::move(kernels), device, rounded(nbytes)};
  figures[device].add(block->nbytes);
  note("allocated", block->id, key(stream_here(device)), nbytes);
  void* data = memory ? memory : const_cast<void*>(block->kernels.data());
  return {data, block, &drop_block, c10::Device(SIM, device)};
}

// ---- the allocator of device memory ----
struct SimulatedAllocator final : c10::DeviceAllocator {
  DataPtr allocate(size_t nbytes) override {
    if (!nbytes) return {nullptr, nullptr, &c10::detail::deleteNothing, c10::Device(SIM, current_device)};
    return device_memory(nbytes, current_device, filled(nbytes), Storage());
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop_block; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const DataPtr& memory, Stream stream) override {
    if (memory.get_deleter() == &drop_block) {
      note("recorded on", static_cast<Block*>(memory.get_context())->id, key(stream));
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    Figures& own = figures[device];
    std::lock_guard<std::mutex> guard(own.lock);
    for (auto* bytes : {&stats.allocated_bytes, &stats.active_bytes, &stats.reserved_bytes, &stats.requested_bytes}) {
      auto& all = (*bytes)[0];  // the sum over pools
      all.current = own.live;
      all.peak = own.peak;
      all.allocated = own.allocated;
      all.freed = own.freed;
    }
    for (auto* counts : {&stats.allocation, &stats.active}) {
      (*counts)[0].current = own.count;
      (*counts)[0].peak = own.peak_count;
    }
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(figures[device].lock);
    figures[device].allocated = figures[device].freed = 0;
  }
  void resetPeakStats(DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(figures[device].lock);
    figures[device].peak = figures[device].live;
    figures[device].peak_count = figures[device].count;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    constexpr size_t total = size_t{1} << 36;
    std::lock_guard<std::mutex> guard(figures[device].lock);
    return {total - figures[device].live, total};
  }
};
inline SimulatedAllocator device_allocator;

// ---- the allocator of pinned memory ----
void watch_host(bool on);  // reports reads and writes of pinned memory by the host; see host.h
inline std::mutex pinned_lock;
inline std::map<const void*, size_t> pinned_ranges;

inline void drop_pinned(void* context) {
  {
    std::lock_guard<std::mutex> guard(pinned_lock);
    pinned_ranges.erase(static_cast<Block*>(context)->memory);
    if (pinned_ranges.empty()) watch_host(false);
  }
  drop_block(context);
}

struct PinnedAllocator final : c10::Allocator {
  DataPtr allocate(size_t nbytes) override {
    auto* block = new Block{next_block++, filled(nbytes), Storage(), -1, static_cast<int64_t>(nbytes)};
    {
      std::lock_guard<std::mutex> guard(pinned_lock);
      if (pinned_ranges.empty()) watch_host(true);
      pinned_ranges[block->memory] = nbytes;
    }
    note("pinned", block->id, nbytes);
    return {block->memory, block, &drop_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &drop_pinned; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
};
inline PinnedAllocator pinned_allocator;

inline bool points_to_pinned(const void* pointer) {
  std::lock_guard<std::mutex> guard(pinned_lock);
  auto after = pinned_ranges.upper_bound(pointer);
  if (after == pinned_ranges.begin()) return false;
  --after;
  return pointer < static_cast<const char*>(after->first) + after->second;
}

// ---- which block a tensor lies in ----
// A slice of a storage is a storage that holds a reference to the whole one. Its deleter is torch's own, and is learned
// from a slice at the start.
inline c10::DeleterFnPtr slice_deleter = nullptr;

inline const DataPtr& whole_memory(const Storage& storage) {
  const DataPtr* memory = &storage.data_ptr();
  while (slice_deleter && memory->get_deleter() == slice_deleter)
    memory = &static_cast<c10::StorageImpl*>(memory->get_context())->data_ptr();
  return *memory;
}
inline Block* block_of(const Storage& storage, c10::DeleterFnPtr deleter) {
  const DataPtr& memory = whole_memory(storage);
  return memory.get_deleter() == deleter ? static_cast<Block*>(memory.get_context()) : nullptr;
}
inline Block* pinned_block(const at::Tensor& tensor) {
  return tensor.defined() && tensor.has_storage() ? block_of(tensor.storage(), &drop_pinned) : nullptr;
}
inline int64_t id_of(const at::Tensor& tensor) {  // 0: neither device memory nor pinned memory
  if (!tensor.defined() || !tensor.has_storage()) return 0;
  if (auto* block = block_of(tensor.storage(), &drop_block)) return block->id;
  if (auto* block = block_of(tensor.storage(), &drop_pinned)) return block->id;
  return 0;
}

}  // namespace simulated
