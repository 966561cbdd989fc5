#include "ops/gated_delta_heads.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <map>
#include <vector>

#include "ops/gated_delta_cpu.h"

namespace zorro::gated_delta {
namespace {

struct Sizes {
  int64_t key_heads, value_heads, dk, dv;
  explicit Sizes(const HeadTensors& in)
      : key_heads(in.q.size(1)), value_heads(in.v.size(1)), dk(in.q.size(2)), dv(in.v.size(2)) {}
  int64_t state() const { return dk * dv; }
  int64_t key_head(int64_t head) const { return head / (value_heads / key_heads); }
};

/// A head's rows of a contiguous [T, heads, size] (or [T, heads]) tensor.
template <typename T>
Rows<const T> rows_of(const at::Tensor& x, int64_t head) {
  return {x.const_data_ptr<T>() + head * x.stride(1), x.stride(0)};
}
template <typename T>
Rows<T> rows_to(at::Tensor& x, int64_t head) {
  return {x.mutable_data_ptr<T>() + head * x.stride(1), x.stride(0)};
}

/// Which nodes have a state of their own in memory: those with children, or all.
std::vector<int64_t> kept_nodes(const Plan& plan, bool all) {
  std::vector<int64_t> slot(static_cast<size_t>(plan.num_nodes), all ? 0 : -1);
  for (const int64_t parent : plan.parents)
    if (parent >= 0) slot[static_cast<size_t>(parent)] = 0;
  int64_t next = 0;
  for (int64_t& entry : slot)
    if (entry == 0) entry = next++;
  return slot;
}

int64_t count(const std::vector<int64_t>& slots) {
  return slots.empty() ? 0 : *std::max_element(slots.begin(), slots.end()) + 1;
}

/// One node of a level: what a task needs to know beside its head.
struct Task {
  int64_t node, parent;
  std::vector<int64_t> offsets;  ///< of its chunks' states, for head 0
};

std::vector<Task> tasks_of(const Plan& plan, const Level& level, const Sizes& sizes) {
  std::vector<Task> tasks;
  for (size_t place = 0; place < level.nodes.size(); ++place) {
    const int64_t node = level.nodes[place];
    Task task{node, plan.parents[static_cast<size_t>(node)],
              plan.chunks_of(level, static_cast<int64_t>(place))};
    for (int64_t& offset : task.offsets) offset *= sizes.value_heads * sizes.state();
    tasks.push_back(std::move(task));
  }
  return tasks;
}

}  // namespace

at::Tensor forward_heads(const Plan& plan, const HeadTensors& in, const at::Tensor& initial,
                         bool want_states, at::Tensor& out, at::Tensor& chunk_states) {
  const Sizes sizes(in);
  const std::vector<int64_t> slots = kept_nodes(plan, want_states);
  at::Tensor states =
      at::empty({count(slots), sizes.value_heads, sizes.dk, sizes.dv}, in.v.options());
  for (int64_t node = 0; node < plan.nodes_before; ++node)
    if (slots[static_cast<size_t>(node)] >= 0)
      states.select(0, slots[static_cast<size_t>(node)]).copy_(initial.select(0, node));
  const Isa isa = cpu_isa();
  AT_DISPATCH_FLOATING_TYPES(in.v.scalar_type(), "forest_gated_delta", [&] {
    auto* state_base = states.mutable_data_ptr<scalar_t>();
    const auto state_of = [&](int64_t node, int64_t head) {
      return state_base +
             (slots[static_cast<size_t>(node)] * sizes.value_heads + head) * sizes.state();
    };
    for (const Level& level : plan.levels) {
      const std::vector<Task> tasks = tasks_of(plan, level, sizes);
      const auto total = static_cast<int64_t>(tasks.size()) * sizes.value_heads;
      at::parallel_for(0, total, 1, [&](int64_t first, int64_t last) {
        std::vector<scalar_t> scratch(static_cast<size_t>(scratch_size(sizes.dk, sizes.dv)));
        std::vector<scalar_t> own(static_cast<size_t>(sizes.state()));
        for (int64_t i = first; i < last; ++i) {
          const Task& task = tasks[static_cast<size_t>(i / sizes.value_heads)];
          const int64_t head = i % sizes.value_heads, key = sizes.key_head(head);
          const Span span = plan.spans[static_cast<size_t>(task.node)];
          const bool is_kept = slots[static_cast<size_t>(task.node)] >= 0;
          scalar_t* state = is_kept ? state_of(task.node, head) : own.data();
          if (task.parent >= 0)
            std::copy_n(state_of(task.parent, head), sizes.state(), state);
          else
            std::fill_n(state, sizes.state(), scalar_t{0});
          forward_head<scalar_t>(
              {span.begin, span.end, sizes.dk, sizes.dv, rows_of<scalar_t>(in.q, key),
               rows_of<scalar_t>(in.k, key), rows_of<scalar_t>(in.v, head),
               rows_of<scalar_t>(in.g, head), rows_of<scalar_t>(in.beta, head),
               rows_to<scalar_t>(out, head), state,
               chunk_states.mutable_data_ptr<scalar_t>() + head * sizes.state(),
               task.offsets.data()},
              scratch.data(), isa);
        }
      });
    }
  });
  return want_states ? states : states.narrow(0, 0, 0).clone();
}

namespace {

/// What the state after a node is owed, by upstream and by its children.
struct Owed {
  std::vector<int64_t> slots;  ///< of the nodes that are owed anything
  at::Tensor states;           ///< [slots, Hv, dk, dv]

  bool has(int64_t node) const { return slots[static_cast<size_t>(node)] >= 0; }
  template <typename T>
  T* to(int64_t node, int64_t head, const Sizes& sizes) const {
    return states.mutable_data_ptr<T>() +
           (slots[static_cast<size_t>(node)] * sizes.value_heads + head) * sizes.state();
  }
};

/// The nodes of a level that have one parent, in their order; a root is alone.
std::vector<std::vector<Task>> families_of(const Plan& plan, const Level& level,
                                           const Sizes& sizes) {
  std::vector<Task> tasks = tasks_of(plan, level, sizes);
  std::sort(tasks.begin(), tasks.end(),
            [](const Task& a, const Task& b) { return a.node < b.node; });
  std::map<int64_t, std::vector<Task>> by_parent;
  for (Task& task : tasks) {
    const int64_t key = task.parent >= 0 ? task.parent : -1 - task.node;
    by_parent[key].push_back(std::move(task));
  }
  std::vector<std::vector<Task>> families;
  for (auto& [parent, family] : by_parent) families.push_back(std::move(family));
  return families;
}

/// One node and head; `own` is the gradient of its last state and becomes that of its first.
template <typename T>
void backward_node(const Span& span, const HeadTensors& in, const at::Tensor& d_out,
                   HeadGradients& d, const at::Tensor& chunk_states, const Task& task, int64_t head,
                   T* own, T* scratch) {
  const Sizes sizes(in);
  const int64_t key = sizes.key_head(head);
  backward_head<T>(
      {span.begin, span.end, sizes.dk, sizes.dv, rows_of<T>(in.q, key), rows_of<T>(in.k, key),
       rows_of<T>(in.v, head), rows_of<T>(in.g, head), rows_of<T>(in.beta, head),
       rows_of<T>(d_out, head), rows_to<T>(d.q, head), rows_to<T>(d.k, head), rows_to<T>(d.v, head),
       rows_to<T>(d.g, head), rows_to<T>(d.beta, head), own,
       chunk_states.const_data_ptr<T>() + head * sizes.state(), task.offsets.data()},
      scratch, cpu_isa());
}

/// A level: one task a family and head, so that a parent's sum has one owner and a fixed order.
template <typename T>
void backward_level(const Plan& plan, const Level& level, const HeadTensors& in,
                    const at::Tensor& d_out, HeadGradients& d, const at::Tensor& chunk_states,
                    const Owed& owed) {
  const Sizes sizes(in);
  const std::vector<std::vector<Task>> families = families_of(plan, level, sizes);
  const auto total = static_cast<int64_t>(families.size()) * sizes.value_heads;
  at::parallel_for(0, total, 1, [&](int64_t first, int64_t last) {
    std::vector<T> scratch(static_cast<size_t>(scratch_size(sizes.dk, sizes.dv)));
    std::vector<T> own(static_cast<size_t>(sizes.state()));
    for (int64_t i = first; i < last; ++i) {
      const int64_t head = i % sizes.value_heads;
      for (const Task& task : families[static_cast<size_t>(i / sizes.value_heads)]) {
        std::fill(own.begin(), own.end(), T{0});
        if (owed.has(task.node))
          std::copy_n(owed.to<T>(task.node, head, sizes), sizes.state(), own.data());
        backward_node<T>(plan.spans[static_cast<size_t>(task.node)], in, d_out, d, chunk_states,
                         task, head, own.data(), scratch.data());
        if (task.parent < 0) continue;
        T* parent = owed.to<T>(task.parent, head, sizes);
        for (int64_t j = 0; j < sizes.state(); ++j) parent[j] += own[static_cast<size_t>(j)];
      }
    }
  });
}

}  // namespace

HeadGradients backward_heads(const Plan& plan, const HeadTensors& in, const at::Tensor& d_out,
                             const at::Tensor& d_states, const at::Tensor& chunk_states) {
  const Sizes sizes(in);
  const at::TensorOptions options = in.v.options();
  Owed owed{kept_nodes(plan, d_states.defined()), d_states};
  const auto room = [&](int64_t nodes) {
    return at::zeros({nodes, sizes.value_heads, sizes.dk, sizes.dv}, options);
  };
  owed.states = d_states.defined() ? d_states.clone() : room(count(owed.slots));
  HeadGradients d;
  d.q = at::empty({in.v.size(0), sizes.value_heads, sizes.dk}, options);
  d.k = at::empty(d.q.sizes(), options);
  d.v = at::empty(in.v.sizes(), options);
  d.g = at::empty(in.g.sizes(), options);
  d.beta = at::empty(in.g.sizes(), options);
  AT_DISPATCH_FLOATING_TYPES(in.v.scalar_type(), "forest_gated_delta_backward", [&] {
    for (size_t level = plan.levels.size(); level-- > 0;)
      backward_level<scalar_t>(plan, plan.levels[level], in, d_out, d, chunk_states, owed);
  });
  d.initial = room(plan.nodes_before);
  for (int64_t node = 0; node < plan.nodes_before; ++node)
    if (owed.has(node))
      d.initial.select(0, node).copy_(owed.states.select(0, owed.slots[static_cast<size_t>(node)]));
  return d;
}

}  // namespace zorro::gated_delta
