"""The tokenizer and the small Qwen3 model of the examples, trained on worked solutions."""

import copy
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

# isort: split
from worked_tasks import TASKS, Task, prompt_text

END, PAD = "<|end|>", "<|pad|>"
NO_LABEL = -100


@dataclass(frozen=True)
class Example:
    """Token ids of a prompt and of its worked solution, end token included."""

    prompt_ids: list[int]
    solution_ids: list[int]

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and solution together."""
        return len(self.prompt_ids) + len(self.solution_ids)


@dataclass(frozen=True)
class TrainOptions:
    """How the model is trained.

    steps            optimizer steps; the rate falls to zero over them
    max_minutes      the rate falls to zero no later than this, however many steps were made
    reference_share  the reference model is the one after this share of the schedule
    long_every       one step in so many uses few-shot rows of long_tokens tokens
    """

    steps: int
    max_minutes: float
    seed: int
    learning_rate: float = 2e-3
    reference_share: float = 0.7
    rows: int = 4
    row_tokens: int = 512
    long_every: int = 6
    long_rows: int = 2
    long_tokens: int = 1536


@dataclass(frozen=True)
class TrainReport:
    """What training did."""

    steps: int
    tokens: int
    minutes: float
    first_loss: float
    last_loss: float


def model_config(vocab_size: int, end_id: int, pad_id: int) -> Qwen3Config:
    """A small Qwen3: grouped queries, head_dim is not hidden_size / heads, tied head."""
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=pad_id,
    )


def train_tokenizer(pool: dict[str, list[tuple[str, str]]], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of the pool's texts; every digit is a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (text for pairs in pool.values() for pair in pairs for text in pair)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def wrap_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers saves and loads it."""
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, model_max_length=4096)


def text_pool(seed: int, size: int) -> dict[str, list[tuple[str, str]]]:
    """Prompt and solution texts of every task: `size` times its weight, none of them held out."""
    pool = {}
    for task in TASKS:
        items = task.items(seed, held_out=False)
        chosen = [next(items) for _ in range(int(size * task.weight))]
        pool[task.name] = [(prompt_text(item), task.solution(item)) for item in chosen]
    return pool


def special_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of END or PAD; ValueError when the tokenizer lacks it."""
    token_id = tokenizer.token_to_id(token)
    if token_id is None:
        raise ValueError(f"tokenizer must have the token {token}.")
    return int(token_id)


def encode(tokenizer: Tokenizer, prompt: str, solution: str) -> Example:
    """Token ids of the two texts, each on its own, with the end token after the solution."""
    end_id = special_id(tokenizer, END)
    return Example(
        tokenizer.encode(prompt).ids,
        [*tokenizer.encode(solution).ids, end_id],
    )


def few_shot_prompt(examples: Iterator[Example], question_ids: list[int], min_tokens: int) -> list[int]:
    """Solved examples, then the question: the shortest such prompt of at least `min_tokens`."""
    prompt: list[int] = []
    while len(prompt) + len(question_ids) < min_tokens:
        example = next(examples)
        prompt += example.prompt_ids + example.solution_ids
    return prompt + question_ids


class Batches:
    """Training batches drawn from the pool with the tasks' weights."""

    def __init__(self, pool: dict[str, list[Example]], options: TrainOptions) -> None:
        """Draw from `pool`, token ids by task name, with the seed of `options`."""
        self.pool = pool
        self.options = options
        self.random = random.Random(options.seed)

    def draw_task(self) -> Task:
        """A task, by weight."""
        return self.random.choices(TASKS, [task.weight for task in TASKS])[0]

    def packed(self) -> dict[str, torch.Tensor]:
        """Rows of independent examples: positions restart, none sees another."""
        rows, tokens = self.options.rows, self.options.row_tokens
        ids = torch.zeros(rows, tokens, dtype=torch.long)
        labels = torch.full((rows, tokens), NO_LABEL)
        positions = torch.zeros(rows, tokens, dtype=torch.long)
        segment = torch.zeros(rows, tokens, dtype=torch.long)
        for row in range(rows):
            begin = number = 0
            while True:
                example = self.random.choice(self.pool[self.draw_task().name])
                end = begin + example.num_tokens
                if end > tokens:
                    break
                number += 1
                ids[row, begin:end] = torch.tensor(example.prompt_ids + example.solution_ids)
                first = begin + len(example.prompt_ids)
                labels[row, first:end] = ids[row, first:end]
                positions[row, begin:end] = torch.arange(example.num_tokens)
                segment[row, begin:end] = number
                begin = end
        same = segment[:, :, None] == segment[:, None, :]  # [rows, tokens, tokens]
        visible = same & torch.ones(tokens, tokens, dtype=torch.bool).tril()
        return {
            "input_ids": ids,
            "labels": labels,
            "position_ids": positions,
            "attention_mask": visible[:, None],
        }

    def few_shot(self) -> dict[str, torch.Tensor]:
        """Long rows, each of one task: every example sees those before it."""
        rows, tokens = self.options.long_rows, self.options.long_tokens
        ids = torch.zeros(rows, tokens, dtype=torch.long)
        labels = torch.full((rows, tokens), NO_LABEL)
        for row in range(rows):
            task, begin = self.draw_task(), 0
            while True:
                example = self.random.choice(self.pool[task.name])
                end = begin + example.num_tokens
                if end > tokens:
                    break
                ids[row, begin:end] = torch.tensor(example.prompt_ids + example.solution_ids)
                first = begin + len(example.prompt_ids)
                labels[row, first:end] = ids[row, first:end]
                begin = end
        return {"input_ids": ids, "labels": labels}


def rounded(model: Qwen3ForCausalLM) -> Qwen3ForCausalLM:
    """A float32 copy whose weights are those that a bfloat16 file holds."""
    return copy.deepcopy(model).to(torch.bfloat16).to(torch.float32).eval()


def train(
    config: Qwen3Config, pool: dict[str, list[Example]], options: TrainOptions
) -> tuple[Qwen3ForCausalLM, Qwen3ForCausalLM, TrainReport]:
    """Train a model; weights and optimizer are float32, matrix products bfloat16.

    Returns the model, the reference model (an earlier state), both rounded to bfloat16 values, and
    a report. Only solution tokens are labels. Progress goes to stdout.
    """
    torch.manual_seed(options.seed)
    model = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    batches = Batches(pool, options)
    reference: Qwen3ForCausalLM | None = None
    losses: list[float] = []
    tokens, step, start = 0, 0, time.monotonic()
    while True:
        minutes = (time.monotonic() - start) / 60
        progress = max(step / options.steps, minutes / options.max_minutes)
        if reference is None and progress >= options.reference_share:
            reference = rounded(model)
        if progress >= 1:
            break
        optimizer.param_groups[0]["lr"] = (
            options.learning_rate * min(1.0, (step + 1) / 50) * min(1.0, 1.5 * (1 - progress))
        )
        is_long = step % options.long_every == options.long_every - 1
        batch = batches.few_shot() if is_long else batches.packed()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        tokens += batch["input_ids"].numel()
        step += 1
        if step % 50 == 0:
            mean = sum(losses[-50:]) / 50
            print(f"step {step:5d}  loss {mean:.4f}  {minutes:.1f} min", flush=True)
    assert reference is not None
    report = TrainReport(
        steps=step,
        tokens=tokens,
        minutes=(time.monotonic() - start) / 60,
        first_loss=losses[0],
        last_loss=sum(losses[-50:]) / len(losses[-50:]),
    )
    return rounded(model), reference, report
