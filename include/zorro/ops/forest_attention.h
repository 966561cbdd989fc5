#pragma once

#include <ATen/core/Tensor.h>

namespace zorro {

/// How attention is computed. The numbers are the same.
enum class AttentionPath {
  kComposed,  ///< dense mask, plain ATen, any device and dtype: the definition
  kLevels,    ///< ATen's flash primitive: causal per node, one rectangle per tree level, merged by log-sum-exp
  kFused      ///< the best there is for dtype and device (resolve_attention_path tells which)
};

/// What kFused stands for on this dtype and device; any other path is returned as it is.
AttentionPath resolve_attention_path(AttentionPath path, at::ScalarType dtype, at::Device device);

struct ForestAttentionOptions {
  /// Factor on the scores; 0: head_dim^-1/2.
  double scale = 0;
  /// The queries are the packed tokens [q_begin, q_begin + q.size(0)); keys and values are all packed tokens before
  /// the last query's end: k.size(0) == q_begin + q.size(0). q_begin must be the begin of a node (or the end of all).
  int64_t q_begin = 0;
  AttentionPath path = AttentionPath::kFused;
};

struct AttentionResult {
  at::Tensor out;  ///< [Tq, Hq, D], dtype of q
  at::Tensor lse;  ///< [Hq, Tq] natural log of the sum of exponentials, float32 (float64 for float64); no gradient
};

/// Attention of every token over its own path in the forest.
///
/// out[q] = softmax_k(q . k * scale) v over keys k with k <= q < visible_until[k].
///
/// Shapes    q [Tq, Hq, D] · k, v [Tk, Hkv, D], Hq % Hkv == 0 · visible_until [Tk] · nodes [N, 5] on the CPU.
/// Types     float64, float32, bfloat16, one dtype and device; accumulates in float32 (float64 for float64).
/// Gradients q, k, v; a shared token receives the sum over the samples below it.
/// Cost      kComposed O(Tq Tk Hq) time and memory; kLevels O(visible pairs) time, memory linear in T.
/// Throws    InvalidArgument when a shape, dtype or device disagrees.
/// Source    FlashMask arXiv 2410.01359 (mask), FlashAttention-2 arXiv 2307.08691; docs/math.md#attention.
AttentionResult forest_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const at::Tensor& visible_until, const at::Tensor& nodes,
                                 const ForestAttentionOptions& options = {});

}  // namespace zorro
