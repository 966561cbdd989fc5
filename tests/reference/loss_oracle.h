#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace zorro::reference {

/// The clipped policy loss token by token with its derivatives, in double and without any guard
/// against overflow.
struct LossCase {
  std::vector<double> logprob, entropy, old_logprob, ref_logprob, advantage;  // [M]
  std::vector<bool> mask;                                                     // [M]
  double denominator = 1, clip_low = 0.2, clip_high = 0.2, kl_coef = 0, entropy_coef = 0;
  int kl = 0;  // 0: none, 1: k1, 3: k3
};

struct LossAnswer {
  double loss = 0, policy_sum = 0, kl_sum = 0, entropy_sum = 0;
  double clipped_sum = 0, approx_kl_sum = 0, ratio_sum = 0;
  int64_t num_tokens = 0;
  std::vector<double> logprob_grad, entropy_grad;  // [M]
};

inline LossAnswer loss_oracle(const LossCase& c) {
  LossAnswer answer;
  answer.logprob_grad.assign(c.logprob.size(), 0.0);
  answer.entropy_grad.assign(c.logprob.size(), 0.0);
  for (size_t i = 0; i < c.logprob.size(); ++i) {
    if (!c.mask[i]) continue;
    ++answer.num_tokens;
    const double ratio = std::exp(c.logprob[i] - c.old_logprob[i]);
    const double bounded = std::fmin(std::fmax(ratio, 1 - c.clip_low), 1 + c.clip_high);
    const double free = -c.advantage[i] * ratio, clipped = -c.advantage[i] * bounded;
    answer.policy_sum += std::fmax(free, clipped);
    answer.clipped_sum += clipped > free ? 1 : 0;
    answer.approx_kl_sum += c.old_logprob[i] - c.logprob[i];
    answer.ratio_sum += ratio;
    answer.entropy_sum += c.entropy[i];
    double slope = clipped > free ? 0 : -c.advantage[i] * ratio;
    const double d = c.ref_logprob[i] - c.logprob[i];
    if (c.kl == 1) {
      answer.kl_sum -= d;
      slope += c.kl_coef;
    } else if (c.kl == 3) {
      answer.kl_sum += std::exp(d) - 1 - d;
      slope += c.kl_coef * (1 - std::exp(d));
    }
    answer.logprob_grad[i] = slope / c.denominator;
    answer.entropy_grad[i] = -c.entropy_coef / c.denominator;
  }
  answer.loss =
      (answer.policy_sum + c.kl_coef * answer.kl_sum - c.entropy_coef * answer.entropy_sum) /
      c.denominator;
  return answer;
}

}  // namespace zorro::reference
