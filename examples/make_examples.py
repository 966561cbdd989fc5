"""Make the example model and its rollouts: tasks, tokenizer, training, sampling, files.

`python make_examples.py --work-dir DIR` trains (or takes the model that an earlier call left in
DIR), samples and writes the files beside this script; `--check` scores the files again. It is run
by hand only: no build step, demo or test calls it. README.md says what came of it.
"""

import argparse
import dataclasses
import itertools
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen3ForCausalLM

# isort: split
from rollout_files import Group, describe, group_lines, make_group, write_lines
from small_model import (
    END,
    PAD,
    Example,
    TrainOptions,
    encode,
    few_shot_prompt,
    model_config,
    special_id,
    text_pool,
    train,
    train_tokenizer,
    wrap_tokenizer,
)
from worked_tasks import TASKS, Task, prompt_text

HERE = Path(__file__).resolve().parent
MODEL, ROLLOUTS, LONG = HERE / "qwen3-small", HERE / "rollouts.jsonl.gz", HERE / "long.jsonl.gz"
NUM_SAMPLES, MAX_NEW_TOKENS = 8, 48
NUM_GROUPS, CANDIDATES_A_TASK = 16, 5
LONG_GROUPS, LONG_TOKENS, LONG_STEP = 3, 1024, 128
MIN_REWARD_RANGE = 0.1  # groups told apart only by a scorer's crumbs for a wrong answer stay out
LIMIT = 1e-4


def make_model(args: argparse.Namespace) -> None:
    """Train tokenizer, model and reference into `args.work_dir`; keep what is there already."""
    report_path = args.work_dir / "report.json"
    if report_path.exists():
        return
    texts = text_pool(args.seed, args.pool)
    tokenizer = train_tokenizer(texts, args.vocab_size)
    pool = {name: [encode(tokenizer, prompt, solution) for prompt, solution in pairs] for name, pairs in texts.items()}
    config = model_config(tokenizer.get_vocab_size(), special_id(tokenizer, END), special_id(tokenizer, PAD))
    options = TrainOptions(steps=args.steps, max_minutes=args.max_minutes, seed=args.seed)
    model, reference, report = train(config, pool, options)
    for name, trained in (("model", model), ("reference", reference)):
        trained.to(torch.bfloat16).save_pretrained(args.work_dir / name)
        wrap_tokenizer(tokenizer).save_pretrained(args.work_dir / name)
    report_path.write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")


def load_model(folder: Path) -> Qwen3ForCausalLM:
    """The model of a folder, its bfloat16 weights widened to float32."""
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def short_groups(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int) -> list[Group]:
    """Sample held-out prompts of every task and keep NUM_GROUPS groups.

    Every task gives CANDIDATES_A_TASK candidates. One group whose rewards are all equal is kept:
    the first. The others have mixed rewards: the first of every task, then the second of every
    task, and so on.
    """
    mixed: list[tuple[int, Group]] = []
    equal: list[Group] = []
    for task in TASKS:
        num_mixed, rewards = 0, []
        for n, item in enumerate(itertools.islice(task.items(seed, True), CANDIDATES_A_TASK)):
            prompt_ids = tokenizer.encode(prompt_text(item))
            group = make_group(
                model, tokenizer, task, item, prompt_ids, f"{task.name}/{n}",
                NUM_SAMPLES, MAX_NEW_TOKENS, seed,
            )  # fmt: skip
            rewards += group.rewards
            if group.reward_range > MIN_REWARD_RANGE:
                mixed.append((num_mixed, group))
                num_mixed += 1
            elif group.reward_range == 0:
                equal.append(group)
        mean = sum(rewards) / len(rewards)
        print(f"{task.name}: mean reward {mean:.2f}, mixed groups {num_mixed}", flush=True)
    mixed.sort(key=lambda pair: pair[0])
    chosen = [group for _, group in mixed[: NUM_GROUPS - 1]] + equal[:1]
    if len(chosen) < NUM_GROUPS:
        raise ValueError(f"candidates must give {NUM_GROUPS} groups, got {len(chosen)}.")
    return chosen


def solved_examples(task: Task, tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[Example]:
    """Training examples of a task, to put before a long question."""
    for item in task.items(seed, False):
        yield encode(tokenizer.backend_tokenizer, prompt_text(item), task.solution(item))


def long_groups(
    model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, tasks: list[str], seed: int
) -> list[Group]:
    """Groups with few-shot prompts of at least LONG_TOKENS tokens, one a task, rewards mixed.

    Takes the tasks in the given order and of each the first held-out question, among
    CANDIDATES_A_TASK, whose rewards are mixed. Every further prompt is LONG_STEP tokens longer.
    """
    groups: list[Group] = []
    for task in (task for name in tasks for task in TASKS if task.name == name):
        for n, item in enumerate(itertools.islice(task.items(seed, True), CANDIDATES_A_TASK)):
            prompt_ids = few_shot_prompt(
                solved_examples(task, tokenizer, seed),
                tokenizer.encode(prompt_text(item)),
                LONG_TOKENS + LONG_STEP * len(groups),
            )
            group = make_group(
                model, tokenizer, task, item, prompt_ids, f"long/{task.name}/{n}",
                NUM_SAMPLES, MAX_NEW_TOKENS, seed,
            )  # fmt: skip
            if group.reward_range > MIN_REWARD_RANGE:
                groups.append(group)
                break
        if len(groups) == LONG_GROUPS:
            return groups
    raise ValueError(f"tasks must give {LONG_GROUPS} long groups, got {len(groups)}.")


def make_files(args: argparse.Namespace) -> None:
    """Sample from the trained model and write the model folder and both rollout files."""
    shutil.rmtree(MODEL, ignore_errors=True)
    shutil.copytree(args.work_dir / "model", MODEL)
    for file in MODEL.iterdir():
        file.chmod(0o644)
    model, reference = load_model(MODEL), load_model(args.work_dir / "reference")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    groups = short_groups(model, tokenizer, args.sample_seed)
    long = long_groups(model, tokenizer, args.long_tasks, args.sample_seed)
    for path, chosen in ((ROLLOUTS, groups), (LONG, long)):
        lines, distance = [], 0.0
        for group in chosen:
            rows, row_distance = group_lines(group, model, reference)
            lines += rows
            distance = max(distance, row_distance)
        if path == ROLLOUTS:
            random.Random(args.sample_seed).shuffle(lines)
        write_lines(path, lines)
        print(f"{path.name}: max |sampler - scored log-probability| {distance:.2e}")
        if distance > LIMIT:
            raise ValueError(f"sampler and scorer must agree within {LIMIT}, got {distance}.")


def check_files() -> None:
    """Score the shipped files again with the shipped model; raise ValueError on a difference."""
    model = load_model(MODEL)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{MODEL.name}: {num_parameters} parameters")
    distance = max(describe(path, model) for path in (ROLLOUTS, LONG))
    if distance >= LIMIT:
        raise ValueError(f"old_logprobs must agree within {LIMIT}, got {distance}.")


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", type=Path, help="folder for the trained models")
    parser.add_argument("--check", action="store_true", help="only score the shipped files again")
    parser.add_argument("--seed", type=int, default=17, help="seed of data and training")
    parser.add_argument("--sample-seed", type=int, default=23, help="seed of prompts and sampling")
    parser.add_argument("--pool", type=int, default=3000, help="training texts a task")
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2000, help="training steps")
    parser.add_argument("--max-minutes", type=float, default=14.5, help="training time, at most")
    parser.add_argument(
        "--long-tasks",
        nargs="+",
        default=["simple_equations", "letter_counting", "spell_backward", "gcd", "leg_counting"],
        help="tasks of the long prompts, in order of preference",
    )
    args = parser.parse_args()
    torch.set_num_threads(2)
    if args.check:
        check_files()
        return
    if args.work_dir is None:
        parser.error("--work-dir is needed unless --check is given")
    make_model(args)
    torch.set_num_threads(1)  # one token at a time: threads would only wait for each other
    make_files(args)


if __name__ == "__main__":
    main()
