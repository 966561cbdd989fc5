#include "zorro/ops/forest_gated_delta.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/repeat_interleave.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "ops/checks.h"
#include "ops/gated_delta_chunks.h"
#include "ops/gated_delta_heads.h"

namespace zorro {
namespace {

using gated_delta::Chunks;
using gated_delta::Inputs;
using gated_delta::kChunk;
using gated_delta::Level;
using gated_delta::Plan;
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "forest_gated_delta";

// out, states after nodes, states before chunks.
using Forward = std::tuple<at::Tensor, at::Tensor, at::Tensor>;
using ForwardSignature = Forward(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                 const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                 const at::Tensor&, bool, bool);
using Backward = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;
using OptionalTensor = std::optional<at::Tensor>;
using BackwardSignature = Backward(const OptionalTensor&, const OptionalTensor&, const at::Tensor&,
                                   const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                   const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                   const at::Tensor&, bool);

void check(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
           const at::Tensor& beta, const at::Tensor& nodes, const at::Tensor& initial) {
  check_dims(kOp, "q", q, 3, "[T, Hk, dk]");
  check_dims(kOp, "k", k, 3, "[T, Hk, dk]");
  check_dims(kOp, "v", v, 3, "[T, Hv, dv]");
  check_dims(kOp, "g", g, 2, "[T, Hv]");
  check_dims(kOp, "beta", beta, 2, "[T, Hv]");
  check_dims(kOp, "nodes", nodes, 2, "[N, 5]");
  check_dims(kOp, "initial", initial, 4, "[nodes before, Hv, dk, dv]");
  check_float_dtype(kOp, "q", q);
  for (const auto& [name, tensor] : {std::pair{"k", k}, std::pair{"v", v}}) {
    check_same_dtype(kOp, name, tensor, q);
    check_same_device(kOp, name, tensor, q);
    check_size(kOp, name, tensor, 0, q.sym_size(0));
  }
  check_size(kOp, "k", k, 1, q.sym_size(1));
  check_size(kOp, "k", k, 2, q.sym_size(2));
  for (const auto& [name, tensor] : {std::pair{"g", g}, std::pair{"beta", beta}}) {
    check_same_device(kOp, name, tensor, q);
    check_size(kOp, name, tensor, 0, q.sym_size(0));
    check_size(kOp, name, tensor, 1, v.sym_size(1));
  }
  ZORRO_CHECK(q.sym_size(1) > 0 && v.sym_size(1) % q.sym_size(1) == 0, "[", kOp,
              "] Hv must be a multiple of Hk, got ", v.sym_size(1), " and ", q.sym_size(1), ".");
  check_size(kOp, "nodes", nodes, 1, 5);
}

/// No forest of T tokens and N nodes has more chunks: a size that does not depend on the nodes'
/// lengths. What is not used is never touched.
template <typename Size>
Size most_chunks(const Size& tokens, const Size& nodes) {
  return tokens / kChunk + nodes;
}

/// x [T, heads, d] (or [T, heads]) by chunk: [chunks, value heads, C, d].
at::Tensor by_chunk(const at::Tensor& padded, const at::Tensor& tokens, int64_t value_heads) {
  at::Tensor x = padded.index_select(0, tokens).unflatten(0, {-1, kChunk}).transpose(1, 2);
  const int64_t repeats = value_heads / x.size(1);
  return repeats > 1 ? x.repeat_interleave(repeats, 1) : x.contiguous();
}

/// The inputs of the op in the accumulation type, with a row of zeros for the padding.
struct Padded {
  at::Tensor q, k, v, g, beta;
  int64_t value_heads;

  Padded(const at::Tensor& q_in, const at::Tensor& k_in, const at::Tensor& v_in,
         const at::Tensor& g_in, const at::Tensor& beta_in)
      : value_heads(v_in.size(1)) {
    const at::ScalarType dtype = accumulate_dtype(q_in.scalar_type());
    const auto pad = [&](const at::Tensor& x) {
      std::vector<int64_t> row = x.sizes().vec();
      row[0] = 1;
      return at::cat({x.to(dtype), at::zeros(row, x.options().dtype(dtype))});
    };
    q = pad(q_in), k = pad(k_in), v = pad(v_in), g = pad(g_in), beta = pad(beta_in);
  }

  Chunks chunks(const Level& level) const {
    const at::Tensor tokens = level.tokens.to(q.device());
    const auto pick = [&](const at::Tensor& x) { return by_chunk(x, tokens, value_heads); };
    return gated_delta::prepare({pick(q), pick(k), pick(v), pick(g), pick(beta)});
  }
};

gated_delta::HeadTensors head_tensors(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                      const at::Tensor& g, const at::Tensor& beta) {
  const at::ScalarType dtype = accumulate_dtype(q.scalar_type());
  const auto plain = [&](const at::Tensor& x) { return x.to(dtype).contiguous(); };
  return {plain(q), plain(k), plain(v), plain(g), plain(beta)};
}

/// States per node: where a level starts from, and where it ends. A parent stands before its
/// children.
class NodeStates {
 public:
  NodeStates(const Plan& plan, const at::Tensor& initial, at::IntArrayRef shape,
             const at::TensorOptions& options)
      : plan_(plan), zero_(at::zeros(shape, options)), states_(plan.parents.size()) {
    for (int64_t node = 0; node < plan.nodes_before; ++node)
      states_[static_cast<size_t>(node)] = initial.select(0, node).to(options);
  }

  at::Tensor before(const Level& level) const {
    std::vector<at::Tensor> list;
    for (const int64_t node : level.nodes) {
      const int64_t parent = plan_.parents[static_cast<size_t>(node)];
      list.push_back(parent < 0 ? zero_ : states_[static_cast<size_t>(parent)]);
    }
    return at::stack(list);
  }

  void set(const Level& level, const at::Tensor& final) {
    for (size_t i = 0; i < level.nodes.size(); ++i)
      states_[static_cast<size_t>(level.nodes[i])] = final.select(0, static_cast<int64_t>(i));
  }

  at::Tensor all() const { return at::stack(states_); }

 private:
  const Plan& plan_;
  at::Tensor zero_;
  std::vector<at::Tensor> states_;
};

at::Tensor empty_chunk_states(const Plan& plan, const at::Tensor& q, const at::Tensor& v) {
  return at::empty({most_chunks(q.size(0), plan.num_nodes), v.size(1), q.size(2), v.size(2)},
                   v.options().dtype(accumulate_dtype(v.scalar_type())));
}

Forward forward_by_heads(const Plan& plan, const at::Tensor& q, const at::Tensor& k,
                         const at::Tensor& v, const at::Tensor& g, const at::Tensor& beta,
                         const at::Tensor& initial, bool want_states) {
  at::Tensor chunk_states = empty_chunk_states(plan, q, v);
  at::Tensor out = at::empty(v.sizes(), chunk_states.options());
  const at::Tensor states = gated_delta::forward_heads(plan, head_tensors(q, k, v, g, beta),
                                                       initial, want_states, out, chunk_states);
  return {out.to(v.scalar_type()), states, chunk_states};
}

Forward forward_batched(const Plan& plan, const at::Tensor& q, const at::Tensor& k,
                        const at::Tensor& v, const at::Tensor& g, const at::Tensor& beta,
                        const at::Tensor& initial, bool want_states) {
  const Padded padded(q, k, v, g, beta);
  const std::vector<int64_t> shape = {v.size(1), q.size(2), v.size(2)};
  const at::TensorOptions options = padded.v.options();
  at::Tensor out = at::empty({plan.num_chunks, v.size(1), kChunk, v.size(2)}, options);
  at::Tensor chunk_states = empty_chunk_states(plan, q, v);
  NodeStates node_states(plan, initial, shape, options);
  for (const Level& level : plan.levels) {
    const Chunks chunks = padded.chunks(level);
    const auto mine = [&](const at::Tensor& x) {
      return x.narrow(0, level.first_chunk, level.num_chunks);
    };
    at::Tensor state = node_states.before(level);
    const at::Tensor delta = gated_delta::scan(chunks, level.active, state, mine(chunk_states));
    mine(out).copy_(gated_delta::outputs(chunks, mine(chunk_states), delta));
    node_states.set(level, state);
  }
  out = out.transpose(1, 2).flatten(0, 1).index_select(0, plan.places.to(q.device()));
  const at::Tensor states = want_states && plan.num_nodes > 0
                                ? node_states.all()
                                : at::empty({0, shape[0], shape[1], shape[2]}, options);
  return {out.to(v.scalar_type()), states, chunk_states};
}

Forward forward(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
                const at::Tensor& beta, const at::Tensor& nodes, const at::Tensor& initial,
                bool want_states, bool batched) {
  check(q, k, v, g, beta, nodes, initial);
  const Plan plan = gated_delta::make_plan(nodes, initial.size(0));
  ZORRO_CHECK(plan.places.size(0) == q.size(0), "[", kOp, "] nodes must cover ", q.size(0),
              " tokens, those of q, got ", plan.places.size(0), ".");
  const auto run = q.is_cpu() && !batched ? forward_by_heads : forward_batched;
  return run(plan, q, k, v, g, beta, initial, want_states);
}

Backward backward_by_heads(const Plan& plan, const OptionalTensor& d_out,
                           const OptionalTensor& d_states, const at::Tensor& q, const at::Tensor& k,
                           const at::Tensor& v, const at::Tensor& g, const at::Tensor& beta,
                           const at::Tensor& initial, const at::Tensor& chunk_states) {
  const at::TensorOptions options = v.options().dtype(accumulate_dtype(v.scalar_type()));
  const at::Tensor upstream =
      d_out ? d_out->to(options).contiguous() : at::zeros(v.sizes(), options);
  const gated_delta::HeadGradients d = gated_delta::backward_heads(
      plan, head_tensors(q, k, v, g, beta), upstream,
      d_states ? d_states->to(options).contiguous() : at::Tensor(), chunk_states);
  const auto by_key_head = [&](const at::Tensor& x, const at::Tensor& like) {
    const bool repeated = x.size(1) != like.size(1);
    return (repeated ? x.unflatten(1, {like.size(1), -1}).sum(2) : x).to(like.scalar_type());
  };
  return {by_key_head(d.q, q),           by_key_head(d.k, k),
          d.v.to(v.scalar_type()),       d.g.to(g.scalar_type()),
          d.beta.to(beta.scalar_type()), d.initial.to(initial.scalar_type())};
}

Backward backward_batched(const Plan& plan, const OptionalTensor& d_out,
                          const OptionalTensor& d_states, const at::Tensor& q, const at::Tensor& k,
                          const at::Tensor& v, const at::Tensor& g, const at::Tensor& beta,
                          const at::Tensor& initial, const at::Tensor& chunk_states) {
  const at::TensorOptions options = v.options().dtype(accumulate_dtype(v.scalar_type()));
  const Padded padded(q, k, v, g, beta);
  const std::vector<int64_t> shape = {plan.num_nodes, v.size(1), q.size(2), v.size(2)};
  // By node: what its final state is owed, by upstream and by its children.
  at::Tensor owed = d_states ? d_states->to(options).clone() : at::zeros(shape, options);
  const at::Tensor d_padded = at::cat({d_out ? d_out->to(options) : at::zeros_like(v, options),
                                       at::zeros({1, v.size(1), v.size(2)}, options)});
  Inputs all;
  const auto room = [&](at::IntArrayRef tail) {
    std::vector<int64_t> sizes = {plan.num_chunks, v.size(1), kChunk};
    sizes.insert(sizes.end(), tail.begin(), tail.end());
    return at::empty(sizes, options);
  };
  all.q = room({q.size(2)}), all.k = room({q.size(2)}), all.v = room({v.size(2)});
  all.g = room({}), all.beta = room({});
  for (size_t i = plan.levels.size(); i-- > 0;) {
    const Level& level = plan.levels[i];
    const Chunks chunks = padded.chunks(level);
    const auto mine = [&](const at::Tensor& x) {
      return x.narrow(0, level.first_chunk, level.num_chunks);
    };
    const at::Tensor d_level = by_chunk(d_padded, level.tokens.to(q.device()), v.size(1));
    const at::Tensor index =
        at::tensor(at::ArrayRef<int64_t>(level.nodes), at::kLong).to(q.device());
    at::Tensor d_state = owed.index_select(0, index);
    const Inputs d =
        gated_delta::backward(chunks, level.active, mine(chunk_states), d_level, d_state);
    mine(all.q).copy_(d.q), mine(all.k).copy_(d.k), mine(all.v).copy_(d.v);
    mine(all.g).copy_(d.g), mine(all.beta).copy_(d.beta);
    // Children in their order in the forest, whatever their place in the level: a fixed sum.
    std::vector<std::pair<int64_t, int64_t>> children;
    for (size_t place = 0; place < level.nodes.size(); ++place)
      children.emplace_back(level.nodes[place], static_cast<int64_t>(place));
    std::sort(children.begin(), children.end());
    for (const auto& [node, place] : children) {
      const int64_t parent = plan.parents[static_cast<size_t>(node)];
      if (parent >= 0) owed.select(0, parent).add_(d_state.select(0, place));
    }
  }
  const at::Tensor places = plan.places.to(q.device());
  const auto by_token = [&](const at::Tensor& x, const at::Tensor& like) {
    at::Tensor flat = x.transpose(1, 2).flatten(0, 1).index_select(0, places);
    const int64_t repeats = flat.size(1) / like.size(1);
    if (repeats > 1) flat = flat.unflatten(1, {like.size(1), repeats}).sum(2);
    return flat.to(like.scalar_type());
  };
  return {by_token(all.q, q),       by_token(all.k, k),
          by_token(all.v, v),       by_token(all.g, g),
          by_token(all.beta, beta), owed.narrow(0, 0, initial.size(0)).to(initial.scalar_type())};
}

Backward backward(const OptionalTensor& d_out, const OptionalTensor& d_states, const at::Tensor& q,
                  const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
                  const at::Tensor& beta, const at::Tensor& nodes, const at::Tensor& initial,
                  const at::Tensor& chunk_states, bool batched) {
  const Plan plan = gated_delta::make_plan(nodes, initial.size(0));
  const auto run = q.is_cpu() && !batched ? backward_by_heads : backward_batched;
  return run(plan, d_out, d_states, q, k, v, g, beta, initial, chunk_states);
}

Forward forward_meta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const at::Tensor& g, const at::Tensor& beta, const at::Tensor& nodes,
                     const at::Tensor& initial, bool want_states, bool) {
  check(q, k, v, g, beta, nodes, initial);
  const at::TensorOptions options = v.options().dtype(accumulate_dtype(v.scalar_type()));
  const auto sized = [&](const c10::SymInt& count) {
    return at::empty_symint({count, v.sym_size(1), q.sym_size(2), v.sym_size(2)}, options);
  };
  return {at::empty_symint(v.sym_sizes(), v.options()),
          sized(want_states ? nodes.sym_size(0) : c10::SymInt(0)),
          sized(most_chunks(q.sym_size(0), nodes.sym_size(0)))};
}

Backward backward_meta(const OptionalTensor&, const OptionalTensor&, const at::Tensor& q,
                       const at::Tensor& k, const at::Tensor& v, const at::Tensor& g,
                       const at::Tensor& beta, const at::Tensor&, const at::Tensor& initial,
                       const at::Tensor&, bool) {
  return {at::empty_like(q), at::empty_like(k),    at::empty_like(v),
          at::empty_like(g), at::empty_like(beta), at::empty_like(initial)};
}

/// Saves the inputs and the states before each chunk.
struct GatedDelta : torch::autograd::Function<GatedDelta> {
  static variable_list forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                               const at::Tensor& v, const at::Tensor& g, const at::Tensor& beta,
                               const at::Tensor& nodes, const at::Tensor& initial, bool want_states,
                               bool batched) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("zorro::forest_gated_delta", "")
                               .typed<ForwardSignature>();
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto [out, states, chunk_states] =
        op.call(q, k, v, g, beta, nodes, initial, want_states, batched);
    context->save_for_backward({q, k, v, g, beta, nodes, initial, chunk_states});
    context->saved_data["want_states"] = want_states;
    context->saved_data["batched"] = batched;
    context->mark_non_differentiable({chunk_states});
    context->set_materialize_grads(false);
    return {out, states, chunk_states};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    variable_list result(9);
    const bool has_states = context->saved_data["want_states"].toBool() && grads[1].defined();
    if (!grads[0].defined() && !has_states) return result;
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("zorro::forest_gated_delta_backward", "")
                               .typed<BackwardSignature>();
    const variable_list saved = context->get_saved_variables();
    const auto optional = [](const at::Tensor& x, bool there) {
      return there ? OptionalTensor(x) : std::nullopt;
    };
    std::tie(result[0], result[1], result[2], result[3], result[4], result[6]) =
        op.call(optional(grads[0], grads[0].defined()), optional(grads[1], has_states), saved[0],
                saved[1], saved[2], saved[3], saved[4], saved[5], saved[6], saved[7],
                context->saved_data["batched"].toBool());
    return result;
  }
};

Forward differentiable(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                       const at::Tensor& g, const at::Tensor& beta, const at::Tensor& nodes,
                       const at::Tensor& initial, bool want_states, bool batched) {
  const variable_list found =
      GatedDelta::apply(q, k, v, g, beta, nodes, initial, want_states, batched);
  return {found[0], found[1], found[2]};
}

std::tuple<at::Tensor, at::Tensor> normalized(const at::Tensor& q, const at::Tensor& k,
                                              const at::Tensor& v, const at::Tensor& g,
                                              const at::Tensor& beta, const at::Tensor& nodes) {
  const GatedDeltaResult result = normalized_gated_delta(q, k, v, g, beta, nodes);
  return {result.out, result.states};
}

}  // namespace

GatedDeltaResult forest_gated_delta(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const at::Tensor& g, const at::Tensor& beta,
                                    const at::Tensor& nodes, const GatedDeltaOptions& options) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("zorro::forest_gated_delta", "")
                             .typed<ForwardSignature>();
  const at::Tensor initial =
      options.initial.defined()
          ? options.initial
          : at::empty_symint({0, v.sym_size(1), q.sym_size(2), v.sym_size(2)},
                             v.options().dtype(accumulate_dtype(v.scalar_type())));
  auto [out, states, chunk_states] =
      op.call(q, k, v, g, beta, nodes, initial, options.want_states, options.batched);
  return {out, states};
}

GatedDeltaResult normalized_gated_delta(const at::Tensor& q, const at::Tensor& k,
                                        const at::Tensor& v, const at::Tensor& g,
                                        const at::Tensor& beta, const at::Tensor& nodes,
                                        const GatedDeltaOptions& options) {
  const at::ScalarType dtype = accumulate_dtype(q.scalar_type());
  const auto unit = [&](const at::Tensor& x, double length) {
    const at::Tensor lifted = x.to(dtype);
    return lifted * (lifted * lifted).sum(-1, /*keepdim=*/true).add(1e-6).rsqrt().mul(length);
  };
  const double scale = 1 / std::sqrt(static_cast<double>(q.size(2)));
  GatedDeltaResult result =
      forest_gated_delta(unit(q, scale), unit(k, 1), v.to(dtype), g, beta, nodes, options);
  result.out = result.out.to(v.scalar_type());
  return result;
}

at::Tensor gated_delta_composed(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                const at::Tensor& g, const at::Tensor& beta,
                                const at::Tensor& previous) {
  const at::ScalarType dtype = accumulate_dtype(q.scalar_type());
  const int64_t repeats = v.size(1) / q.size(1);
  const auto lift = [&](const at::Tensor& x) { return x.to(dtype).repeat_interleave(repeats, 1); };
  const at::Tensor queries = lift(q), keys = lift(k), values = v.to(dtype);
  const at::Tensor decay = g.to(dtype).exp(), rate = beta.to(dtype);
  const auto* before = previous.const_data_ptr<int64_t>();
  std::vector<at::Tensor> states, out;
  for (int64_t t = 0; t < q.size(0); ++t) {
    const at::Tensor key = keys.select(0, t).unsqueeze(2);  // [Hv, dk, 1]
    at::Tensor state = before[t] < 0
                           ? at::zeros({v.size(1), q.size(2), v.size(2)}, values.options())
                           : states[static_cast<size_t>(before[t])];
    state = state * decay.select(0, t).view({-1, 1, 1});
    const at::Tensor read = (state * key).sum(1);  // [Hv, dv]
    const at::Tensor write = (values.select(0, t) - read) * rate.select(0, t).unsqueeze(1);
    state = state + key * write.unsqueeze(1);
    out.push_back((state * queries.select(0, t).unsqueeze(2)).sum(1));
    states.push_back(state);
  }
  return out.empty() ? at::empty_like(v) : at::stack(out).to(v.scalar_type());
}

TORCH_LIBRARY_FRAGMENT(zorro, m) {
  m.def(
      "forest_gated_delta(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor nodes, "
      "Tensor initial, bool want_states, bool batched) -> (Tensor out, Tensor states, Tensor "
      "chunk_states)");
  m.def(
      "forest_gated_delta_backward(Tensor? d_out, Tensor? d_states, Tensor q, Tensor k, Tensor v, "
      "Tensor g, Tensor beta, Tensor nodes, Tensor initial, Tensor chunk_states, bool batched) "
      "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor d_initial)");
  m.def(
      "normalized_gated_delta(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor nodes) "
      "-> (Tensor out, Tensor states)",
      normalized);
}

TORCH_LIBRARY_IMPL(zorro, CompositeExplicitAutograd, m) {
  m.impl("forest_gated_delta", forward);
  m.impl("forest_gated_delta_backward", backward);
}

TORCH_LIBRARY_IMPL(zorro, Meta, m) {
  m.impl("forest_gated_delta", forward_meta);
  m.impl("forest_gated_delta_backward", backward_meta);
}

TORCH_LIBRARY_IMPL(zorro, Autograd, m) {
  m.impl("forest_gated_delta", differentiable);
  m.impl("forest_gated_delta_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace zorro
