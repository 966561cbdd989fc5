#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace zorro::reference {

/// Attention of samples that share rows, computed sample by sample as if each stood alone.
struct AttentionCase {
  int64_t query_heads = 1, kv_heads = 1, head_dim = 1;
  double scale = 1;
  std::vector<double> q, k, v, out_grad;    // [T, heads, head_dim]
  std::vector<std::vector<int64_t>> paths;  // the rows of each sample, first token to last
};

struct AttentionAnswer {
  std::vector<double> out, q_grad, k_grad, v_grad;  // [T, heads, head_dim]
  std::vector<double> lse;                          // [T, query_heads]
};

/// One query over the keys before it on its path: softmax and its derivative written out.
inline void attend(const AttentionCase& c, const std::vector<int64_t>& path, size_t step,
                   int64_t head, AttentionAnswer& answer) {
  const int64_t kv_head = head / (c.query_heads / c.kv_heads);
  const auto query_at = [&](int64_t dim) {
    return static_cast<size_t>((path[step] * c.query_heads + head) * c.head_dim + dim);
  };
  const auto key_at = [&](size_t key, int64_t dim) {
    return static_cast<size_t>((path[key] * c.kv_heads + kv_head) * c.head_dim + dim);
  };
  std::vector<double> weight(step + 1), weight_grad(step + 1);
  double largest = -INFINITY, sum = 0, mean = 0;
  for (size_t key = 0; key <= step; ++key) {
    for (int64_t dim = 0; dim < c.head_dim; ++dim)
      weight[key] += c.scale * c.q[query_at(dim)] * c.k[key_at(key, dim)];
    largest = std::fmax(largest, weight[key]);
  }
  for (double& w : weight) sum += (w = std::exp(w - largest));
  answer.lse[static_cast<size_t>(path[step] * c.query_heads + head)] = largest + std::log(sum);
  for (size_t key = 0; key <= step; ++key) {
    weight[key] /= sum;
    for (int64_t dim = 0; dim < c.head_dim; ++dim) {
      answer.out[query_at(dim)] += weight[key] * c.v[key_at(key, dim)];
      answer.v_grad[key_at(key, dim)] += weight[key] * c.out_grad[query_at(dim)];
      weight_grad[key] += c.out_grad[query_at(dim)] * c.v[key_at(key, dim)];
    }
    mean += weight[key] * weight_grad[key];
  }
  for (size_t key = 0; key <= step; ++key) {
    const double score_grad = c.scale * weight[key] * (weight_grad[key] - mean);
    for (int64_t dim = 0; dim < c.head_dim; ++dim) {
      answer.q_grad[query_at(dim)] += score_grad * c.k[key_at(key, dim)];
      answer.k_grad[key_at(key, dim)] += score_grad * c.q[query_at(dim)];
    }
  }
}

/// A row that several samples run through is computed on the first of them; the others would give
/// the same.
inline AttentionAnswer attention_oracle(const AttentionCase& c) {
  AttentionAnswer answer;
  answer.out.resize(c.q.size());
  answer.q_grad.resize(c.q.size());
  answer.k_grad.resize(c.k.size());
  answer.v_grad.resize(c.v.size());
  answer.lse.resize(c.q.size() / static_cast<size_t>(c.head_dim));
  std::vector<bool> done(answer.lse.size() / static_cast<size_t>(c.query_heads));
  for (const std::vector<int64_t>& path : c.paths) {
    for (size_t step = 0; step < path.size(); ++step) {
      if (done[static_cast<size_t>(path[step])]) continue;
      done[static_cast<size_t>(path[step])] = true;
      for (int64_t head = 0; head < c.query_heads; ++head) attend(c, path, step, head, answer);
    }
  }
  return answer;
}

}  // namespace zorro::reference
