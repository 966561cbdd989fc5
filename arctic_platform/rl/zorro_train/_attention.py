"""Forest attention behind transformers' attention interface.

For every implementation that a model may use there is one of ours, `zorro_<name>`: on a call that carries a forest it
runs `torch.ops.zorro.forest_attention`, on any other it is the implementation named.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from arctic_platform.rl.zorro_train._forest import Forest
from arctic_platform.rl.zorro_train._native import ops

PREFIX = "zorro_"


def layer_arguments(forest: Forest, path: str, split: bool) -> dict[str, Any]:
    """The keyword arguments that carry a forest through the model to `forest_attention`.

    With `split` the queries see their own path in the packed order. Without, every row is laid out whole and the
    result is folded back: a test aid that costs the naive batch's attention.
    """
    if split:
        structure = (forest.visible_until, forest.nodes, forest.previous)
        return {"zorro_path": path, "zorro_structure": structure}
    device = forest.replicated.device
    until, nodes, previous = ops.replicated_structure(forest.lengths)
    copies = (forest.replicated, forest.first_copy)
    return {
        "zorro_path": path,
        "zorro_structure": (until.to(device), nodes, previous.to(device)),
        "zorro_copies": copies,
    }


def modeling_module(module: torch.nn.Module) -> Any:
    """The modeling module of a module's class, of its base when a wrapper has made a class of its own (FSDP2)."""
    for base in type(module).__mro__:
        if base.__module__.startswith("transformers.models."):
            return sys.modules[base.__module__]
    return sys.modules[type(module).__module__]


def laid_out(x: torch.Tensor, copies: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    """Packed rows `[T, ...]`, or every row's tokens when the call lays rows out whole."""
    return x if copies is None else x.index_select(0, copies[0])


def folded(x: torch.Tensor, copies: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
    """The way back: each packed token from its first copy."""
    return x if copies is None else x.index_select(0, copies[1])


@dataclass(frozen=True)
class ForestAttention:
    """The attention function registered as `zorro_<original>`."""

    original: str

    def __call__(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """query `[1, Hq, T, D]`, key and value `[1, Hkv, T, D]` -> (`[1, T, Hq, D]`, None)."""
        structure = kwargs.get("zorro_structure")
        if structure is None:
            result: tuple[torch.Tensor, torch.Tensor | None] = self._original(module)(
                module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs
            )
            return result
        until, nodes, _ = structure
        copies = kwargs.get("zorro_copies")
        q, k, v = (laid_out(x[0].transpose(0, 1), copies) for x in (query, key, value))  # [T, heads, D]
        scale = query.size(-1) ** -0.5 if scaling is None else scaling
        out, _ = ops.forest_attention(q, k, v, until, nodes.cpu(), scale, 0, kwargs["zorro_path"])
        return folded(out, copies).unsqueeze(0), None

    def _original(self, module: torch.nn.Module) -> Callable[..., Any]:
        if self.original == "eager":  # transformers keeps it beside each family
            eager: Callable[..., Any] = modeling_module(module).eager_attention_forward
            return eager
        function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[self.original]
        return function


def register(original: str) -> str:
    """Registers our attention over `original` and returns its name. The masks are those of the original."""
    name = PREFIX + original
    if name not in ALL_ATTENTION_FUNCTIONS.valid_keys():
        AttentionInterface.register(name, ForestAttention(original))
        AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[original])
    return name
