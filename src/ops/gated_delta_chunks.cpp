#include "ops/gated_delta_chunks.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/eye.h>
#include <ATen/ops/linalg_solve_triangular.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <limits>

namespace zorro::gated_delta {
namespace {

/// (I + A)^-1 of unit lower triangular matrices: row i is e_i less the rows above, weighted.
template <typename T>
void invert(const T* a, T* out) {
  for (int64_t i = 0; i < kChunk; ++i) {
    T* row = out + i * kChunk;
    std::fill(row, row + kChunk, T{0});
    for (int64_t j = 0; j < i; ++j) {
      const T weight = a[i * kChunk + j];
      const T* above = out + j * kChunk;
      for (int64_t column = 0; column <= j; ++column) row[column] -= weight * above[column];
    }
    row[i] = 1;
  }
}

at::Tensor unit_lower_inverse(const at::Tensor& a) {
  if (!a.is_cpu())
    return at::linalg_solve_triangular(a, at::eye(kChunk, a.options()).expand_as(a), false, true,
                                       true);
  at::Tensor out = at::empty_like(a);
  AT_DISPATCH_FLOATING_TYPES(a.scalar_type(), "gated_delta_inverse", [&] {
    const auto* from = a.const_data_ptr<scalar_t>();
    auto* to = out.mutable_data_ptr<scalar_t>();
    at::parallel_for(0, a.numel() / (kChunk * kChunk), 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        invert(from + i * kChunk * kChunk, to + i * kChunk * kChunk);
    });
  });
  return out;
}

at::Tensor transposed(const at::Tensor& x) { return x.transpose(-1, -2); }

/// The rows of a step, or of its states.
at::Tensor part(const at::Tensor& x, int64_t begin, int64_t count) {
  return x.narrow(0, begin, count);
}

at::Tensor row_sum(const at::Tensor& a, const at::Tensor& b) { return a.mul(b).sum(-1); }

}  // namespace

Chunks prepare(Inputs in) {
  Chunks c;
  c.in = std::move(in);
  c.gamma = c.in.g.cumsum(2);
  c.grown = c.gamma.exp();
  c.rest = (c.gamma.narrow(2, kChunk - 1, 1) - c.gamma).exp();
  // Mask before exp: above the diagonal the difference is positive and may overflow.
  c.decay =
      (c.gamma.unsqueeze(3) - c.gamma.unsqueeze(2))
          .masked_fill_(at::ones({kChunk, kChunk}, c.gamma.options().dtype(at::kBool)).triu_(1),
                        -std::numeric_limits<double>::infinity())
          .exp_();
  c.gram = at::matmul(c.in.k, transposed(c.in.k));
  const at::Tensor a = c.gram.mul(c.decay).mul_(c.in.beta.unsqueeze(3)).tril_(-1);
  c.inverse = unit_lower_inverse(a);
  c.u = at::matmul(c.inverse, c.in.v.mul(c.in.beta.unsqueeze(3)));
  c.w = at::matmul(c.inverse, c.in.k.mul(c.in.beta.mul(c.grown).unsqueeze(3)));
  c.scores = at::matmul(c.in.q, transposed(c.in.k)).mul_(c.decay);
  return c;
}

at::Tensor scan(const Chunks& c, const std::vector<int64_t>& active, at::Tensor& state,
                const at::Tensor& states) {
  at::Tensor delta = at::empty_like(c.u);
  const at::Tensor kept = transposed(c.in.k.mul(c.rest.unsqueeze(3)));  // [chunks, Hv, dk, C]
  const at::Tensor last = c.last().unsqueeze(2).unsqueeze(3);
  int64_t chunk = 0;
  for (const int64_t count : active) {
    at::Tensor now = part(state, 0, count);
    part(states, chunk, count).copy_(now);
    at::Tensor change = part(delta, chunk, count);
    change.copy_(part(c.u, chunk, count).sub(at::matmul(part(c.w, chunk, count), now)));
    now.mul_(part(last, chunk, count)).add_(at::matmul(part(kept, chunk, count), change));
    chunk += count;
  }
  return delta;
}

at::Tensor outputs(const Chunks& c, const at::Tensor& states, const at::Tensor& delta) {
  return at::matmul(c.in.q.mul(c.grown.unsqueeze(3)), states).add_(at::matmul(c.scores, delta));
}

Inputs backward(const Chunks& c, const std::vector<int64_t>& active, const at::Tensor& states,
                const at::Tensor& d_out, at::Tensor& d_state) {
  const at::Tensor grown = c.grown.unsqueeze(3), rest = c.rest.unsqueeze(3),
                   beta = c.in.beta.unsqueeze(3);
  const at::Tensor kept = c.in.k.mul(rest), asked = c.in.q.mul(grown);
  const at::Tensor last = c.last().unsqueeze(2).unsqueeze(3);

  // Against time: d_delta = scores^T d_out + kept d_state', then d_state.
  at::Tensor d_delta = at::matmul(transposed(c.scores), d_out);
  const at::Tensor from_out = at::matmul(transposed(asked), d_out);
  at::Tensor d_after = at::empty_like(states);
  int64_t chunk = c.u.size(0);
  for (size_t step = active.size(); step-- > 0;) {
    const int64_t count = active[step];
    chunk -= count;
    at::Tensor now = part(d_state, 0, count);
    part(d_after, chunk, count).copy_(now);
    at::Tensor change = part(d_delta, chunk, count);
    change.add_(at::matmul(part(kept, chunk, count), now));
    now.mul_(part(last, chunk, count))
        .add_(part(from_out, chunk, count))
        .sub_(at::matmul(transposed(part(c.w, chunk, count)), change));
  }

  // Everything else for all chunks at once.
  const at::Tensor delta = c.u.sub(at::matmul(c.w, states));
  const at::Tensor d_w = at::matmul(d_delta, transposed(states)).neg_();
  const at::Tensor d_asked = at::matmul(d_out, transposed(states));
  const at::Tensor d_kept = at::matmul(delta, transposed(d_after));
  const at::Tensor d_scores = at::matmul(d_out, transposed(delta)).mul_(c.decay);  // of Q K^T
  const at::Tensor y_u = at::matmul(transposed(c.inverse), d_delta);
  const at::Tensor y_w = at::matmul(transposed(c.inverse), d_w);
  const at::Tensor d_a =
      at::matmul(y_u, transposed(c.u)).add_(at::matmul(y_w, transposed(c.w))).neg_().tril_(-1);
  const at::Tensor d_decayed = d_a.mul(c.decay);  // d_a o decay
  const at::Tensor d_gram = d_decayed.mul(beta);
  // d decay o decay, of the scores and of A; scores hold decay already.
  const at::Tensor d_log =
      at::matmul(d_out, transposed(delta)).mul_(c.scores).add_(d_gram.mul(c.gram));

  Inputs d;
  d.q = d_asked.mul(grown).add_(at::matmul(d_scores, c.in.k));
  d.k = d_kept.mul(rest)
            .add_(at::matmul(transposed(d_scores), c.in.q))
            .add_(y_w.mul(beta * grown))
            .add_(at::matmul(d_gram + transposed(d_gram), c.in.k));
  d.v = y_u.mul(beta);
  const at::Tensor of_w = row_sum(c.in.k, y_w);
  d.beta = row_sum(c.in.v, y_u).add_(of_w.mul(c.grown)).add_(d_decayed.mul(c.gram).sum(-1));
  const at::Tensor d_rest = row_sum(c.in.k, d_kept).mul_(c.rest);
  at::Tensor d_gamma = row_sum(c.in.q, d_asked)
                           .add_(of_w.mul(c.in.beta))
                           .mul_(c.grown)
                           .sub_(d_rest)
                           .add_(d_log.sum(-1))
                           .sub_(d_log.sum(-2));
  d_gamma.select(2, kChunk - 1)
      .add_(d_rest.sum(-1))
      .add_(states.mul(d_after).sum({2, 3}).mul_(c.last()));
  d.g = d_gamma.flip({2}).cumsum(2).flip({2});
  return d;
}

}  // namespace zorro::gated_delta
