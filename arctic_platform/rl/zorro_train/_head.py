"""The output head of a patched model: log-probabilities and entropies in place of logits."""

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from arctic_platform.rl.zorro_train._forest import Forest
from arctic_platform.rl.zorro_train._native import ops


@dataclass(frozen=True)
class HeadCall:
    """What the head needs to know of the call that it is part of."""

    head: nn.Module
    forest: Forest
    temperature: torch.Tensor
    mode: str
    budget_bytes: int
    lift_inputs: bool


current_call: ContextVar[HeadCall | None] = ContextVar("zorro_head_call", default=None)


class HeadForward:
    """The instance forward of a patched `lm_head`; runs inside its `__call__`, so that hooks fire.

    Refers to the head alone, so that a wrapper that copies the head does not copy the model.
    """

    def __init__(self, head: nn.Module) -> None:
        self.head = head
        self.original: Callable[..., Any] = head.forward
        self.wrapped: bool = "forward" in head.__dict__

    def is_plain(self) -> bool:
        """Whether the head is a matrix product and nothing else, so that its weight says all."""
        return (
            not self.wrapped
            and isinstance(self.head, nn.Linear)
            and type(self.head).forward is nn.Linear.forward
            and self.head.bias is None
        )

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """hidden `[1, U, H]` -> (logprob `[M]`, entropy `[M]`) in a ZoRRo call, else the head's own result."""
        call = current_call.get()
        if call is None or call.head is not self.head:
            return self.original(hidden, *args, **kwargs)
        forest = call.forest
        if not self.is_plain():
            logits = self.original(hidden, *args, **kwargs)
            return ops.logits_logprob(logits[0], forest.row, forest.label, call.temperature)
        rows, weight = hidden[0], self.head.weight
        if not call.lift_inputs:
            return self._score(call, rows, weight)
        with torch.autocast(rows.device.type, enabled=False):
            return self._score(call, *(x if x.dtype == torch.float64 else x.float() for x in (rows, weight)))

    @staticmethod
    def _score(call: HeadCall, rows: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logprob, entropy, *_ = ops.linear_logprob(
            rows, weight, call.forest.row, call.forest.label, call.temperature, call.mode, call.budget_bytes
        )
        return logprob, entropy
