#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "ops/checks.h"
#include "ops/forest_attention_kernels.h"

namespace zorro {
namespace {

constexpr double kHidden = -std::numeric_limits<double>::infinity();

/// The queries [q_begin, end) of one tree and its keys [begin, end), as packed tokens.
struct Tree {
  int64_t begin, q_begin, end;
};

/// Trees never see each other. One dense block a tree keeps junk in one out of the others' sums
/// (0 * NaN is NaN) and costs the naive batch no more than its own pairs.
std::vector<Tree> trees_of(const AttentionCall& call, int64_t num_keys) {
  std::vector<Tree> trees;
  const auto* cell = call.nodes.const_data_ptr<int64_t>();
  for (int64_t node = 0; node < call.nodes.size(0); ++node, cell += 5) {
    if (cell[3] >= 0) continue;
    if (!trees.empty()) trees.back().end = cell[0];
    trees.push_back({cell[0], std::max(cell[0], call.q_begin), num_keys});
  }
  std::erase_if(trees, [](const Tree& tree) { return tree.q_begin >= tree.end; });
  return trees;
}

/// Tokens [begin, end) of [T, Hq, D] -> [Hkv, Hq / Hkv * tokens, D] in the accumulation dtype: the
/// query heads of a kv head one after another. Keys have one head a kv head: [Hkv, tokens, D].
at::Tensor take_heads(const at::Tensor& x, int64_t begin, int64_t end, int64_t num_kv_heads) {
  return x.slice(0, begin, end)
      .to(accumulate_dtype(x.scalar_type()))
      .transpose(0, 1)
      .reshape({num_kv_heads, x.size(1) / num_kv_heads * (end - begin), x.size(2)});
}

/// Inverse of take_heads, into tokens [begin, end) of x.
void put_heads(const at::Tensor& x, int64_t begin, int64_t end, const at::Tensor& rows) {
  x.slice(0, begin, end).copy_(rows.reshape({x.size(1), end - begin, x.size(2)}).transpose(0, 1));
}

/// The dense block of a tree.
struct Block {
  at::Tensor q, k, v;  // [Hkv, G * queries, D], [Hkv, keys, D]
  at::Tensor hidden;   // [queries, keys] bool
  at::Tensor scores;   // [Hq, queries, keys], -inf where hidden

  Block(const at::Tensor& all_q, const at::Tensor& all_k, const at::Tensor& all_v,
        const AttentionCall& call, const Tree& tree)
      : q(take_heads(all_q, tree.q_begin - call.q_begin, tree.end - call.q_begin, all_k.size(1))),
        k(take_heads(all_k, tree.begin, tree.end, all_k.size(1))),
        v(take_heads(all_v, tree.begin, tree.end, all_k.size(1))) {
    const auto options = call.visible_until.options();
    const at::Tensor key = at::arange(tree.begin, tree.end, options).unsqueeze(0);
    const at::Tensor query = at::arange(tree.q_begin, tree.end, options).unsqueeze(1);
    const at::Tensor until = call.visible_until.slice(0, tree.begin, tree.end).unsqueeze(0);
    hidden = key.gt(query).logical_or_(query.ge(until));
    scores = q.matmul(k.transpose(1, 2))
                 .mul_(call.scale)
                 .view({all_q.size(1), tree.end - tree.q_begin, tree.end - tree.begin})
                 .masked_fill_(hidden, kHidden);
  }

  /// exp(scores - lse) [Hkv, G * queries, keys]; lse [Hq, queries]. A query that sees no key has
  /// lse -inf: its row is 0, not exp(-inf + inf).
  at::Tensor probabilities(const at::Tensor& lse) const {
    return scores.sub(lse.masked_fill(lse.eq(kHidden), 0).unsqueeze(2))
        .exp_()
        .view({k.size(0), q.size(1), k.size(1)});
  }
};

}  // namespace

AttentionForward composed_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                    const AttentionCall& call) {
  const at::Tensor out = at::empty(q.sizes(), q.options());
  const at::Tensor lse =  // [Tq, Hq]
      at::empty({q.size(0), q.size(1)}, q.options().dtype(accumulate_dtype(q.scalar_type())));
  for (const Tree& tree : trees_of(call, k.size(0))) {
    const int64_t begin = tree.q_begin - call.q_begin, end = tree.end - call.q_begin;
    const Block block(q, k, v, call, tree);
    const at::Tensor block_lse = block.scores.logsumexp(2);
    put_heads(out, begin, end, block.probabilities(block_lse).matmul(block.v));
    lse.slice(0, begin, end).copy_(block_lse.t());
  }
  return {out, lse.t()};
}

AttentionGradients composed_attention_backward(const at::Tensor& grad_out, const at::Tensor& q,
                                               const at::Tensor& k, const at::Tensor& v,
                                               const AttentionForward& forward,
                                               const AttentionCall& call) {
  const at::Tensor dq = at::empty(q.sizes(), q.options());
  const at::Tensor dk = at::zeros(k.sizes(), k.options());  // trees without queries stay 0
  const at::Tensor dv = at::zeros(v.sizes(), v.options());
  for (const Tree& tree : trees_of(call, k.size(0))) {
    const int64_t begin = tree.q_begin - call.q_begin, end = tree.end - call.q_begin;
    const Block block(q, k, v, call, tree);
    const at::Tensor probabilities = block.probabilities(forward.lse.slice(1, begin, end));
    const at::Tensor d_out = take_heads(grad_out, begin, end, k.size(1));
    const at::Tensor mean =
        d_out.mul(take_heads(forward.out, begin, end, k.size(1))).sum(2, /*keepdim=*/true);
    const at::Tensor d_scores =
        d_out.matmul(block.v.transpose(1, 2)).sub_(mean).mul_(probabilities).mul_(call.scale);
    put_heads(dq, begin, end, d_scores.matmul(block.k));
    put_heads(dk, tree.begin, tree.end, d_scores.transpose(1, 2).matmul(block.q));
    put_heads(dv, tree.begin, tree.end, probabilities.transpose(1, 2).matmul(d_out));
  }
  return {dq, dk, dv};
}

}  // namespace zorro
