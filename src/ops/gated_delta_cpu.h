#pragma once

#include <cstdint>

#include "ops/isa.h"

// The gated delta rule of one node and one value head on the CPU, all of it in one thread's cache.
// Raw pointers; names as in docs/math.md#gated-delta-rule.
namespace zorro::gated_delta {

/// A head's rows of a [T, heads, size] tensor: row t stands at data + t * stride.
template <typename T>
struct Rows {
  T* data;
  int64_t stride;
};

template <typename T>
struct HeadForward {
  int64_t begin, end;  ///< tokens of the node
  int64_t dk, dv;
  Rows<const T> q, k, v, g, beta;
  Rows<T> out;
  T* state;         ///< [dk, dv] before the node, becomes the one after it
  T* chunk_states;  ///< state before chunk i at chunk_states + chunk_offset[i]
  const int64_t* chunk_offset;
};

template <typename T>
struct HeadBackward {
  int64_t begin, end;
  int64_t dk, dv;
  Rows<const T> q, k, v, g, beta, d_out;
  Rows<T> d_q, d_k, d_v, d_g, d_beta;
  T* d_state;  ///< [dk, dv] of the state after the node, becomes that of the one before it
  const T* chunk_states;
  const int64_t* chunk_offset;
};

/// Values of scratch that one call needs.
int64_t scratch_size(int64_t dk, int64_t dv);

template <typename T>
void forward_head(const HeadForward<T>& head, T* scratch, Isa isa);
template <typename T>
void backward_head(const HeadBackward<T>& head, T* scratch, Isa isa);

}  // namespace zorro::gated_delta
