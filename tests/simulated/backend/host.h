// Reads and writes of pinned memory by operators on the host.
#pragma once
#include <ATen/record_function.h>

#include "kernels.h"

namespace simulated {

inline std::unique_ptr<at::ObserverContext> see_operator(const at::RecordFunction& function) {
  if (kernels_under_way || !observed()) return nullptr;
  const auto schema = function.operator_schema();
  if (!schema || reads_only_layout(schema->name())) return nullptr;
  std::vector<int64_t> reads, writes;
  bool device_takes_part = false;
  size_t position = 0;
  for (const IValue& value : function.inputs()) {
    const auto& arguments = schema->arguments();
    const auto* aliasing = position < arguments.size() ? arguments[position].alias_info() : nullptr;
    ++position;
    device_takes_part |= value.isDevice() && value.toDevice().type() == SIM;
    each_tensor(value, [&](const at::Tensor& tensor) {
      device_takes_part |= on_device(tensor);
      const bool viewed = aliasing && !aliasing->isWrite();
      if (viewed || !tensor.defined() || !tensor.is_cpu()) return;
      if (auto* block = pinned_block(tensor)) (aliasing ? writes : reads).push_back(block->id);
    });
  }
  if (device_takes_part || (reads.empty() && writes.empty())) return nullptr;
  const at::Tag tag = at::Tag::inplace_view;  // changes the shape alone
  auto op = c10::Dispatcher::singleton().findOp(schema->operator_name());
  if (op && op->hasTag(tag)) return nullptr;
  py::gil_scoped_acquire gil;
  methods->host_access(host_thread(), py::str(function.name()), py::cast(reads), py::cast(writes), place_here());
  return nullptr;
}

inline void watch_host(bool on) {  // called with the lock of pinned memory
  static at::CallbackHandle handle = 0;
  if (on) {
    handle = at::addGlobalCallback(
        at::RecordFunctionCallback(see_operator).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  } else {
    at::removeCallback(handle);
  }
}

}  // namespace simulated
