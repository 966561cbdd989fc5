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

HeadGradients backward_heads(const Plan& plan, const HeadTensors& in, const at::Tensor& d_out,
                             const at::Tensor& d_states, const at::Tensor& chunk_states) {
  const Sizes sizes(in);
  const std::vector<int64_t> slots = kept_nodes(plan, d_states.defined());
  // What the state after a node is owed, by upstream and by its children.
  at::Tensor owed =
      d_states.defined()
          ? d_states.clone()
          : at::zeros({count(slots), sizes.value_heads, sizes.dk, sizes.dv}, in.v.options());
  HeadGradients d;
  const int64_t tokens = in.v.size(0);
  d.q = at::empty({tokens, sizes.value_heads, sizes.dk}, in.v.options());
  d.k = at::empty({tokens, sizes.value_heads, sizes.dk}, in.v.options());
  d.v = at::empty(in.v.sizes(), in.v.options());
  d.g = at::empty(in.g.sizes(), in.v.options());
  d.beta = at::empty(in.g.sizes(), in.v.options());
  const Isa isa = cpu_isa();
  AT_DISPATCH_FLOATING_TYPES(in.v.scalar_type(), "forest_gated_delta_backward", [&] {
    auto* owed_base = owed.mutable_data_ptr<scalar_t>();
    const auto owed_to = [&](int64_t node, int64_t head) {
      return owed_base +
             (slots[static_cast<size_t>(node)] * sizes.value_heads + head) * sizes.state();
    };
    for (size_t level = plan.levels.size(); level-- > 0;) {
      std::vector<Task> tasks = tasks_of(plan, plan.levels[level], sizes);
      // The children of one parent are one task, in their order: a fixed sum with one owner.
      std::sort(tasks.begin(), tasks.end(),
                [](const Task& a, const Task& b) { return a.node < b.node; });
      std::map<int64_t, std::vector<const Task*>> families;
      for (const Task& task : tasks)
        families[task.parent >= 0 ? task.parent : -1 - task.node].push_back(&task);
      std::vector<const std::vector<const Task*>*> groups;
      for (const auto& [parent, group] : families) groups.push_back(&group);
      const auto total = static_cast<int64_t>(groups.size()) * sizes.value_heads;
      at::parallel_for(0, total, 1, [&](int64_t first, int64_t last) {
        std::vector<scalar_t> scratch(static_cast<size_t>(scratch_size(sizes.dk, sizes.dv)));
        std::vector<scalar_t> own(static_cast<size_t>(sizes.state()));
        for (int64_t i = first; i < last; ++i) {
          const int64_t head = i % sizes.value_heads, key = sizes.key_head(head);
          for (const Task* task : *groups[static_cast<size_t>(i / sizes.value_heads)]) {
            const Span span = plan.spans[static_cast<size_t>(task->node)];
            if (slots[static_cast<size_t>(task->node)] >= 0)
              std::copy_n(owed_to(task->node, head), sizes.state(), own.data());
            else
              std::fill(own.begin(), own.end(), scalar_t{0});
            backward_head<scalar_t>(
                {span.begin, span.end, sizes.dk, sizes.dv, rows_of<scalar_t>(in.q, key),
                 rows_of<scalar_t>(in.k, key), rows_of<scalar_t>(in.v, head),
                 rows_of<scalar_t>(in.g, head), rows_of<scalar_t>(in.beta, head),
                 rows_of<scalar_t>(d_out, head), rows_to<scalar_t>(d.q, head),
                 rows_to<scalar_t>(d.k, head), rows_to<scalar_t>(d.v, head),
                 rows_to<scalar_t>(d.g, head), rows_to<scalar_t>(d.beta, head), own.data(),
                 chunk_states.const_data_ptr<scalar_t>() + head * sizes.state(),
                 task->offsets.data()},
                scratch.data(), isa);
            if (task->parent < 0) continue;
            scalar_t* parent = owed_to(task->parent, head);
            for (int64_t j = 0; j < sizes.state(); ++j) parent[j] += own[static_cast<size_t>(j)];
          }
        }
      });
    }
  });
  d.initial = at::zeros({plan.nodes_before, sizes.value_heads, sizes.dk, sizes.dv}, in.v.options());
  for (int64_t node = 0; node < plan.nodes_before; ++node)
    if (slots[static_cast<size_t>(node)] >= 0)
      d.initial.select(0, node).copy_(owed.select(0, slots[static_cast<size_t>(node)]));
  return d;
}

}  // namespace zorro::gated_delta
