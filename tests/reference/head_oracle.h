#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace zorro::reference {

/// The output head token by token: a product with every vocabulary row, softmax, and its
/// derivative, in double.
struct HeadCase {
  int64_t hidden_rows = 0, width = 0, vocabulary = 0;
  std::vector<double> hidden, weight;              // [U, H], [V, H]
  std::vector<int64_t> row, label;                 // [M]
  std::vector<double> temperature;                 // [M]
  std::vector<double> logprob_grad, entropy_grad;  // [M]
};

struct HeadAnswer {
  std::vector<double> logprob, entropy;          // [M]
  std::vector<double> hidden_grad, weight_grad;  // [U, H], [V, H]
};

inline HeadAnswer head_oracle(const HeadCase& c) {
  const auto at = [](int64_t i) { return static_cast<size_t>(i); };
  HeadAnswer answer;
  answer.hidden_grad.assign(c.hidden.size(), 0.0);
  answer.weight_grad.assign(c.weight.size(), 0.0);
  for (size_t token = 0; token < c.row.size(); ++token) {
    std::vector<double> z(at(c.vocabulary));
    double largest = -INFINITY;
    for (int64_t v = 0; v < c.vocabulary; ++v) {
      double dot = 0;
      for (int64_t h = 0; h < c.width; ++h) {
        dot += c.hidden[at(c.row[token] * c.width + h)] * c.weight[at(v * c.width + h)];
      }
      z[at(v)] = dot / c.temperature[token];
      largest = std::fmax(largest, z[at(v)]);
    }
    double sum = 0;
    for (const double value : z) sum += std::exp(value - largest);
    const double lse = largest + std::log(sum);
    double entropy = 0;
    for (const double value : z) {
      const double p = std::exp(value - lse);
      if (p > 0) entropy -= p * (value - lse);
    }
    answer.logprob.push_back(z[at(c.label[token])] - lse);
    answer.entropy.push_back(entropy);
    for (int64_t v = 0; v < c.vocabulary; ++v) {
      const double logp = z[at(v)] - lse;
      const double p = std::exp(logp);
      double dz = c.logprob_grad[token] * ((v == c.label[token] ? 1.0 : 0.0) - p);
      if (p > 0) dz -= c.entropy_grad[token] * p * (logp + entropy);
      dz /= c.temperature[token];
      for (int64_t h = 0; h < c.width; ++h) {
        const size_t hidden_at = at(c.row[token] * c.width + h);
        const size_t weight_at = at(v * c.width + h);
        answer.hidden_grad[hidden_at] += dz * c.weight[weight_at];
        answer.weight_grad[weight_at] += dz * c.hidden[hidden_at];
      }
    }
  }
  return answer;
}

}  // namespace zorro::reference
