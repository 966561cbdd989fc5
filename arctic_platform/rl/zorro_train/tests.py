"""Batches to try things on, gradient comparison, and the two reports that `demo.py` prints."""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from arctic_platform.rl.zorro_train.actor import Batch, DeduplicatedActor, packed_ppo_policy_loss, response_width

LINE = "-" * 78


def create_dummy_batch(
    batch_size: int = 8,
    num_unique_prompts: int = 2,
    prompt_len: int = 8,
    response_len: int = 8,
    vocab_size: int = 32000,
    device: str = "cuda",
    include_training_fields: bool = False,
    add_padding: bool = False,
    min_valid_prompt_len: int = 5,
    min_valid_response_len: int = 5,
    pad_token_id: int = 0,
) -> dict[str, Any]:
    """A random batch `[left pad][prompt][response][right pad]`; rows of one prompt are neighbours.

    Args:
        batch_size, num_unique_prompts: B rows over so many prompts; rows left over go round robin at the end.
        prompt_len, response_len: widths of the blocks, and the valid lengths without `add_padding`.
        vocab_size: ids are drawn from [1, vocab_size).
        device: where the tensors are made. The global random state is used: seed it for a fixed batch.
        include_training_fields: add `old_log_probs`, `advantages`, `ref_log_prob`, `[B, R]` float32.
        add_padding: draw valid lengths of each prompt and response from [min_valid_..., width].
        pad_token_id: stands in the pads.

    Returns:
        `input_ids`, `position_ids` (counting valid tokens), `attention_mask` `[B, S]` int64, `responses` `[B, R]`,
        `response_length`.

    Raises:
        ValueError: a size is out of its range, or `device` is CUDA and there is none.
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f'[zorro] device must be there, got {device} without a CUDA device. Pass device="cpu".')
    if not 1 <= num_unique_prompts <= batch_size:
        raise ValueError(f"[zorro] num_unique_prompts must lie in [1, {batch_size}], got {num_unique_prompts}.")
    if prompt_len < 1 or response_len < 0 or vocab_size < 2:
        raise ValueError(
            "[zorro] prompt_len must be >= 1, response_len >= 0 and vocab_size >= 2, "
            f"got {prompt_len}, {response_len} and {vocab_size}."
        )

    def valid_length(least: int, width: int) -> int:
        return int(torch.randint(min(least, width), width + 1, ())) if add_padding else width

    def draw(length: int) -> torch.Tensor:
        return torch.randint(1, vocab_size, (length,), device=device)

    def pads(length: int) -> torch.Tensor:
        return torch.full((length,), pad_token_id, dtype=torch.long, device=device)

    prompts = [draw(valid_length(min_valid_prompt_len, prompt_len)) for _ in range(num_unique_prompts)]
    each = batch_size // num_unique_prompts
    owners = [prompt for prompt in range(num_unique_prompts) for _ in range(each)]
    owners += range(batch_size - len(owners))
    rows, masks = [], []
    for owner in owners:
        prompt, response = prompts[owner], draw(valid_length(min_valid_response_len, response_len))
        left, right = prompt_len - len(prompt), response_len - len(response)
        rows.append(torch.cat([pads(left), prompt, response, pads(right)]))
        mask = torch.ones(prompt_len + response_len, dtype=torch.long, device=device)
        mask[:left] = 0
        mask[prompt_len + response_len - right :] = 0
        masks.append(mask)
    input_ids, attention_mask = torch.stack(rows), torch.stack(masks)
    batch = {
        "input_ids": input_ids,
        "position_ids": (attention_mask.cumsum(1) - 1).clamp_min(0),
        "responses": input_ids[:, prompt_len:],
        "attention_mask": attention_mask,
        "response_length": response_len,
    }
    if include_training_fields:
        shape = (batch_size, response_len)
        batch["old_log_probs"] = torch.randn(shape, device=device) * 0.5 - 2
        batch["advantages"] = torch.randn(shape, device=device)
        batch["ref_log_prob"] = batch["old_log_probs"] + 0.1 * torch.randn(shape, device=device)
    return batch


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all gradients by parameter name; a parameter without one is left out."""
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def gradient_errors(
    dedup_grads: Mapping[str, torch.Tensor], baseline_grads: Mapping[str, torch.Tensor]
) -> dict[str, tuple[float, float]]:
    """For every parameter the norms of the difference and of the baseline gradient.

    Raises AssertionError naming a parameter that one side lacks, or whose gradient is not finite.
    """
    for name in sorted(dedup_grads.keys() ^ baseline_grads.keys()):
        side = "baseline" if name in dedup_grads else "deduplicated side"
        raise AssertionError(f"[zorro] {name} has no gradient on the {side}.")
    errors = {}
    for name, baseline in baseline_grads.items():
        dedup, truth = dedup_grads[name].double(), baseline.double()
        error = (dedup - truth).norm().item()
        if not error < float("inf"):
            raise AssertionError(f"[zorro] the gradient of {name} must be finite, got {error} as its error.")
        errors[name] = (error, truth.norm().item())
    return errors


def compare_gradients(
    dedup_grads: Mapping[str, torch.Tensor] | nn.Module,
    baseline_grads: Mapping[str, torch.Tensor] | nn.Module,
    atol: float = 1e-5,
    rtol: float = 1e-4,
) -> float:
    """The worst relative error over all parameters: the norm of the difference over the norm of the baseline.

    Args:
        dedup_grads, baseline_grads: name -> gradient, or modules with gradients.
        atol, rtol: a parameter is wrong when its error exceeds atol + rtol times the baseline's norm.

    Raises:
        AssertionError: naming the worst such parameter, or one that only one side has.
    """
    sides = [gradients(side) if isinstance(side, nn.Module) else side for side in (dedup_grads, baseline_grads)]
    errors = gradient_errors(*sides)
    over = {name: error - atol - rtol * norm for name, (error, norm) in errors.items()}
    worst = max(over, key=over.__getitem__, default=None)
    if worst is not None and over[worst] > 0:
        error, norm = errors[worst]
        raise AssertionError(
            f"[zorro] the gradient of {worst} must agree within {atol:g} + {rtol:g} * {norm:.3g}, "
            f"got an error of {error:.3g}."
        )
    return max((error / norm if norm > 0 else error for error, norm in errors.values()), default=0.0)


def baseline_scores(model: nn.Module, batch: Batch, temperature: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of the unpatched model, each row's valid tokens alone. `[M]`, row after row."""
    mask = batch["attention_mask"].bool()
    boundary = mask.size(1) - response_width(batch)
    logprobs, entropies = [], []
    for row, valid in enumerate(mask):
        ids = batch["input_ids"][row][valid].unsqueeze(0)
        prompt = int(valid[:boundary].sum())
        logits = model(input_ids=ids).logits[0, prompt - 1 : ids.size(1) - 1]
        logp = (logits if logits.dtype == torch.float64 else logits.float()).div(temperature).log_softmax(-1)
        logprobs.append(logp.gather(1, ids[0, prompt:].unsqueeze(1)).squeeze(1))
        entropies.append(-(logp.exp() * logp).sum(1))
    return torch.cat(logprobs), torch.cat(entropies)


def _policy_loss(logprobs: torch.Tensor, batch: Batch) -> torch.Tensor:
    valid = batch["attention_mask"][:, -response_width(batch) :].bool()
    fields = [batch[name][valid] for name in ("old_log_probs", "advantages", "ref_log_prob")]
    return packed_ppo_policy_loss(logprobs, *fields)[0]


def test_gradient_correctness(
    actor: DeduplicatedActor,
    batch_size: int = 8,
    num_unique_prompts: int = 2,
    prompt_len: int = 32,
    response_len: int = 16,
    device: str = "cuda",
    temperature: float = 1.0,
) -> bool:
    """Compares an actor with its own unpatched model, row by row, on one PPO step; prints a report.

    The actor must be fresh: its model not patched yet. Limits are 1e-5 for log-probabilities and entropies and 1e-4
    for the gradient of every parameter (relative), in bfloat16 two units of its rounding.

    Returns:
        Whether everything agreed.
    """
    print(LINE, "Exactness: deduplicated against the unpatched model, row by row", LINE, sep="\n")
    batch = create_dummy_batch(
        batch_size,
        num_unique_prompts,
        prompt_len,
        response_len,
        vocab_size=actor.model.config.vocab_size,
        device=device,
        include_training_fields=True,
        add_padding=True,
    )
    actor.eval()
    with torch.no_grad():
        logprobs, entropies = baseline_scores(actor.model, batch, temperature)
    # Near the policy, so that the clip leaves gradients to compare.
    valid = batch["attention_mask"][:, -response_len:].bool()
    for name in ("old_log_probs", "ref_log_prob"):
        batch[name] = batch[name].to(logprobs.dtype)
        batch[name][valid] = logprobs + 0.05 * torch.randn_like(logprobs)

    actor.model.zero_grad()
    _policy_loss(baseline_scores(actor.model, batch, temperature)[0], batch).backward()
    baseline = gradients(actor.model)
    actor.model.zero_grad()
    scores = actor.forward(batch, temperature, calculate_entropy=True)
    actor.compute_policy_loss_and_backward(batch, temperature)
    errors = gradient_errors(gradients(actor.model), baseline)
    actor.model.zero_grad()

    unit = 2.0**-7 if actor.model.dtype == torch.bfloat16 else 0.0
    value_limit, gradient_limit = max(1e-5, 2 * unit), max(1e-4, 8 * unit)
    relative = {name: error / max(norm, 1e-30) for name, (error, norm) in errors.items()}
    worst = max(relative, key=relative.__getitem__)

    def value_error(ours: torch.Tensor | None, theirs: torch.Tensor) -> float:
        assert ours is not None
        return float(((ours - theirs).abs() / theirs.abs().clamp_min(1)).max().detach())

    rows = [
        ("log-probability", value_error(scores.logprobs, logprobs), value_limit, f"{logprobs.numel()} tokens"),
        ("entropy", value_error(scores.entropy, entropies), value_limit, ""),
        (f"gradient of {len(relative)} parameters", relative[worst], gradient_limit, f"worst: {worst}"),
    ]
    good = True
    for what, error, limit, remark in rows:
        good = good and error <= limit
        print(f"{what:28} error {error:9.2e}   limit {limit:.0e}   {'ok' if error <= limit else 'WRONG'}   {remark}")
    return good


test_gradient_correctness.__test__ = False  # type: ignore[attr-defined]


@dataclass
class Timing:
    """Seconds of one pass, and the bytes that autograd kept between forward and backward."""

    forward: float
    backward: float
    saved_bytes: int = 0

    @property
    def total(self) -> float:
        """Forward and backward."""
        return self.forward + self.backward


@contextmanager
def _saved_bytes(model: nn.Module) -> Iterator[Callable[[], int]]:
    """Counts the distinct memory that autograd keeps, the weights left out."""
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(kept.values())


def _synchronise(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def time_pass(model: nn.Module, score: Callable[[], torch.Tensor], device: str, forward_only: bool = False) -> Timing:
    """One forward and backward of the mean log-probability; gradients are dropped afterwards."""
    _synchronise(device)
    start = time.perf_counter()
    if forward_only:
        with torch.no_grad():
            score()
        _synchronise(device)
        return Timing(time.perf_counter() - start, 0.0)
    logprobs = score()
    _synchronise(device)
    middle = time.perf_counter()
    logprobs.mean().backward()
    _synchronise(device)
    end = time.perf_counter()
    model.zero_grad(set_to_none=True)
    return Timing(middle - start, end - middle)


def unpatched_scores(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The batch through the plain model at once, as a trainer without ZoRRo does it: whole logits of all positions."""
    width = response_width(batch)
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    logp = logits[:, -width - 1 : -1].log_softmax(-1)
    chosen = logp.gather(-1, batch["input_ids"][:, -width:].unsqueeze(-1)).squeeze(-1)
    return chosen[batch["attention_mask"][:, -width:].bool()]


def benchmark_performance(
    actor: DeduplicatedActor,
    batch_size: int = 16,
    num_unique_prompts: int = 2,
    prompt_len: int = 512,
    response_len: int = 64,
    device: str = "cuda",
    repeats: int = 3,
    baseline: str = "replicated",
    forward_only: bool = False,
) -> dict[str, Any]:
    """Times both arms in turn in this process and prints the speed-up against its bound.

    Args:
        actor: its model is patched for the measurement and plain afterwards.
        batch_size, num_unique_prompts, prompt_len, response_len: the batch, without pads.
        device: of the batch.
        repeats: timed pairs, after one that warms up.
        baseline: "replicated" runs the naive batch on the same kernels and head; "unpatched" runs the plain model.
        forward_only: time no backward pass.

    Returns:
        The medians, `speedup`, `rho`, `bound` (S) and `achieved_over_bound`, bytes kept for backward by both arms.
    """
    if baseline not in ("replicated", "unpatched"):
        raise ValueError(f"[zorro] baseline must be replicated or unpatched, got {baseline!r}.")
    model = actor.model
    batch = create_dummy_batch(
        batch_size, num_unique_prompts, prompt_len, response_len, model.config.vocab_size, device=device
    )
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}
    rho, bound = actor.speedup_bound(batch)
    patchers = {share: actor._patcher(response_len, 1.0, share) for share in (True, False)}

    def dedup() -> torch.Tensor:
        patchers[True].patch_forward()
        logprobs: torch.Tensor = model(**inputs, use_cache=False).logprobs
        return logprobs

    def naive() -> torch.Tensor:
        if baseline == "unpatched":
            patchers[True].unpatch()
            return unpatched_scores(model, batch)
        patchers[False].patch_forward()
        logprobs: torch.Tensor = model(**inputs, use_cache=False).logprobs
        return logprobs

    arms = {"dedup": dedup, "baseline": naive}
    saved = {}
    for name, score in arms.items():  # warms up
        with _saved_bytes(model) as count:
            time_pass(model, score, device, forward_only)
            saved[name] = count()
    times: dict[str, list[Timing]] = {name: [] for name in arms}
    for _ in range(repeats):
        for name, score in arms.items():
            times[name].append(time_pass(model, score, device, forward_only))
    patchers[True].unpatch()

    def middle(name: str, part: str) -> float:
        return float(statistics.median(getattr(timing, part) for timing in times[name]))

    ratios = [naive.total / dedup.total for dedup, naive in zip(times["dedup"], times["baseline"], strict=True)]
    speedup = statistics.median(ratios)
    passes = ["forward"] if forward_only else ["forward", "backward"]
    for part in passes:
        ours, theirs = middle("dedup", part), middle("baseline", part)
        label = f"{part.capitalize()} pass:"
        print(f"{label:15} {ours:.2f}s (deduplicated) vs {theirs:.2f}s (baseline) → {theirs / ours:.2f}x speedup")
    print(f"Overall:        {speedup:.2f}x speedup ({min(ratios):.2f} to {max(ratios):.2f} over {repeats} pairs)")
    print(f"Bound:          S {bound:.2f}, achieved/S {speedup / bound:.3f}, token ratio rho {rho:.2f}")
    if not forward_only:
        ours_mb, theirs_mb = saved["dedup"] / 2**20, saved["baseline"] / 2**20
        kept = f"{ours_mb:.0f} MiB kept for backward vs {theirs_mb:.0f} MiB"
        print(f"Memory:         {kept} → {theirs_mb / ours_mb:.2f}x less")
    return {
        "speedup": speedup,
        "rho": rho,
        "bound": bound,
        "achieved_over_bound": speedup / bound,
        "pairs": ratios,
        "saved_bytes": saved,
        **{f"{name}_{part}_s": middle(name, part) for name in arms for part in passes},
    }
