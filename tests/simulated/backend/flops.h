// The floating-point operations of matrix products, convolutions and attention, from the shapes of their arguments.
#pragma once
#include <ATen/core/stack.h>

#include <cstring>

namespace simulated {

inline double product_flops(const at::Tensor& left, const at::Tensor& right) {  // (..., m, k) by (..., k, n)
  return 2.0 * left.numel() * (right.dim() > 1 ? right.size(-1) : 1);
}

inline double convolution_flops(const at::Tensor& output, const at::Tensor& weight) {
  return output.size(1) ? 2.0 * output.numel() * weight.numel() / output.size(1) : 0;
}

inline double attention_flops(const at::Tensor& query, const at::Tensor& key) {  // two products over all pairs
  return 4.0 * query.numel() * key.size(-2);
}

inline double flops_of(const char* name, const torch::jit::Stack& arguments, size_t first) {
  auto is = [&](const char* other) { return std::strcmp(name, other) == 0; };
  auto tensor = [&](size_t position) { return arguments[first + position].toTensor(); };
  if (is("aten::mm") || is("aten::bmm") || is("aten::mv") || is("aten::dot")) return product_flops(tensor(0), tensor(1));
  if (is("aten::addmm") || is("aten::addmm_") || is("aten::baddbmm") || is("aten::baddbmm_") || is("aten::addmv"))
    return product_flops(tensor(1), tensor(2));
  if (is("aten::_scaled_dot_product_flash_attention_for_cpu")) return attention_flops(tensor(0), tensor(1));
  if (is("aten::_scaled_dot_product_flash_attention_for_cpu_backward"))
    return 2.5 * attention_flops(tensor(1), tensor(2));
  return 0;
}

}  // namespace simulated
