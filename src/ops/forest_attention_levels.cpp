#include <ATen/ops/empty.h>
#include <ATen/ops/logaddexp.h>
#include <ATen/ops/zeros.h>

#include <vector>

#include "ops/checks.h"
#include "ops/forest_attention_kernels.h"
#include "ops/forest_attention_parts.h"

namespace zorro {
namespace {

/// Lifts bfloat16 to float32 (the parts are summed there, and the CPU primitive loses three bits in
/// its bfloat16 backward without being faster) and makes the last dimension contiguous.
at::Tensor lift(const at::Tensor& x) {
  const at::Tensor lifted = x.to(accumulate_dtype(x.scalar_type()));
  return lifted.stride(2) == 1 ? lifted : lifted.contiguous();
}

/// A view on evenly spaced equal nodes: [T, ...] -> [nodes, length, ...]; row 0 of x is token
/// `offset`.
at::Tensor view_nodes(const at::Tensor& x, const TriangleBatch& batch, int64_t offset) {
  std::vector<int64_t> sizes = x.sizes().vec(), strides = x.strides().vec();
  sizes[0] = batch.max_length;
  sizes.insert(sizes.begin(), batch.size());
  strides.insert(strides.begin(), batch.stride * x.stride(0));
  return x.as_strided(sizes, strides,
                      x.storage_offset() + (batch.begins.front() - offset) * x.stride(0));
}

/// Calls visit(rows of a node in x, its rows in the padded batch).
template <typename Visit>
void for_each_node(const at::Tensor& x, const at::Tensor& padded, const TriangleBatch& batch,
                   int64_t offset, const Visit& visit) {
  for (int64_t node = 0; node < batch.size(); ++node) {
    const int64_t begin = batch.begins[static_cast<size_t>(node)] - offset;
    const int64_t length = batch.lengths[static_cast<size_t>(node)];
    visit(x.slice(0, begin, begin + length), padded.select(0, node).slice(0, 0, length));
  }
}

/// The rows of a batch, [nodes, heads, length, ...]: a view where nodes are evenly spaced, else a
/// copy padded on the right with zeros. Pads are exact: a padded key comes after every real query,
/// a padded query has no upstream gradient.
at::Tensor take_nodes(const at::Tensor& x, const TriangleBatch& batch, int64_t offset) {
  if (batch.stride > 0) return view_nodes(x, batch, offset).transpose(1, 2);
  std::vector<int64_t> shape = x.sizes().vec();
  shape[0] = batch.max_length;
  shape.insert(shape.begin(), batch.size());
  const at::Tensor padded = at::zeros(shape, x.options());
  for_each_node(x, padded, batch, offset,
                [](const at::Tensor& from, const at::Tensor& to) { to.copy_(from); });
  return padded.transpose(1, 2);
}

/// Writes [nodes, heads, length, ...] rows to their tokens of x; pads are dropped.
void put_nodes(const at::Tensor& x, const at::Tensor& rows, const TriangleBatch& batch,
               int64_t offset) {
  if (batch.stride > 0) {
    view_nodes(x, batch, offset).transpose(1, 2).copy_(rows);
    return;
  }
  for_each_node(x, rows.transpose(1, 2), batch, offset,
                [](const at::Tensor& to, const at::Tensor& from) { to.copy_(from); });
}

/// [T, heads, ...] tokens [begin, end) -> [1, heads, end - begin, ...], a view.
at::Tensor as_one(const at::Tensor& x, int64_t begin, int64_t end) {
  return x.slice(0, begin, end).transpose(0, 1).unsqueeze(0);
}

/// Inverse of take_nodes when the batch is all there is: [nodes, heads, length, ...] -> [T, ...].
at::Tensor as_packed(const at::Tensor& rows) {
  return rows.transpose(1, 2).flatten(0, 1).contiguous();
}

/// The naive batch: equal roots without gaps, nothing to gather or to merge.
bool is_one_call(const AttentionParts& parts, int64_t q_begin) {
  return q_begin == 0 && parts.rectangles.empty() && parts.triangles.size() == 1 &&
         parts.triangles[0].stride == parts.triangles[0].max_length;
}

/// Merges a part into the running result: out = sum of the parts weighted by exp(lse of the part -
/// lse of all). One pass over out: the weight of the new part is sigmoid(its lse - lse so far).
void merge(const at::Tensor& out, const at::Tensor& lse, const at::Tensor& part,
           const at::Tensor& part_lse) {
  out.lerp_(part, part_lse.sub(lse).sigmoid_().unsqueeze(-1));
  lse.copy_(at::logaddexp(lse, part_lse));
}

}  // namespace

AttentionForward levels_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const AttentionCall& call, const FlashPrimitive& primitive) {
  const at::Tensor q32 = lift(q), k32 = lift(k), v32 = lift(v);
  const int64_t offset = call.q_begin;
  const AttentionParts parts = attention_parts(call.nodes, offset, k.size(0));
  const auto triangles = [&](const TriangleBatch& batch) {
    return primitive.forward(take_nodes(q32, batch, offset), take_nodes(k32, batch, 0),
                             take_nodes(v32, batch, 0), /*causal=*/true, call.scale);
  };
  if (is_one_call(parts, offset)) {
    const auto [out, lse] = triangles(parts.triangles[0]);
    return {as_packed(out).to(q.scalar_type()), as_packed(lse).t()};
  }
  at::Tensor out = at::empty(q.sizes(), q32.options());                     // [Tq, Hq, D]
  const at::Tensor lse = at::empty({q.size(0), q.size(1)}, q32.options());  // [Tq, Hq]
  for (const TriangleBatch& batch : parts.triangles) {
    const auto [part, part_lse] = triangles(batch);
    put_nodes(out, part, batch, offset);
    put_nodes(lse, part_lse, batch, offset);
  }
  for (const Rectangle& block : parts.rectangles) {
    const int64_t begin = block.q_begin - offset, end = block.q_end - offset;
    const auto [part, part_lse] =
        primitive.forward(as_one(q32, begin, end), as_one(k32, block.k_begin, block.k_end),
                          as_one(v32, block.k_begin, block.k_end), /*causal=*/false, call.scale);
    merge(as_one(out, begin, end), as_one(lse, begin, end), part, part_lse);
  }
  return {out.to(q.scalar_type()), lse.t()};
}

AttentionGradients levels_attention_backward(const at::Tensor& grad_out, const at::Tensor& q,
                                             const at::Tensor& k, const at::Tensor& v,
                                             const AttentionForward& forward,
                                             const AttentionCall& call,
                                             const FlashPrimitive& primitive) {
  const at::Tensor q32 = lift(q), k32 = lift(k), v32 = lift(v);
  const at::Tensor grad32 = lift(grad_out), out32 = lift(forward.out);
  const at::Tensor lse = forward.lse.t().contiguous();  // [Tq, Hq]
  const int64_t offset = call.q_begin;
  const AttentionParts parts = attention_parts(call.nodes, offset, k.size(0));
  const auto triangles = [&](const TriangleBatch& batch) {
    return primitive.backward(take_nodes(grad32, batch, offset), take_nodes(q32, batch, offset),
                              take_nodes(k32, batch, 0), take_nodes(v32, batch, 0),
                              take_nodes(out32, batch, offset), take_nodes(lse, batch, offset),
                              /*causal=*/true, call.scale);
  };
  const auto result = [&](const at::Tensor& dq, const at::Tensor& dk, const at::Tensor& dv) {
    return AttentionGradients{dq.to(q.scalar_type()), dk.to(k.scalar_type()),
                              dv.to(v.scalar_type())};
  };
  if (is_one_call(parts, offset)) {
    const auto [dq, dk, dv] = triangles(parts.triangles[0]);
    return result(as_packed(dq), as_packed(dk), as_packed(dv));
  }
  // The triangles write the rows of every query and of its own key; keys before them start at 0.
  const at::Tensor dq = at::empty(q.sizes(), q32.options());
  const at::Tensor dk = at::empty(k.sizes(), q32.options());
  const at::Tensor dv = at::empty(v.sizes(), q32.options());
  for (const at::Tensor& gradient : {dk, dv}) gradient.slice(0, 0, offset).zero_();
  for (const TriangleBatch& batch : parts.triangles) {
    const auto [dq_part, dk_part, dv_part] = triangles(batch);
    put_nodes(dq, dq_part, batch, offset);
    put_nodes(dk, dk_part, batch, 0);
    put_nodes(dv, dv_part, batch, 0);
  }
  for (const Rectangle& block : parts.rectangles) {
    const int64_t begin = block.q_begin - offset, end = block.q_end - offset;
    const auto [dq_part, dk_part, dv_part] = primitive.backward(
        as_one(grad32, begin, end), as_one(q32, begin, end),
        as_one(k32, block.k_begin, block.k_end), as_one(v32, block.k_begin, block.k_end),
        as_one(out32, begin, end), as_one(lse, begin, end), /*causal=*/false, call.scale);
    as_one(dq, begin, end).add_(dq_part);
    as_one(dk, block.k_begin, block.k_end).add_(dk_part);
    as_one(dv, block.k_begin, block.k_end).add_(dv_part);
  }
  return result(dq, dk, dv);
}

}  // namespace zorro
