#include "zorro/ops/forest_attention.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <cmath>
#include <tuple>
#include <utility>

#include "ops/checks.h"
#include "ops/forest_attention_kernels.h"

namespace zorro {
namespace {

constexpr const char* kOp = "forest_attention";

const char* path_name(AttentionPath path) {
  switch (path) {
    case AttentionPath::kComposed:
      return "composed";
    case AttentionPath::kLevels:
      return "levels";
    case AttentionPath::kFused:
      return "fused";
  }
  throw InvalidArgument("[forest_attention] path must be composed, levels or fused.");
}

AttentionPath path_of(c10::string_view name) {
  for (const AttentionPath path :
       {AttentionPath::kComposed, AttentionPath::kLevels, AttentionPath::kFused})
    if (name == path_name(path)) return path;
  throw InvalidArgument(
      concat("[", kOp, "] path must be composed, levels or fused, got ", name, "."));
}

void check_tensors(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v) {
  check_dims(kOp, "q", q, 3, "[Tq, Hq, D]");
  check_dims(kOp, "k", k, 3, "[Tk, Hkv, D]");
  check_dims(kOp, "v", v, 3, "[Tk, Hkv, D]");
  check_float_dtype(kOp, "q", q);
  for (const auto& [name, x] : {std::pair("k", &k), std::pair("v", &v)}) {
    check_same_dtype(kOp, name, *x, q);
    check_same_device(kOp, name, *x, q);
    check_size(kOp, name, *x, 2, q.sym_size(2));
  }
  check_size(kOp, "v", v, 0, k.sym_size(0));
  check_size(kOp, "v", v, 1, k.sym_size(1));
  ZORRO_CHECK(q.sym_size(2) > 0, "[", kOp, "] q must have a head dimension > 0, got shape ",
              q.sym_sizes(), ".");
  ZORRO_CHECK(k.sym_size(1) > 0 && q.sym_size(1) % k.sym_size(1) == 0, "[", kOp,
              "] heads of q must be a multiple of the heads of k, got ", q.sym_size(1), " and ",
              k.sym_size(1), ".");
}

void check_structure(const at::Tensor& q, const at::Tensor& k, const at::Tensor& visible_until,
                     const at::Tensor& nodes, int64_t q_begin) {
  ZORRO_CHECK(q_begin >= 0 && q.sym_size(0) + q_begin == k.sym_size(0), "[", kOp,
              "] k must hold all tokens before the last query's end, ", q.sym_size(0) + q_begin,
              " rows, got ", k.sym_size(0), ".");
  check_dims(kOp, "visible_until", visible_until, 1, "[Tk]");
  check_int64(kOp, "visible_until", visible_until);
  check_same_device(kOp, "visible_until", visible_until, q);
  check_size(kOp, "visible_until", visible_until, 0, k.sym_size(0));
  check_dims(kOp, "nodes", nodes, 2, "[N, 5]");
  check_int64(kOp, "nodes", nodes);
  check_size(kOp, "nodes", nodes, 1, 5);
}

/// What is read on the host: the table must end where the keys do and cut them at q_begin.
void check_node_table(const at::Tensor& nodes, int64_t num_keys, int64_t q_begin) {
  ZORRO_CHECK(nodes.is_cpu() && nodes.is_contiguous(), "[", kOp,
              "] nodes must be contiguous on the CPU, got strides ", nodes.strides(), " on ",
              nodes.device(), ".");
  const auto* cell = nodes.const_data_ptr<int64_t>();
  const int64_t num_nodes = nodes.size(0);
  const int64_t end = num_nodes == 0 ? 0 : cell[5 * (num_nodes - 1) + 1];
  ZORRO_CHECK(end == num_keys, "[", kOp, "] nodes must end at the last key ", num_keys, ", got ",
              end, ". Pass the nodes of these keys only.");
  bool is_cut = q_begin == end;
  for (int64_t node = 0; node < num_nodes && !is_cut; ++node) is_cut = cell[5 * node] == q_begin;
  ZORRO_CHECK(is_cut, "[", kOp, "] q_begin must be the begin of a node, got ", q_begin, ".");
}

void check_gradient_inputs(const at::Tensor& grad_out, const at::Tensor& q, const at::Tensor& out,
                           const at::Tensor& lse) {
  for (const auto& [name, x] : {std::pair("grad_out", &grad_out), std::pair("out", &out)}) {
    check_dims(kOp, name, *x, 3, "[Tq, Hq, D]");
    check_same_dtype(kOp, name, *x, q);
    check_same_device(kOp, name, *x, q);
    for (const int64_t dim : {0, 1, 2}) check_size(kOp, name, *x, dim, q.sym_size(dim));
  }
  check_dims(kOp, "lse", lse, 2, "[Hq, Tq]");
  check_same_device(kOp, "lse", lse, q);
  check_size(kOp, "lse", lse, 0, q.sym_size(1));
  check_size(kOp, "lse", lse, 1, q.sym_size(0));
}

using Forward = std::tuple<at::Tensor, at::Tensor>;
using Backward = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

Forward attention_kernel(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                         const at::Tensor& visible_until, const at::Tensor& nodes, double scale,
                         int64_t q_begin, c10::string_view path) {
  check_tensors(q, k, v);
  check_structure(q, k, visible_until, nodes, q_begin);
  check_node_table(nodes, k.size(0), q_begin);
  const AttentionCall call{visible_until, nodes, scale, q_begin};
  const AttentionPath chosen = resolve_attention_path(path_of(path), q.scalar_type(), q.device());
  AttentionForward result = chosen == AttentionPath::kLevels
                                ? levels_attention(q, k, v, call, cpu_flash_primitive())
                                : composed_attention(q, k, v, call);
  return {std::move(result.out), std::move(result.lse)};
}

Backward attention_backward_kernel(const at::Tensor& grad_out, const at::Tensor& q,
                                   const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                                   const at::Tensor& lse, const at::Tensor& visible_until,
                                   const at::Tensor& nodes, double scale, int64_t q_begin,
                                   c10::string_view path) {
  check_tensors(q, k, v);
  check_structure(q, k, visible_until, nodes, q_begin);
  check_node_table(nodes, k.size(0), q_begin);
  check_gradient_inputs(grad_out, q, out, lse);
  const AttentionCall call{visible_until, nodes, scale, q_begin};
  const AttentionForward forward{out, lse};
  const AttentionPath chosen = resolve_attention_path(path_of(path), q.scalar_type(), q.device());
  AttentionGradients gradients =
      chosen == AttentionPath::kLevels
          ? levels_attention_backward(grad_out, q, k, v, forward, call, cpu_flash_primitive())
          : composed_attention_backward(grad_out, q, k, v, forward, call);
  return {std::move(gradients.dq), std::move(gradients.dk), std::move(gradients.dv)};
}

Forward attention_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& visible_until, const at::Tensor& nodes, double /*scale*/,
                       int64_t q_begin, c10::string_view path) {
  check_tensors(q, k, v);
  check_structure(q, k, visible_until, nodes, q_begin);
  path_of(path);
  const auto lse_options = q.options().dtype(accumulate_dtype(q.scalar_type()));
  return {at::empty_symint(q.sym_sizes(), q.options()),
          at::empty_symint({q.sym_size(0), q.sym_size(1)}, lse_options).t()};
}

Backward attention_backward_meta(const at::Tensor& grad_out, const at::Tensor& q,
                                 const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
                                 const at::Tensor& lse, const at::Tensor& visible_until,
                                 const at::Tensor& nodes, double /*scale*/, int64_t q_begin,
                                 c10::string_view path) {
  check_tensors(q, k, v);
  check_structure(q, k, visible_until, nodes, q_begin);
  check_gradient_inputs(grad_out, q, out, lse);
  path_of(path);
  return {at::empty_symint(q.sym_sizes(), q.options()),
          at::empty_symint(k.sym_sizes(), k.options()),
          at::empty_symint(v.sym_sizes(), v.options())};
}

}  // namespace

AttentionPath resolve_attention_path(AttentionPath path, at::ScalarType /*dtype*/,
                                     at::Device device) {
  if (path == AttentionPath::kFused)
    return device.is_cpu() ? AttentionPath::kLevels : AttentionPath::kComposed;
  ZORRO_CHECK_AS(NotSupported, path != AttentionPath::kLevels || device.is_cpu(), "[", kOp,
                 "] path levels must run on the CPU, got ", device, ". Use fused.");
  return path;
}

AttentionResult forest_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                 const at::Tensor& visible_until, const at::Tensor& nodes,
                                 const ForestAttentionOptions& options) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("zorro::forest_attention", "")
                             .typed<decltype(attention_kernel)>();
  check_dims(kOp, "q", q, 3, "[Tq, Hq, D]");
  const double scale =
      options.scale == 0 ? 1.0 / std::sqrt(static_cast<double>(q.size(2))) : options.scale;
  auto [out, lse] =
      op.call(q, k, v, visible_until, nodes, scale, options.q_begin, path_name(options.path));
  return {std::move(out), std::move(lse)};
}

TORCH_LIBRARY_IMPL(zorro, CompositeExplicitAutograd, m) {
  m.impl("forest_attention", attention_kernel);
  m.impl("forest_attention_backward", attention_backward_kernel);
}

TORCH_LIBRARY_IMPL(zorro, Meta, m) {
  m.impl("forest_attention", attention_meta);
  m.impl("forest_attention_backward", attention_backward_meta);
}

}  // namespace zorro
