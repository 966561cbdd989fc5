#pragma once

#include <ATen/core/Tensor.h>

#include "ops/gated_delta_chunks.h"

// The CPU way through a level: one task a node (or the children of one parent) and value head, each
// in one thread's cache; no batch of small products, no copy of the inputs by chunk.
namespace zorro::gated_delta {

/// The op's inputs in the accumulation type, contiguous.
struct HeadTensors {
  at::Tensor q, k, v, g, beta;
};

/// Fills out [T, Hv, dv] and chunk_states; returns the states [N, Hv, dk, dv] if wanted, else [0].
at::Tensor forward_heads(const Plan& plan, const HeadTensors& in, const at::Tensor& initial,
                         bool want_states, at::Tensor& out, at::Tensor& chunk_states);

struct HeadGradients {
  at::Tensor q, k;        ///< [T, Hv, dk], by value head
  at::Tensor v, g, beta;  ///< as the inputs
  at::Tensor initial;     ///< [nodes before, Hv, dk, dv]
};

/// d_states [N, Hv, dk, dv] or undefined.
HeadGradients backward_heads(const Plan& plan, const HeadTensors& in, const at::Tensor& d_out,
                             const at::Tensor& d_states, const at::Tensor& chunk_states);

}  // namespace zorro::gated_delta
