"""`DeduplicatedActor`: load a model, score a batch, take a policy-gradient step; the patcher in its simplest use."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from arctic_platform.rl.zorro_train._native import ops
from arctic_platform.rl.zorro_train.qwen_model_patcher import Qwen3ModelOncePatcher, TokenScores
from arctic_platform.rl.zorro_train.seqlen_balancing import pick_rows, plan_rows

Batch = Mapping[str, Any]
TRAINING_FIELDS = ("old_log_probs", "advantages")


def packed_ppo_policy_loss(
    log_prob: torch.Tensor,
    old_log_prob: torch.Tensor,
    advantages: torch.Tensor,
    ref_log_prob: torch.Tensor | None = None,
    clip_ratio: float = 0.2,
    kl_loss_coef: float = 0.001,
) -> tuple[torch.Tensor, dict[str, float]]:
    """PPO's clipped surrogate and a k1 KL penalty, averaged over tokens.

    With ratio = exp(log_prob - old_log_prob): mean of max(-A ratio, -A clip(ratio, 1 - c, 1 + c)), plus
    kl_loss_coef times the mean of log_prob - ref_log_prob.

    Args:
        log_prob, old_log_prob, advantages, ref_log_prob: `[M]`, one value a token.
        clip_ratio: c.
        kl_loss_coef: weight of the penalty; unused without `ref_log_prob`.

    Returns:
        The loss (0 for no tokens), and `actor/pg_loss`, `actor/policy_loss`, `actor/pg_clipfrac` (share of tokens with
        a ratio outside the clip range), `actor/ppo_kl` (mean of ratio - 1 - ln ratio), and with a reference
        `actor/kl_loss`.

    Raises:
        ValueError: the tensors differ in shape.

    Source: Schulman et al., arXiv 1707.06347.
    """
    others = {"old_log_prob": old_log_prob, "advantages": advantages, "ref_log_prob": ref_log_prob}
    for name, other in others.items():
        if other is not None and other.shape != log_prob.shape:
            raise ValueError(f"[zorro] {name} must be {list(log_prob.shape)} as log_prob, got {list(other.shape)}.")

    def mean(x: torch.Tensor) -> torch.Tensor:
        return x.sum() / max(x.numel(), 1)

    log_ratio = log_prob - old_log_prob
    ratio = log_ratio.exp()
    clipped = ratio.clamp(1 - clip_ratio, 1 + clip_ratio)
    pg_loss = mean(torch.maximum(-advantages * ratio, -advantages * clipped))
    loss = pg_loss
    metrics = {
        "actor/pg_loss": pg_loss.item(),
        "actor/pg_clipfrac": mean(((ratio - 1).abs() > clip_ratio).to(ratio.dtype)).item(),
        "actor/ppo_kl": mean(ratio - 1 - log_ratio).item(),
    }
    if ref_log_prob is not None:
        kl_loss = mean(log_prob - ref_log_prob)
        loss = loss + kl_loss_coef * kl_loss
        metrics["actor/kl_loss"] = kl_loss.item()
    metrics["actor/policy_loss"] = loss.item()
    return loss, metrics


def response_width(batch: Batch) -> int:
    """The width of the response block, from `responses` or `response_length`."""
    if "responses" in batch:
        return int(batch["responses"].size(-1))
    if "response_length" in batch:
        return int(batch["response_length"])
    raise ValueError("[zorro] batch must hold responses or response_length, got neither.")


def _load(model_name_or_path: str, dtype: torch.dtype, attention: str) -> nn.Module:
    looks_local = model_name_or_path.startswith((".", "/", "~")) or model_name_or_path.count("/") > 1
    advice = "Pass a Hugging Face folder with config.json and *.safetensors, or a hub name that this machine can fetch."
    if looks_local and not (Path(model_name_or_path).expanduser() / "config.json").is_file():
        raise FileNotFoundError(f"[zorro] model_name_or_path must hold a model, got {model_name_or_path}. {advice}")
    try:
        model: nn.Module = AutoModelForCausalLM.from_pretrained(
            model_name_or_path, dtype=dtype, attn_implementation=attention
        )
    except OSError:
        raise FileNotFoundError(
            f"[zorro] model_name_or_path must hold a model, got {model_name_or_path}. {advice}"
        ) from None
    return model


class DeduplicatedActor:
    """A policy that computes shared prompts once. The model is patched by the first `forward`; before, it is plain.

    Args:
        model_name_or_path: a Hugging Face folder or name of a Qwen3 model.
        device: where to. "cpu" works in full.
        logits_optimization: "none", "compute" or "memory", see `Qwen3ModelOncePatcher`.
        use_split_attention: see there.
        attn_implementation: "eager" for the plain definition, else the fused kernel ("flash_attention_2" needs no
            flash-attn: the model loads with sdpa, the patcher gets the name).
        world_size: data-parallel processes.
        max_token_len: most packed tokens that are computed at a time.
        dtype: of the weights.

    Raises:
        RuntimeError: `device` is CUDA and there is none.
        FileNotFoundError: there is no such model.
        NotImplementedError: the model is of another family.
    """

    def __init__(
        self,
        model_name_or_path: str,
        device: str = "cuda",
        logits_optimization: str = "none",
        use_split_attention: bool = True,
        attn_implementation: str = "eager",
        world_size: int = 1,
        max_token_len: int = 4096,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise RuntimeError(f'[zorro] device must be there, got {device} without a CUDA device. Pass device="cpu".')
        self.device = device
        self.logits_optimization = logits_optimization
        self.use_split_attention = use_split_attention
        self.attn_implementation = attn_implementation
        self.world_size = world_size
        self.max_token_len = max_token_len
        self.model = _load(model_name_or_path, dtype, "eager" if attn_implementation == "eager" else "sdpa").to(device)
        self.model.eval()
        self._patcher(1, 1.0)  # what cannot be patched is refused now

    def train(self) -> None:
        """Sets the model to training mode."""
        self.model.train()

    def eval(self) -> None:
        """Sets the model to evaluation mode."""
        self.model.eval()

    def _patcher(self, response_len: int, temperature: float, share: bool = True) -> Qwen3ModelOncePatcher:
        return Qwen3ModelOncePatcher(
            self.model,
            response_len=response_len,
            max_token_len=self.max_token_len,
            rollout_n=1,
            temperature=temperature,
            logits_optimization=self.logits_optimization,
            world_size=self.world_size,
            patch_with_local=not share,
            use_split_attention=self.use_split_attention,
            attn_implementation=self.attn_implementation,
        )

    def _plan(self, batch: Batch) -> list[tuple[dict[str, Any], torch.Tensor]]:
        """Micro-batches on the device, each with the place of its tokens among those of the batch."""
        wanted = ("input_ids", "attention_mask", "position_ids", *TRAINING_FIELDS, "ref_log_prob")
        fields = {name: batch[name].to(self.device) for name in wanted if batch.get(name) is not None}
        width = response_width(batch)
        if not 0 <= width <= fields["input_ids"].size(1):
            raise ValueError(
                f"[zorro] responses must be at most as wide as input_ids, {fields['input_ids'].size(1)}, got {width}."
            )
        fields.setdefault("attention_mask", torch.ones_like(fields["input_ids"]))
        batch_size = fields["input_ids"].size(0)
        indices = plan_rows(fields, width, self.max_token_len)
        valid = fields["attention_mask"][:, fields["input_ids"].size(1) - width :].bool()
        number = valid.flatten().cumsum(0).view_as(valid) - 1

        def part(rows: list[int]) -> dict[str, Any]:
            return {name: pick_rows(name, value, rows, batch_size) for name, value in fields.items()}

        return [(part(rows), number[rows][valid[rows]]) for rows in indices]

    def _score(self, part: dict[str, Any], calculate_entropy: bool) -> TokenScores:
        scores: TokenScores = self.model(
            input_ids=part["input_ids"],
            position_ids=part.get("position_ids"),
            attention_mask=part["attention_mask"],
            use_cache=False,
            calculate_entropy=calculate_entropy,
        )
        return scores

    def forward(self, batch: Batch, temperature: float = 1.0, calculate_entropy: bool = False) -> TokenScores:
        """Log-probabilities (and entropies) of the valid response tokens, 1-D, row after row.

        Args:
            batch: `input_ids`, `attention_mask`, `position_ids` `[B, S]`, and `responses` `[B, R]` or
                `response_length`.
            temperature: divides the logits.
            calculate_entropy: also return entropies.

        Raises:
            ValueError: a row alone exceeds `max_token_len`, or a tensor is wrong.
        """
        parts = self._plan(batch)
        self._patcher(response_width(batch), temperature).patch_forward()
        scores = [self._score(part, calculate_entropy) for part, _ in parts]
        order = torch.cat([places for _, places in parts]).argsort()

        def in_order(values: list[Any]) -> torch.Tensor:
            return torch.cat(values).index_select(0, order)

        return TokenScores(
            logprobs=in_order([part.logprobs for part in scores]),
            entropy=in_order([part.entropy for part in scores]) if calculate_entropy else None,
        )

    def compute_policy_loss_and_backward(
        self, batch: Batch, temperature: float = 1.0, gradient_accumulation: int = 1
    ) -> dict[str, float]:
        """One backward pass of `packed_ppo_policy_loss` over the batch; gradients add to those that are there.

        Micro-batches are weighted by their tokens, so the cap does not change the gradient.

        Args:
            batch: as for `forward`, with `old_log_probs`, `advantages` and optionally `ref_log_prob`, `[B, R]`.
            temperature: divides the logits.
            gradient_accumulation: the loss is divided by it.

        Returns:
            The means of `packed_ppo_policy_loss` and `actor/loss`, what was differentiated.

        Raises:
            ValueError: a training field is missing, or as for `forward`.
        """
        missing = [name for name in TRAINING_FIELDS if batch.get(name) is None]
        if missing:
            raise ValueError(
                f"[zorro] batch must hold {' and '.join(TRAINING_FIELDS)} for a training step, got no {missing[0]}."
            )
        width = response_width(batch)
        parts = self._plan(batch)
        self._patcher(width, temperature).patch_forward()
        self.train()
        tokens = sum(places.numel() for _, places in parts)
        totals: dict[str, float] = {}
        for part, places in parts:
            if places.numel() == 0:
                continue
            valid = part["attention_mask"][:, part["input_ids"].size(1) - width :].bool()
            logprobs = self._score(part, calculate_entropy=False).logprobs
            fields: list[Any] = [
                part[name][valid] if name in part else None for name in (*TRAINING_FIELDS, "ref_log_prob")
            ]
            loss, metrics = packed_ppo_policy_loss(logprobs, *fields)
            share = places.numel() / tokens
            (loss * (share / gradient_accumulation)).backward()
            for name, value in metrics.items():
                totals[name] = totals.get(name, 0.0) + share * value
        totals["actor/loss"] = totals.get("actor/policy_loss", 0.0) / gradient_accumulation
        return totals

    def speedup_bound(self, batch: Batch) -> tuple[float, float]:
        """(rho, S) of a batch on this model: its token ratio, and the largest possible speed-up by FLOPs."""
        config = self.model.config.to_json_string(use_diff=False)
        rho, bound = ops.speedup_bound(batch["input_ids"], batch.get("attention_mask"), response_width(batch), config)
        return rho, bound
