"""Sampling, scoring, and the rollout files: JSON lines, gzip, one sample a line."""

import gzip
import io
import itertools
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedTokenizerFast, Qwen3ForCausalLM

# isort: split
from worked_tasks import Item, Task, read_answer

ADVANTAGE_EPS = 1e-6


@dataclass(frozen=True)
class Rollout:
    """One sampled response; `sampler_logprobs` come from the sampler's step-by-step forward."""

    response_ids: list[int]
    sampler_logprobs: list[float]
    truncated: bool
    reward: float


@dataclass(frozen=True)
class Group:
    """The samples of one prompt."""

    name: str
    task: str
    prompt_ids: list[int]
    rollouts: list[Rollout]

    @property
    def rewards(self) -> list[float]:
        """One reward a sample."""
        return [rollout.reward for rollout in self.rollouts]

    @property
    def reward_range(self) -> float:
        """Largest minus smallest reward."""
        return max(self.rewards) - min(self.rewards)


def sample_responses(
    model: Qwen3ForCausalLM,
    prompt_ids: list[int],
    num_samples: int,
    max_new_tokens: int,
    end_id: int,
    seed: int,
) -> list[tuple[list[int], list[float], bool]]:
    """Sample at temperature 1: the prompt runs once, then all samples token by token.

    Returns for each sample its tokens (end token included), the log-probability of each token and
    whether the token limit cut it. The random stream depends on `seed` and the prompt alone.
    """
    prompt = torch.tensor([prompt_ids])
    generator = torch.Generator().manual_seed(seed + zlib.crc32(prompt.numpy().tobytes()))
    tokens: list[list[int]] = [[] for _ in range(num_samples)]
    logprobs: list[list[float]] = [[] for _ in range(num_samples)]
    running = [True] * num_samples
    with torch.inference_mode():
        cache = DynamicCache(config=model.config)
        logits = model(input_ids=prompt, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        cache.batch_repeat_interleave(num_samples)
        logits = logits.expand(num_samples, -1)  # [samples, vocab]
        for _ in range(max_new_tokens):
            distribution = logits.log_softmax(-1)
            chosen = torch.multinomial(distribution.exp(), 1, generator=generator)  # [samples, 1]
            chosen_logprob = distribution.gather(1, chosen)
            for sample in range(num_samples):
                if running[sample]:
                    tokens[sample].append(int(chosen[sample, 0]))
                    logprobs[sample].append(float(chosen_logprob[sample, 0]))
                    running[sample] = tokens[sample][-1] != end_id
            if not any(running):
                break
            logits = model(input_ids=chosen, past_key_values=cache).logits[:, -1]
    return list(zip(tokens, logprobs, running, strict=True))


def score(model: Qwen3ForCausalLM, prompt_ids: list[int], response_ids: list[int]) -> np.ndarray:
    """Float32 log-probabilities of a response by one ordinary forward over the whole row."""
    row = torch.tensor([prompt_ids + response_ids])
    label = row[0, len(prompt_ids) :, None]
    with torch.inference_mode():
        logits = model(input_ids=row, use_cache=False).logits[0, len(prompt_ids) - 1 : -1]
        logprobs = logits.float().log_softmax(-1).gather(1, label)[:, 0]
    return np.asarray(logprobs.numpy(), dtype=np.float32)


def make_group(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    task: Task,
    item: Item,
    prompt_ids: list[int],
    name: str,
    num_samples: int,
    max_new_tokens: int,
    seed: int,
) -> Group:
    """Sample one prompt and let the task's own scorer judge the answers."""
    end_id = tokenizer.eos_token_id
    dataset = task.dataset(0)
    rollouts = []
    for tokens, logprobs, truncated in sample_responses(model, prompt_ids, num_samples, max_new_tokens, end_id, seed):
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        reward = float(dataset.score_answer(read_answer(text), item))
        rollouts.append(Rollout(tokens, logprobs, truncated, reward))
    return Group(name, task.name, prompt_ids, rollouts)


def float32_array(values: list[float]) -> np.ndarray:
    """The numbers of a file or of the sampler as float32."""
    return np.asarray(values, dtype=np.float32)


def advantages(rewards: list[float]) -> np.ndarray:
    """(reward - mean) / (standard deviation + eps) over a group, the deviation over n."""
    values = np.asarray(rewards, dtype=np.float64)
    return float32_array(list((values - values.mean()) / (values.std() + ADVANTAGE_EPS)))


def shortest(value: float | np.floating[Any]) -> float:
    """The number whose text is the shortest that reads back to the same float32."""
    number = float(str(np.float32(value)))
    if not np.isfinite(number) or np.float32(number) != np.float32(value):
        raise ValueError(f"value must be a finite float32, got {value}.")
    return number


def group_lines(
    group: Group, model: Qwen3ForCausalLM, reference: Qwen3ForCausalLM
) -> tuple[list[dict[str, Any]], float]:
    """The lines of a group, and how far the sampler's log-probabilities are from them."""
    lines, distance = [], 0.0
    group_advantages = advantages(group.rewards)
    for sample, rollout in enumerate(group.rollouts):
        old = score(model, group.prompt_ids, rollout.response_ids)
        ref = score(reference, group.prompt_ids, rollout.response_ids)
        distance = max(distance, float(np.abs(old - float32_array(rollout.sampler_logprobs)).max()))
        lines.append(
            {
                "id": f"{group.name}/{sample}",
                "group": group.name,
                "task": group.task,
                "prompt_ids": group.prompt_ids,
                "response_ids": rollout.response_ids,
                "loss_mask": [1] * len(rollout.response_ids),
                "advantage": shortest(group_advantages[sample]),
                "old_logprobs": [shortest(value) for value in old],
                "ref_logprobs": [shortest(value) for value in ref],
                "temperature": 1.0,
                "reward": shortest(rollout.reward),
                "truncated": rollout.truncated,
            }
        )
    return lines, distance


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    """Write JSON lines as gzip with no time and no name inside, so equal lines are equal bytes."""
    text = "".join(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n" for line in lines)
    buffer = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=buffer, mtime=0) as file:
        file.write(text.encode())
    path.write_bytes(buffer.getvalue())


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines from gzip."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def describe(path: Path, model: Qwen3ForCausalLM) -> float:
    """Print what a rollout file holds; returns max |old_logprob - rescored| over its tokens.

    Raises ValueError when a line's arrays disagree in length, an end token is where it must not be,
    or an advantage does not follow from the rewards of its group.
    """
    lines = read_lines(path)
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault(line["group"], []).append(line)
        sizes = {len(line[key]) for key in ("response_ids", "loss_mask", "old_logprobs")}
        if sizes != {len(line["ref_logprobs"])} or sizes == {0}:
            raise ValueError(f"{line['id']}: arrays must have one value a response token.")
        ends = [token == model.config.eos_token_id for token in line["response_ids"]]
        if any(ends[:-1]) or ends[-1] == line["truncated"]:
            raise ValueError(f"{line['id']}: an end token must close the row, unless it was cut.")
    for name, rows in groups.items():
        expected = advantages([row["reward"] for row in rows])
        if not np.allclose(expected, [row["advantage"] for row in rows], rtol=1e-5, atol=1e-6):
            raise ValueError(f"{name}: advantages must follow from the rewards.")
        if any(row["prompt_ids"] != rows[0]["prompt_ids"] for row in rows):
            raise ValueError(f"{name}: a group must have one prompt.")
    distance, divergence, num_tokens = 0.0, 0.0, 0
    for line in lines:
        old = float32_array(line["old_logprobs"])
        rescored = score(model, line["prompt_ids"], line["response_ids"])
        distance = max(distance, float(np.abs(old - rescored).max()))
        divergence += float(np.sum(old - float32_array(line["ref_logprobs"])))
        num_tokens += len(old)
    mixed = sum(any(row["advantage"] for row in rows) for rows in groups.values())
    switches = sum(a["group"] != b["group"] for a, b in itertools.pairwise(lines))
    prompts = [len(line["prompt_ids"]) for line in lines]
    responses = [len(line["response_ids"]) for line in lines]
    print(f"{path.name}: {len(lines)} samples, {len(groups)} groups, {num_tokens} response tokens")
    print(f"  tasks {len({line['task'] for line in lines})}, group changes by line {switches}")
    print(f"  groups with advantages {mixed}, with equal rewards {len(groups) - mixed}")
    print(f"  truncated samples {sum(line['truncated'] for line in lines)}")
    print(f"  prompt tokens {min(prompts)} to {max(prompts)}")
    print(f"  response tokens {min(responses)} to {max(responses)}, lengths {len(set(responses))}")
    print(f"  mean of old - ref log-probability {divergence / num_tokens:.4f}")
    print(f"  max |old_logprob - rescored| {distance:.2e}")
    return distance
