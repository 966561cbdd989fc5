#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>

#include "ops/forest_attention_kernels.h"

namespace zorro {
namespace {

class CpuFlash final : public FlashPrimitive {
 public:
  std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& q, const at::Tensor& k,
                                             const at::Tensor& v, bool causal,
                                             double scale) const override {
    return at::_scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, {}, scale);
  }

  std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(
      const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
      const at::Tensor& out, const at::Tensor& lse, bool causal, double scale) const override {
    return at::_scaled_dot_product_flash_attention_for_cpu_backward(grad_out, q, k, v, out, lse,
                                                                    0.0, causal, {}, scale);
  }
};

}  // namespace

const FlashPrimitive& cpu_flash_primitive() {
  static const CpuFlash primitive;
  return primitive;
}

}  // namespace zorro
