#pragma once

#include <ATen/core/Tensor.h>

namespace zorro {

/// How attention is computed. The numbers are the same.
enum class AttentionPath {
  kComposed,  ///< dense mask, plain ATen, any device and dtype: the definition
  kLevels,    ///< a flash primitive: causal per node, one rectangle per inner node, merged by lse
  kFused      ///< the best there is for dtype and device (resolve_attention_path tells which)
};

/// What kFused stands for on this dtype and device; any other path is returned as it is.
///
/// Throws  NotSupported for kLevels anywhere but on the CPU.
AttentionPath resolve_attention_path(AttentionPath path, at::ScalarType dtype, at::Device device);

struct ForestAttentionOptions {
  /// Factor on the scores; 0: head_dim^-1/2.
  double scale = 0;
  /// The queries are the packed tokens [q_begin, q_begin + q.size(0)); keys and values are all
  /// packed tokens before the last query's end: k.size(0) == q_begin + q.size(0). q_begin must be
  /// the begin of a node (or the end of all). visible_until and nodes are those of the keys: cut
  /// off where the keys end, which must be the end of a node; their values may point beyond.
  int64_t q_begin = 0;
  AttentionPath path = AttentionPath::kFused;
};

struct AttentionResult {
  at::Tensor out;  ///< [Tq, Hq, D] contiguous, dtype of q
  /// [Hq, Tq], a view on [Tq, Hq]: natural log of the sum of exponentials, float32 (float64 for
  /// float64); no gradient.
  at::Tensor lse;
};

/// Attention of every token over its own path in the forest.
///
/// out[q] = softmax_k(q . k * scale) v over keys k with k <= q < visible_until[k].
///
/// Shapes    q [Tq, Hq, D] · k, v [Tk, Hkv, D], Hq % Hkv == 0, any strides
///           visible_until [Tk] int64 · nodes [N, 5] int64, contiguous, on the CPU
/// Types     float64, float32, bfloat16, one dtype and device; computes in float32 (float64 for
///           float64) and rounds once.
/// Gradients q, k, v; a shared token receives the sum over the samples below it. Once
///           differentiable. Saves q, k, v, out and lse.
/// Cost      kComposed: per tree, queries times keys, in time and memory. kLevels: visible pairs in
///           time, memory linear in T; a part is copied only to join short nodes in one call.
/// Reads     kComposed the mask from visible_until and where trees begin from nodes; kLevels nodes
///           only. Sizes are checked, agreement of the two is the builder's promise.
/// Throws    InvalidArgument when a shape, dtype, device or the query range disagrees.
/// Source    FlashMask arXiv 2410.01359 (mask), FlashAttention-2 arXiv 2307.08691 (algorithm);
///           docs/math.md#attention.
AttentionResult forest_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const at::Tensor& visible_until, const at::Tensor& nodes,
                                 const ForestAttentionOptions& options = {});

}  // namespace zorro
