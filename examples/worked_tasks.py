"""Seeded reasoning-gym tasks with a worked solution for each item.

A task is a reasoning-gym dataset with an easy configuration and a rule that writes a short chain of
steps from the item's metadata. Every solution ends in the line ``Answer: <answer>``.
"""

import re
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import reasoning_gym
from reasoning_gym.arithmetic.leg_counting import ANIMALS

ANSWER_MARK = "Answer:"
HELD_OUT_SHARE = 16

Item = dict[str, Any]


def reduce_expression(expression: str) -> tuple[int, list[str]]:
    """Evaluate integers joined by +, - and *, one operation at a time.

    Returns the value and the operations as ``a + b = c``; products first, then left to right.
    """
    parts: list[str] = re.findall(r"(?<![\d\s])-\d+|(?<=[-+*] )-\d+|^-\d+|\d+|[-+*]", expression)
    steps: list[str] = []
    for operators in ("*", "+-"):
        at = 1
        while at < len(parts):
            if parts[at] not in operators:
                at += 2
                continue
            left, right = int(parts[at - 1]), int(parts[at + 1])
            value = {"*": left * right, "+": left + right, "-": left - right}[parts[at]]
            steps.append(f"{left} {parts[at]} {right} = {value}")
            parts[at - 1 : at + 2] = [str(value)]
    return int(parts[0]), steps


def solve_by_reduction(item: Item) -> list[str]:
    """Steps that evaluate ``metadata['expression']``."""
    return reduce_expression(item["metadata"]["expression"])[1]


def solve_product(item: Item) -> list[str]:
    """Steps of a product: the second factor split into tens and ones."""
    left, right = map(int, item["metadata"]["expression"].split(" * "))
    tens, ones = right - right % 10, right % 10
    if tens == 0 or ones == 0:
        return [f"{left} * {right} = {left * right}"]
    return [
        f"{left} * {tens} = {left * tens}",
        f"{left} * {ones} = {left * ones}",
        f"{left * tens} + {left * ones} = {left * right}",
    ]


def solve_gcd(item: Item) -> list[str]:
    """Steps of Euclid's algorithm."""
    large, small = sorted(item["metadata"]["numbers"], reverse=True)
    steps = []
    while small:
        steps.append(f"{large} % {small} = {large % small}")
        large, small = small, large % small
    return steps


def solve_equation(item: Item) -> list[str]:
    """Steps of a linear equation in one variable: move the constant, then divide."""
    variable = item["metadata"]["variable"]
    left, right = item["metadata"]["equation"].split(" = ")
    constant = reduce_expression(left.replace(variable, "0"))[0]
    factor = reduce_expression(left.replace(variable, "1"))[0] - constant
    total = int(right) - constant
    return [
        f"{factor}*{variable} = {right} - {constant} = {total}",
        f"{variable} = {total} / {factor} = {item['answer']}",
    ]


def solve_letter_counting(item: Item) -> list[str]:
    """Steps that spell each word and count the letter in it."""
    letter, words = item["metadata"]["target_letter"], item["metadata"]["span"]
    counts = [word.lower().count(letter) for word in words]
    steps = [f"{' '.join(word.lower())}: {count}" for word, count in zip(words, counts, strict=True)]
    return [*steps, f"{' + '.join(map(str, counts))} = {item['answer']}"]


def solve_spell_backward(item: Item) -> list[str]:
    """Steps that spell the word forward, then backward."""
    return [" ".join(item["metadata"]["word"]), " ".join(item["answer"])]


def solve_word_sorting(item: Item) -> list[str]:
    """Steps that list the first two letters of the words before and after sorting."""
    before, after = item["metadata"]["original_words"], item["metadata"]["sorted_words"]
    return [" ".join(w[:2] for w in before), " ".join(w[:2] for w in after)]


def solve_word_reversal(item: Item) -> list[str]:
    """Steps that number the words."""
    return ["; ".join(f"{n} {word}" for n, word in enumerate(item["metadata"]["words"], 1))]


def solve_leg_counting(item: Item) -> list[str]:
    """Steps that multiply by the legs of each animal and add up."""
    animals: dict[str, int] = item["metadata"]["animals"]
    steps = [f"{name}: {n} * {ANIMALS[name]} = {n * ANIMALS[name]}" for name, n in animals.items()]
    total = " + ".join(str(n * ANIMALS[name]) for name, n in animals.items())
    return [*steps, f"{total} = {item['answer']}"]


def solve_knights_knaves(item: Item) -> list[str]:
    """One step that names who tells the truth."""
    pairs = zip(item["metadata"]["names"], item["metadata"]["solution"], strict=True)
    return [", ".join(f"{name} {'truth' if honest else 'lie'}" for name, honest in pairs)]


def solve_shortest_path(item: Item) -> list[str]:
    """One step with the row and column of start and destination."""
    cells = {
        cell: f"{r} {c}"
        for r, row in enumerate(item["metadata"]["matrix"])
        for c, cell in enumerate(row)
        if cell in "*#"
    }
    return [f"{cells['*']} to {cells['#']}"]


def solve_gsm(item: Item) -> list[str]:
    """The lines of the item's own chain of thought that hold an equation."""
    lines = (line.strip(" \u2022-") for line in item["metadata"]["answer_cot"].splitlines())
    return [line for line in lines if "=" in line]


@dataclass(frozen=True)
class Task:
    """One reasoning-gym dataset: name, share in training, solution rule, options."""

    name: str
    weight: float
    solve: Callable[[Item], list[str]]
    options: dict[str, Any] = field(default_factory=dict)

    def items(self, seed: int, held_out: bool) -> Iterator[Item]:
        """Items from `seed` on; a question is held out by its checksum, so the sides never meet."""
        dataset = self.dataset(seed)
        for index in range(len(dataset)):
            item: Item = dataset[index]
            checksum = zlib.crc32(item["question"].encode())
            if (checksum % HELD_OUT_SHARE == 0) == held_out:
                yield item

    def dataset(self, seed: int) -> Any:
        """The reasoning-gym dataset that makes and scores the items."""
        return reasoning_gym.create_dataset(self.name, size=10**8, seed=seed, **self.options)

    def solution(self, item: Item) -> str:
        """The worked solution: steps, then the answer line."""
        return "\n".join([*self.solve(item), f"{ANSWER_MARK} {str(item['answer']).strip()}"])


TASKS = (
    Task("chain_sum", 1.0, solve_by_reduction, {"max_terms": 3, "max_digits": 2}),
    Task(
        "basic_arithmetic",
        1.0,
        solve_by_reduction,
        {
            "max_terms": 3,
            "max_digits": 1,
            "operators": ("+", "-", "*"),
            "allow_parentheses": False,
            "allow_negation": False,
        },
    ),
    Task("products", 1.0, solve_product, {"max_digits": 2}),
    Task("gcd", 1.0, solve_gcd, {"max_value": 30}),
    Task(
        "simple_equations",
        1.0,
        solve_equation,
        {"max_terms": 2, "max_value": 12},
    ),
    Task("letter_counting", 1.0, solve_letter_counting, {"min_words": 2, "max_words": 4}),
    Task("spell_backward", 1.5, solve_spell_backward, {"max_word_len": 5}),
    Task("word_sorting", 1.0, solve_word_sorting, {"min_words": 2, "max_words": 4}),
    Task("word_sequence_reversal", 1.0, solve_word_reversal, {"max_words": 5}),
    Task("leg_counting", 1.0, solve_leg_counting, {"min_animals": 2, "max_animals": 3}),
    Task(
        "countdown",
        0.5,
        solve_by_reduction,
        {
            "min_numbers": 3,
            "max_numbers": 3,
            "max_value": 20,
            "min_target": 10,
            "max_target": 60,
            "operators": ("+", "-"),
        },
    ),
    Task("knights_knaves", 0.4, solve_knights_knaves),
    Task(
        "shortest_path",
        0.4,
        solve_shortest_path,
        {"min_rows": 3, "max_rows": 4, "min_cols": 3, "max_cols": 4, "p_blocked": 0.25},
    ),
    Task("gsm_symbolic", 0.4, solve_gsm),
)


def prompt_text(item: Item) -> str:
    """The question in the fixed prompt format."""
    return f"Q: {item['question'].strip()}\nA:\n"


def read_answer(response: str) -> str | None:
    """The answer a response ends in, None when it has no answer line."""
    _, mark, answer = response.rpartition(ANSWER_MARK)
    return answer.strip() if mark else None
