"""Linear attention of the hybrid families.

transformers has no interface for it, but its layers hand their keyword arguments to two functions of the modeling
module, the short convolution and the gated delta rule. While a model of a family is patched these two are ours: on a
call that carries a forest they run `torch.ops.zorro`, on any other they are the functions that were there.
"""

import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from arctic_platform.rl.zorro_train._attention import folded, laid_out, modeling_module
from arctic_platform.rl.zorro_train._native import ops

CONVOLUTION = "causal_conv1d_fn"
DELTA_RULE = "torch_chunk_gated_delta_rule"


def has_linear_attention(model: nn.Module) -> bool:
    """Whether any layer is linear attention."""
    return "linear_attention" in (getattr(model.config, "layer_types", None) or ())


def is_supported(model: nn.Module) -> bool:
    """Whether the modeling module calls the two functions by name and its layers pass keyword arguments on."""
    module = modeling_module(model)
    if not all(callable(getattr(module, name, None)) for name in (CONVOLUTION, DELTA_RULE)):
        return False
    layers = (child.linear_attn for child in model.modules() if hasattr(child, "linear_attn"))
    return all(
        any(p.kind is p.VAR_KEYWORD for p in inspect.signature(type(layer).forward).parameters.values())
        for layer in layers
    )


@dataclass
class Interception:
    """The functions of one modeling module, and how many patched models need them."""

    module: Any
    convolution: Callable[..., Any]
    delta_rule: Callable[..., Any]
    users: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)

    def convolve(self, x: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """x `[1, C, T]`, weight `[C, K]` -> `[1, C, T]` with SiLU applied."""
        structure = kwargs.get("zorro_structure")
        if structure is None:
            result: torch.Tensor = self.convolution(x, weight, *args, **kwargs)
            return result
        copies = kwargs.get("zorro_copies")
        u = laid_out(x[0].t(), copies)
        y = nn.functional.silu(ops.forest_short_conv(u, weight.to(u.dtype), structure[2], 0))
        return folded(y, copies).t().unsqueeze(0)

    def apply_rule(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, Any]:
        """query, key `[1, T, Hv, dk]`, value `[1, T, Hv, dv]`, g and beta `[1, T, Hv]` -> (`[1, T, Hv, dv]`, None)."""
        structure = kwargs.get("zorro_structure")
        if structure is None:
            result: tuple[torch.Tensor, Any] = self.delta_rule(query, key, value, *args, **kwargs)
            return result
        copies = kwargs.get("zorro_copies")
        inputs = (query, key, value, kwargs["g"], kwargs["beta"])
        q, k, v, g, beta = (laid_out(x[0], copies) for x in inputs)
        out, _ = ops.normalized_gated_delta(q, k, v.to(q.dtype), g, beta, structure[1].cpu())
        return folded(out, copies).unsqueeze(0), None


_interceptions: dict[str, Interception] = {}


def intercept(model: nn.Module) -> None:
    """Puts our functions in place for a model that has linear attention."""
    if not has_linear_attention(model):
        return
    module = modeling_module(model)
    found = _interceptions.get(module.__name__)
    if found is None:
        found = Interception(module, getattr(module, CONVOLUTION), getattr(module, DELTA_RULE))
        _interceptions[module.__name__] = found
        setattr(module, CONVOLUTION, found.convolve)
        setattr(module, DELTA_RULE, found.apply_rule)
    if model not in found.users:
        found.users.add(model)
        weakref.finalize(model, _restore_if_unused, module.__name__)


def release(model: nn.Module) -> None:
    """Puts the original functions back when no patched model of the family is left."""
    if not has_linear_attention(model):
        return
    name = modeling_module(model).__name__
    _interceptions[name].users.discard(model)
    _restore_if_unused(name)


def _restore_if_unused(name: str) -> None:
    found = _interceptions.get(name)
    if found is None or any(True for _ in found.users):
        return
    setattr(found.module, CONVOLUTION, found.convolution)
    setattr(found.module, DELTA_RULE, found.delta_rule)
    del _interceptions[name]
