// Scores the rollouts of a file with a Hugging Face folder and takes the gradients of their mean
// log-probability.
#include <zorro/zorro.h>

#include <cstdio>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const auto model = zorro::CausalLM::load(argv[1]);
  const std::vector<zorro::Rollout> rollouts = zorro::read_rollouts(argv[2]);
  std::vector<zorro::Sample> samples;
  for (const zorro::Rollout& rollout : rollouts) samples.push_back(rollout.sample());
  const auto batch = zorro::Batch::from(zorro::PrefixForest::build(samples, {}));
  const zorro::LogprobResult scores = model->score(batch);
  scores.logprob.mean().backward();
  std::printf("%lld of %lld tokens, mean logprob %.6f\n",
              static_cast<long long>(batch.forest.num_tokens()),
              static_cast<long long>(batch.forest.num_replicated_tokens()),
              scores.logprob.mean().item<double>());
  return 0;
}
