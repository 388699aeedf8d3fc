// The kernel of every operator that has a CPU kernel: runs that kernel on CPU aliases, and reports a launch.
#pragma once
#include <ATen/core/dispatch/Dispatcher.h>

#include "call.h"
#include "flops.h"
#include "generators.h"

namespace simulated {

using c10::IValue;

template <class F>
void each_tensor(const IValue& value, F use) {
  if (value.isTensor()) {
    use(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) use(tensor);
  } else if (value.isList()) {
    for (const IValue& one : value.toListRef())
      if (one.isTensor()) use(one.toTensor());
  }
}

template <class F>
IValue map_tensors(const IValue& value, F change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> out;
    for (const at::Tensor& tensor : value.toTensorList()) out.push_back(change(tensor));
    return out;
  }
  bool any = false;
  each_tensor(value, [&](const at::Tensor&) { any = true; });
  if (!any) return value;
  c10::List<std::optional<at::Tensor>> out;
  for (const IValue& one : value.toListRef())
    out.push_back(one.isTensor() ? std::optional<at::Tensor>(change(one.toTensor())) : std::nullopt);
  return out;
}

inline bool reads_only_layout(const std::string& name) {
  const bool like = name.size() > 5 && name.compare(name.size() - 5, 5, "_like") == 0;
  return like || name.rfind("aten::new_", 0) == 0 || name.rfind("aten::is_", 0) == 0;
}

// ---- what is known of an operator before it is called ----
struct Traits {
  const char* name;
  std::vector<bool> written;  // for each argument
  int generator = -1;         // the position of this argument
  bool has_cpu_kernel, only_layout, takes_indices, shape_depends_on_data;

  explicit Traits(const c10::OperatorHandle& op) {
    const auto& schema = op.schema();
    const std::string& full = schema.name();
    name = full.c_str();
    for (size_t i = 0; i < schema.arguments().size(); ++i) {
      const auto& argument = schema.arguments()[i];
      written.push_back(argument.alias_info() && argument.alias_info()->isWrite());
      if (argument.type()->str() == "Generator?") generator = static_cast<int>(i);
    }
    has_cpu_kernel = op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
    only_layout = reads_only_layout(full);
    takes_indices = full.rfind("aten::index", 0) == 0 || full.find("index_put") != std::string::npos;
    shape_depends_on_data =
        op.hasTag(at::Tag::dynamic_output_shape) || op.hasTag(at::Tag::data_dependent_output) ||
        full.find("index_put") != std::string::npos;
  }
};

inline const Traits& traits_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, const Traits*> known;
  const Traits*& found = known[&op.schema()];
  if (!found) found = new Traits(op);  // one for each thread and operator, never freed
  return *found;
}

// ---- the kernel ----
inline void give_generator(IValue& value, const Call& call) {
  TORCH_CHECK(value.isNone() || value.toGenerator().device().type() == SIM, "Expected a 'sim' device type for generator "
              "but found '", value.isNone() ? c10::Device(SIM) : value.toGenerator().device(), "'");
  const at::Generator& own = value.isNone() ? default_generator(call.device) : value.toGenerator();
  TORCH_CHECK(call.device < 0 || own.device().index() == call.device, "Expected a generator of device sim:",
              static_cast<int>(call.device), " but found one of ", own.device());
  value = static_cast<SimulatedGenerator*>(own.unsafeGetGeneratorImpl())->cpu;
}

inline bool has_mask(const torch::jit::Stack& arguments, size_t first) {
  bool found = false;
  for (size_t i = first + 1; i < arguments.size(); ++i)
    each_tensor(arguments[i], [&](const at::Tensor& tensor) {
      found |= tensor.defined() && (tensor.scalar_type() == at::kBool || tensor.scalar_type() == at::kByte);
    });
  return found;
}

inline void boxed_kernel(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  const InsideKernel nested;
  const Traits& traits = traits_of(op);
  const size_t count = traits.written.size(), first = stack->size() - count;
  Call call(traits.name);
  for (size_t i = first; i < stack->size(); ++i) {
    IValue& value = (*stack)[i];
    each_tensor(value, [&](const at::Tensor& tensor) { call.take_device(tensor); });
    if (!value.isDevice() || value.toDevice().type() != SIM) continue;
    if (call.device < 0) call.device = value.toDevice().has_index() ? value.toDevice().index() : current_device;
    value = c10::Device(c10::kCPU);
  }
  if (!traits.takes_indices)
    for (size_t i = first; i < stack->size(); ++i)
      each_tensor((*stack)[i], [&](const at::Tensor& tensor) { call.check_device(tensor); });
  const bool waits = traits.shape_depends_on_data && (!traits.takes_indices || has_mask(*stack, first));
  if (traits.generator >= 0) give_generator((*stack)[first + traits.generator], call);
  call.flops = flops_of(traits.name, *stack, first);
  for (size_t i = 0; i < count; ++i) {
    IValue& value = (*stack)[first + i];
    const bool written = traits.written[i];
    value = map_tensors(value, [&](const at::Tensor& tensor) { return call.alias(tensor, written); });
  }
  const DeviceSwitch entered(call.device);
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    if (traits.has_cpu_kernel) {
      op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    } else {
      op.callBoxed(*stack);
    }
  }
  const size_t outputs = op.schema().returns().size();
  bool only_views = outputs > 0 && call.writes.empty();
  for (size_t i = stack->size() - outputs; i < stack->size(); ++i) {
    IValue& value = (*stack)[i];
    only_views &= value.isTensor() || value.isTensorList();
    value = map_tensors(value, [&](const at::Tensor& tensor) { return call.back(tensor); });
  }
  call.settle_all();
  if (traits.only_layout) call.reads.clear();
  if (only_views && !call.has_new_memory) return;
  call.report();
  if (waits) call.synchronize();
}

// Operators with a CPU kernel take it, even where torch has a composite kernel with other bits.
inline int register_kernels() {
  static auto* registered = new std::vector<c10::RegistrationHandleRAII>();
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findOp(name);
    const bool ours = name.name.rfind("aten::", 0) == 0 && name.name.find("_thnn_") == std::string::npos;
    if (!ours || !op || !op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) continue;
    registered->push_back(dispatcher.registerImpl(name, c10::DispatchKey::PrivateUse1,
                                                  c10::KernelFunction::makeFromBoxedFunction<&boxed_kernel>(),
                                                  std::nullopt, nullptr, "simulated"));
  }
  return static_cast<int>(registered->size());
}

}  // namespace simulated
