#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

// The two computations behind forest_attention. Arguments are checked; shapes as in the public
// header.
namespace zorro {

struct AttentionForward {
  at::Tensor out;  ///< [Tq, Hq, D], dtype of q
  at::Tensor lse;  ///< [Hq, Tq], a view on [Tq, Hq]
};

struct AttentionGradients {
  at::Tensor dq, dk, dv;
};

/// Structure and scale of one call.
struct AttentionCall {
  at::Tensor visible_until;  ///< [Tk]
  at::Tensor nodes;          ///< [N, 5] on the CPU
  double scale = 1;
  int64_t q_begin = 0;
};

AttentionForward composed_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const AttentionCall& call);
AttentionGradients composed_attention_backward(const at::Tensor& grad_out, const at::Tensor& q,
                                               const at::Tensor& k, const at::Tensor& v,
                                               const AttentionForward& forward,
                                               const AttentionCall& call);

/// Plain attention of a batch, the building block of the level driver. Tensors are [B, H, S, D]
/// views with a contiguous last dimension, k and v with a divisor of q's heads; lse is [B, H, S], a
/// view on [B, S, H]. causal: query i sees keys 0..i (only for equal lengths).
class FlashPrimitive {
 public:
  virtual ~FlashPrimitive() = default;
  virtual std::tuple<at::Tensor, at::Tensor> forward(const at::Tensor& q, const at::Tensor& k,
                                                     const at::Tensor& v, bool causal,
                                                     double scale) const = 0;
  /// out and lse are the merged ones: the call then gives this part's share of every gradient.
  virtual std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(
      const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
      const at::Tensor& out, const at::Tensor& lse, bool causal, double scale) const = 0;
};

/// ATen's CPU flash attention.
const FlashPrimitive& cpu_flash_primitive();

AttentionForward levels_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const AttentionCall& call, const FlashPrimitive& primitive);
AttentionGradients levels_attention_backward(const at::Tensor& grad_out, const at::Tensor& q,
                                             const at::Tensor& k, const at::Tensor& v,
                                             const AttentionForward& forward,
                                             const AttentionCall& call,
                                             const FlashPrimitive& primitive);

}  // namespace zorro
