"""`Qwen3ModelOncePatcher`: a live `transformers` model computes shared prompts once."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers.modeling_outputs import ModelOutput

from arctic_platform.rl.zorro_train import _attention, _linear_attention
from arctic_platform.rl.zorro_train._checks import need, refuse
from arctic_platform.rl.zorro_train._forest import Forest
from arctic_platform.rl.zorro_train._head import HeadCall, HeadForward, current_call
from arctic_platform.rl.zorro_train._native import ops

FAMILIES = (
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
)
LOGITS_MODES = ("none", "compute", "memory")
FUSED_NAMES = ("fused", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
PATH_OF = {"eager": "composed", **dict.fromkeys(FUSED_NAMES, "fused")}
# Decided by the longest row of a batch: a row alone would get other angles.
UNSTABLE_ROPE = ("dynamic", "longrope")
# Arguments of the original forward that a ZoRRo call may not carry, and what to do instead.
REFUSED_ARGUMENTS = ("output_attentions", "output_hidden_states", "logits_to_keep", "cache_position")


@dataclass
class TokenScores(ModelOutput):
    """What a ZoRRo call returns: one value a valid response token, row after row in the caller's order.

    float32, float64 for a float64 model. `entropy` is None unless `calculate_entropy` was set. With the patcher's
    `router_loss`: the balance loss of the sparse layers (without its coefficient), and the counts that it used.
    """

    logprobs: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    router_loss: torch.Tensor | None = None
    router_counts: tuple[torch.Tensor, torch.Tensor] | None = None


@dataclass(frozen=True)
class Settings:
    """How a patched model computes; checked when made."""

    response_len: int
    temperature: float
    logits_optimization: str
    budget_bytes: int
    lift_inputs: bool
    sharing: str
    split: bool
    attn_implementation: str | None  # None: the model's own
    router_loss: bool

    def __post_init__(self) -> None:
        need(self.response_len >= 0, f"response_len must not be negative, got {self.response_len}.")
        need(
            0 < self.temperature < float("inf"),
            f"temperature must be > 0 and finite, got {self.temperature}. "
            "Greedy decoding has no log-probabilities to score.",
        )
        need(
            self.logits_optimization in LOGITS_MODES,
            f"logits_optimization must be one of {', '.join(LOGITS_MODES)}, got {self.logits_optimization!r}.",
        )
        need(
            self.budget_bytes > 0,
            "logits_optimization_peak_mem_size_in_gib must be > 0, "
            f"got {self.budget_bytes / 2**30:g}. It bounds the memory of the head's tiles.",
        )
        need(
            self.attn_implementation is None or self.attn_implementation in PATH_OF,
            f"attn_implementation must be None or one of {', '.join(PATH_OF)}, got {self.attn_implementation!r}.",
        )

    def attention_path(self, model_attention: str) -> str:
        """The operator's path for a model that is set to `model_attention`."""
        if not self.split:
            return "composed"
        name = self.attn_implementation
        return PATH_OF[name] if name is not None else "composed" if model_attention == "eager" else "fused"


def find_causal_lm(model: nn.Module) -> nn.Module:
    """The language model of a supported family in `model`, which may be wrapped (PEFT, DDP, compiled).

    Raises NotImplementedError naming what is there instead, or what about it is not supported.
    """
    families = tuple(getattr(transformers, name) for name in FAMILIES if hasattr(transformers, name))
    found = next((module for module in model.modules() if isinstance(module, families)), None)
    if found is None:
        raise NotImplementedError(
            f"[zorro] model must be one of {', '.join(FAMILIES)}, got {type(model).__name__}. "
            "Other families are not supported."
        )
    config = found.config
    refuse(
        _linear_attention.has_linear_attention(found) and not _linear_attention.is_supported(found),
        f"{type(found).__name__} needs transformers 5.17 or later, got {transformers.__version__}.",
    )
    refuse(
        "sliding_attention" in (getattr(config, "layer_types", None) or ()),
        "the model must not use sliding-window attention, got layers of type sliding_attention. "
        "Set use_sliding_window to false if the window exceeds your sequences.",
    )
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    rope_type = rope.get("rope_type", "default")
    refuse(
        rope_type in UNSTABLE_ROPE,
        f"rope_type must not depend on the batch, got {rope_type}. Use default, linear, llama3 or yarn.",
    )
    return found


def _no_mask(model: nn.Module) -> Any:
    """A mask argument from which transformers builds no mask: the forest says who sees whom.

    Most families take a dictionary by layer type as it is; Qwen3-MoE takes a 4-D mask as it is.
    """
    if model.config.model_type == "qwen3_moe":
        return torch.ones(1, 1, 1, 1, dtype=torch.bool)
    return {"full_attention": None, "linear_attention": None}


def _active_dropout(model: nn.Module) -> str | None:
    for name, module in model.named_modules():
        if not module.training:
            continue
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
            return f"{name} with p={module.p:g}"
        if getattr(module, "attention_dropout", 0.0) > 0:
            return f"{name}.attention_dropout of {module.attention_dropout:g}"
    return None


_generating: ContextVar[bool] = ContextVar("zorro_generating", default=False)


class RouterTap:
    """Collects the router logits of one call."""

    def __init__(self, model: nn.Module) -> None:
        self.choices: int = getattr(model.config, "num_experts_per_tok", 0)
        self.logits: list[torch.Tensor] = []
        self.lost = False  # a layer ran without a graph inside a call that has one: reentrant checkpointing
        self.trains = torch.is_grad_enabled() and any(weight.requires_grad for weight in model.parameters())
        routers = [module.gate for module in model.modules() if hasattr(module, "experts") and hasattr(module, "gate")]
        need(bool(routers), f"router_loss needs a model with experts, got {type(model).__name__}.")
        self.handles = [router.register_forward_hook(self._record) for router in routers]

    def _record(self, module: nn.Module, inputs: Any, output: Any) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        self.lost = self.lost or (self.trains and not torch.is_grad_enabled())
        self.logits.append(logits)

    def remove(self) -> None:
        """Takes the hooks away."""
        for handle in self.handles:
            handle.remove()

    def loss(self, forest: Forest, given: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """The balance loss and the counts that it used."""
        if self.lost:
            raise RuntimeError(
                "[zorro] router_loss needs gradient checkpointing with use_reentrant=False, got the reentrant kind, "
                "whose first pass keeps no graph."
            )
        counts = given if given is not None else ops.router_counts(self.logits, forest.multiplicity, self.choices)
        return ops.router_balance_loss(self.logits, forest.multiplicity, self.choices, *counts), tuple(counts)


class PatchedForward:
    """The instance `forward` of a patched model. transformers reads the signature: it is the original's."""

    def __init__(self, installed: "Installed") -> None:
        self.installed = installed

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.installed.original_forward)

    @torch.compiler.disable  # building a forest reads values; layers that are compiled themselves stay so
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `Installed.forward`."""
        return self.installed.forward(*args, **kwargs)


class Installed:
    """What lies on a patched model: an instance `forward` and `generate`, the head's `forward`, the attention's name.

    Kept as `model._zorro`. A call that is not a ZoRRo call goes to what was there before.
    """

    def __init__(self, model: nn.Module, settings: Settings) -> None:
        self.model = model
        self.settings = settings
        self.attention: str = model.config._attn_implementation
        name = _attention.register(self.attention)
        self.before = {name: model.__dict__.get(name) for name in ("forward", "generate")}
        self.original_forward = model.forward
        self.original_generate = model.generate
        signature = inspect.signature(type(model).forward)
        self.parameters = [parameter for parameter in signature.parameters if parameter not in ("self", "kwargs")]
        self.head_forward: HeadForward | None = None
        model._zorro = self
        self.patches = {"forward": PatchedForward(self), "generate": self.generate}
        for attribute, value in self.patches.items():
            setattr(model, attribute, value)
        self._name_attention(name)
        _linear_attention.intercept(model)
        self._head()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _attention.register(self.attention)  # another process may not know the name

    def _name_attention(self, name: str) -> None:
        for config in {id(m.config): m.config for m in (self.model, self.model.base_model)}.values():
            config._attn_implementation = name

    def _head(self) -> HeadForward:
        """Our forward on the output head of now: an adapter may have replaced the one that was patched."""
        head = self.model.get_output_embeddings()
        if self.head_forward is None or self.head_forward.head is not head:
            self._restore_head()
            self.head_forward = HeadForward(head)
            head.forward = self.head_forward.forward
        return self.head_forward

    def _restore_head(self) -> None:
        if self.head_forward is None:
            return
        if self.head_forward.wrapped:
            self.head_forward.head.forward = self.head_forward.original
        else:
            del self.head_forward.head.forward
        self.head_forward = None

    def remove(self) -> None:
        """Puts everything back.

        Raises RuntimeError when another wrapper lies over ours.
        """
        for name in self.before:
            if self.model.__dict__.get(name) != self.patches[name]:
                raise RuntimeError(
                    f"[zorro] model.{name} must be the one that the patch installed, got another wrapper over it. "
                    "Remove that wrapper first."
                )
        for name, value in self.before.items():
            if value is None:
                del self.model.__dict__[name]
            else:
                setattr(self.model, name, value)
        self._restore_head()
        self._name_attention(self.attention)
        _linear_attention.release(self.model)
        del self.model._zorro

    @contextmanager
    def _without_zorro(self) -> Iterator[None]:
        token = _generating.set(True)
        try:
            yield
        finally:
            _generating.reset(token)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own generate; none of its forward calls is a ZoRRo call."""
        with self._without_zorro():
            return self.original_generate(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """A ZoRRo call if `use_cache=False` and there are no labels, past_key_values or inputs_embeds."""
        arguments = {**dict(zip(self.parameters, args, strict=False)), **kwargs}
        is_zorro = (
            not _generating.get()
            and arguments.get("use_cache") is False
            and arguments.get("input_ids") is not None
            and all(arguments.get(name) is None for name in ("labels", "past_key_values", "inputs_embeds"))
        )
        if is_zorro:
            return self._score(arguments)
        need(
            "calculate_entropy" not in arguments,
            "calculate_entropy belongs to a call with use_cache=False and without labels, past_key_values and "
            "inputs_embeds, got another call.",
        )
        return self.original_forward(*args, **kwargs)

    def _score(self, arguments: dict[str, Any]) -> TokenScores:
        settings = self.settings
        given = {name: value for name, value in arguments.items() if value is not None}
        input_ids, position_ids = given.pop("input_ids"), given.pop("position_ids", None)
        attention_mask = given.pop("attention_mask", None)
        calculate_entropy = given.pop("calculate_entropy", False)
        router_counts = given.pop("router_counts", None)
        for name in ("use_cache", "return_dict"):
            given.pop(name, None)
        self._check(given)
        head = self._head()
        need(
            head.is_plain() or settings.logits_optimization == "none",
            f"logits_optimization must be none for a head with a bias, an adapter or a forward of its own, got "
            f"{settings.logits_optimization} and {type(head.head).__name__}.",
        )
        forest = Forest.build(input_ids, settings.response_len, attention_mask, position_ids, settings.sharing)
        self._check_forest(forest)
        temperature = torch.tensor(settings.temperature, dtype=torch.float64)
        call = HeadCall(
            head.head, forest, temperature, settings.logits_optimization, settings.budget_bytes, settings.lift_inputs
        )
        path = settings.attention_path(self.attention)
        _linear_attention.intercept(self.model)  # a copy of a patched model has not done so
        token = current_call.set(call)
        routers = RouterTap(self.model) if settings.router_loss else None
        try:
            output = self.original_forward(
                input_ids=forest.token_ids.unsqueeze(0),
                position_ids=forest.positions,
                attention_mask=_no_mask(self.model),
                use_cache=False,
                logits_to_keep=forest.predictors,
                return_dict=True,
                **({"output_router_logits": False} if hasattr(self.model.config, "num_experts") else {}),
                **_attention.layer_arguments(forest, path, settings.split),
                **given,
            )
        finally:
            current_call.reset(token)
            if routers is not None:
                routers.remove()
        logprobs, entropy = output.logits
        scores = TokenScores(logprobs=logprobs, entropy=entropy if calculate_entropy else None)
        if routers is not None:
            scores.router_loss, scores.router_counts = routers.loss(forest, router_counts)
        return scores

    def _check(self, given: dict[str, Any]) -> None:
        """Refuses what a ZoRRo call cannot honour; false and zero flags are dropped."""
        for name in REFUSED_ARGUMENTS:
            value = given.pop(name, None)
            wanted = value is not None and (not isinstance(value, bool | int) or bool(value))
            refuse(wanted, f"{name} has no meaning in a call that returns log-probabilities. Leave it out, or unpatch.")
        pixels = [name for name in given if "pixel" in name or "image" in name or "video" in name]
        refuse(bool(pixels), f"input must be text, got {', '.join(pixels)}. Images are not supported.")
        dropout = _active_dropout(self.model)
        refuse(
            dropout is not None,
            f"dropout must be off, got {dropout} in training mode: copies of a prompt would differ. Set it to 0.",
        )

    def _check_forest(self, forest: Forest) -> None:
        need(forest.token_ids.numel() > 0, "attention_mask must keep at least one token, got a batch of pads.")
        need(
            forest.positions.size(0) == 1,
            "position_ids must agree on all axes for this text model, "
            f"got {forest.positions.size(0)} axes that differ.",
        )
        largest, vocabulary = int(forest.token_ids.max()), self.model.config.vocab_size
        need(
            largest < vocabulary,
            f"input_ids must lie in [0, {vocabulary}), the model's vocabulary, got {largest}. "
            "Score with the model that sampled.",
        )


class Qwen3ModelOncePatcher:
    """Patches a live Qwen model so that a call computes each shared prompt once, forward and backward.

    After `patch_forward()` a *ZoRRo call*,

        model(input_ids=, position_ids=, attention_mask=, use_cache=False, calculate_entropy=False)

    with `[B, S]` tensors `[left pad][prompt][response][right pad]` returns `TokenScores(logprobs, entropy)`: one value
    a valid response token, row after row. The numbers and all gradients are those of the rows run one by one. Rows of
    one prompt need not be neighbours; responses may be empty; the mask alone says what is a pad. Any other call
    (labels, a cache, `generate()`) goes to the original forward. Positions default to counting valid tokens.

    Works on the model itself or in a PEFT, DDP, FSDP2 or accelerate wrapper, with gradient checkpointing,
    `torch.autocast`, frozen parameters, tied heads and compiled decoder layers.

    Args:
        model: a Qwen3, Qwen3-MoE, Qwen3-Next or Qwen3.5 (dense or MoE) causal language model, or a module that holds
            one. Of transformers 4.57 dense Qwen3 is tested; the hybrid families need 5.17.
        response_len: width of the response block.
        max_token_len: accepted for callers that plan by it; a call computes what it is given.
        rollout_n: rollouts of a prompt; a hint, never trusted.
        temperature: divides the logits. > 0.
        logits_optimization: "none" (whole logits kept), "compute" (whole logits once, chunks after) or "memory"
            (tiles; whole logits never exist).
        world_size: data-parallel processes. > 1 with mode memory needs `torch.distributed` initialised.
        logits_optimization_peak_mem_size_in_gib: what tiles and chunks may use.
        logits_compute_from_fp32_inputs: lift hidden states and head weight to float32 before the head.
        logits_compute_in_fp32: always so; accepted.
        use_unpad: accepted; pads are never computed, and the result lists valid tokens either way.
        patch_with_local: share nothing: the naive batch on the same kernels, to compare with.
        use_split_attention: attend in the packed order. False lays every row out whole: a test aid.
        attn_implementation: "eager" for the plain definition, any other name for the fused kernel; None follows the
            model's own setting.
        router_loss: also return the router balance loss of a sparse model, every token weighted as often as the naive
            batch has it, pads left out. A call may pass `router_counts=(counts, total)`, the sums over all
            micro-batches and ranks: then the losses of the parts add up to that of the whole.

    Raises:
        ValueError: a setting is out of its range; in a call, a shape, dtype, mask or token id.
        NotImplementedError: another family, sliding windows, dynamic RoPE; in a call, active dropout or pixel inputs.

    Cost: a call costs the FLOPs of the distinct tokens; building the forest is linear in B * S.
    """

    def __init__(
        self,
        model: nn.Module,
        response_len: int,
        max_token_len: int,
        rollout_n: int,
        temperature: float,
        logits_optimization: str,
        world_size: int,
        logits_optimization_peak_mem_size_in_gib: float = 4,
        logits_compute_from_fp32_inputs: bool = False,
        logits_compute_in_fp32: bool = False,
        use_unpad: bool = True,
        patch_with_local: bool = False,
        use_split_attention: bool = True,
        attn_implementation: str | None = None,
        router_loss: bool = False,
    ) -> None:
        self.model = model
        self.max_token_len = max_token_len
        self.rollout_n = rollout_n
        self.logits_compute_in_fp32 = logits_compute_in_fp32
        self.use_unpad = use_unpad
        need(world_size >= 1, f"world_size must be >= 1, got {world_size}.")
        need(
            world_size == 1
            or logits_optimization != "memory"
            or (torch.distributed.is_available() and torch.distributed.is_initialized()),
            f"world_size {world_size} with logits_optimization memory needs torch.distributed, got no process group. "
            "Call init_process_group first.",
        )
        self.world_size = world_size
        self.settings = Settings(
            response_len=response_len,
            temperature=float(temperature),
            logits_optimization=logits_optimization,
            budget_bytes=int(logits_optimization_peak_mem_size_in_gib * 2**30),
            lift_inputs=logits_compute_from_fp32_inputs,
            sharing="none" if patch_with_local else "prompts",
            split=use_split_attention,
            attn_implementation=attn_implementation,
            router_loss=router_loss,
        )
        self._causal_lm = find_causal_lm(model)

    def patch_forward(self) -> None:
        """Patches the model, or gives a patched model these settings."""
        installed = self._causal_lm.__dict__.get("_zorro")
        if installed is None:
            Installed(self._causal_lm, self.settings)
        else:
            installed.settings = self.settings

    def unpatch(self) -> None:
        """Restores the model exactly. Does nothing on a model that is not patched.

        Raises:
            RuntimeError: another wrapper lies over the patched forward.
        """
        installed = self._causal_lm.__dict__.get("_zorro")
        if installed is not None:
            installed.remove()
