"""The actor, its loss, and what the scripts print."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from arctic_platform.rl.zorro_train import demo, test_perf
from arctic_platform.rl.zorro_train.actor import DeduplicatedActor, packed_ppo_policy_loss
from arctic_platform.rl.zorro_train.tests import (
    baseline_scores,
    compare_gradients,
    create_dummy_batch,
    gradients,
    test_gradient_correctness,
)

ROOT = Path(__file__).resolve().parents[2]
METRICS = {"pg_loss", "policy_loss", "pg_clipfrac", "ppo_kl", "kl_loss", "loss"}


@pytest.fixture
def make_actor(model_folder: Callable[[str], Path]) -> Callable[..., DeduplicatedActor]:
    """A float32 actor on the CPU."""

    def make(**settings: Any) -> DeduplicatedActor:
        settings = {"device": "cpu", "dtype": torch.float32, **settings}
        return DeduplicatedActor(str(model_folder("tiny-random-Qwen3")), **settings)

    return make


def training_batch(rows: int = 6) -> dict[str, Any]:
    torch.manual_seed(3)
    batch = create_dummy_batch(
        rows, 2, 9, 7, vocab_size=131, device="cpu", include_training_fields=True, add_padding=True
    )
    batch["old_log_probs"] -= 2
    return batch


def expected_step(actor: DeduplicatedActor, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    logprobs, _ = baseline_scores(actor.model, batch)
    valid = batch["attention_mask"][:, -7:].bool()
    fields = [batch[name][valid] for name in ("old_log_probs", "advantages", "ref_log_prob")]
    loss, _ = packed_ppo_policy_loss(logprobs, *fields)
    loss.backward()
    found = gradients(actor.model)
    actor.model.zero_grad()
    return loss.detach(), found


@pytest.mark.parametrize("cap", [4096, 30, 16])
@pytest.mark.parametrize("attention", ["eager", "flash_attention_2"])
def test_any_cap_gives_the_same_step(make_actor: Callable[..., Any], cap: int, attention: str) -> None:
    actor, batch = make_actor(max_token_len=cap, attn_implementation=attention), training_batch()
    with torch.no_grad():
        logprobs, entropies = baseline_scores(actor.model, batch, 0.7)
    loss, expected = expected_step(actor, batch)
    scores = actor.forward(batch, temperature=0.7, calculate_entropy=True)
    torch.testing.assert_close(scores.logprobs, logprobs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(scores.entropy, entropies, rtol=1e-5, atol=1e-5)
    metrics = actor.compute_policy_loss_and_backward(batch, 1.0, 1)
    assert metrics.keys() == {f"actor/{name}" for name in METRICS}
    assert metrics["actor/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert compare_gradients(actor.model, expected, atol=0, rtol=1e-4) < 1e-5
    assert actor.model.training
    # A second step adds; accumulation divides.
    actor.compute_policy_loss_and_backward(batch, gradient_accumulation=2)
    assert compare_gradients(gradients(actor.model), {n: 1.5 * g for n, g in expected.items()}, 0, 1e-4) < 1e-5


def test_fields_may_be_left_out(make_actor: Callable[..., Any]) -> None:
    actor, batch = make_actor(), training_batch()
    for name in ("ref_log_prob", "position_ids", "responses"):
        del batch[name]
    metrics = actor.compute_policy_loss_and_backward(batch)
    assert metrics.keys() == {f"actor/{name}" for name in METRICS - {"kl_loss"}}
    assert actor.forward(batch).entropy is None
    batch["attention_mask"][:, -7:] = 0  # no response token at all
    assert actor.compute_policy_loss_and_backward(batch)["actor/loss"] == 0
    assert actor.forward(batch).logprobs.shape == (0,)


def test_a_fresh_actor_is_not_patched(make_actor: Callable[..., Any]) -> None:
    actor = make_actor(attn_implementation="flash_attention_2")
    assert actor.model.config._attn_implementation == "sdpa"
    assert "forward" not in vars(actor.model)
    assert actor.model(torch.ones(1, 3, dtype=torch.long)).logits.shape == (1, 3, 131)
    assert not actor.model.training
    actor.train()
    assert actor.model.training
    actor.eval()
    assert not actor.model.training


def test_the_loss_is_ppo() -> None:
    """By hand: ratio 1.5 is clipped for a positive advantage and not for a negative one."""
    ratios = torch.tensor([1.5, 1.5, 0.5, 1.0])
    advantages = torch.tensor([1.0, -1.0, 1.0, 2.0])
    loss, metrics = packed_ppo_policy_loss(ratios.log(), torch.zeros(4), advantages, torch.full((4,), -1.0), 0.2, 0.1)
    surrogate = (-1.2 + 1.5 - 0.5 - 2.0) / 4
    kl = (ratios.log() + 1).mean().item()
    assert metrics["actor/pg_loss"] == pytest.approx(surrogate)
    assert metrics["actor/kl_loss"] == pytest.approx(kl)
    assert loss.item() == metrics["actor/policy_loss"] == pytest.approx(surrogate + 0.1 * kl)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(0.75)
    assert metrics["actor/ppo_kl"] == pytest.approx((ratios - 1 - ratios.log()).mean().item())
    log_prob = ratios.log().requires_grad_()
    packed_ppo_policy_loss(log_prob, torch.zeros(4), advantages)[0].backward()
    assert log_prob.grad is not None
    assert log_prob.grad.tolist() == pytest.approx([0.0, 1.5 / 4, -0.5 / 4, -2.0 / 4])  # clipped: no gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_report_agrees_and_can_fail(
    make_actor: Callable[..., Any], capsys: pytest.CaptureFixture[str], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    assert test_gradient_correctness(make_actor(dtype=dtype), device="cpu")
    assert capsys.readouterr().out.count(" ok ") == 3
    actor = make_actor(dtype=dtype)
    score = actor._score

    def shifted(part: Any, calculate_entropy: bool) -> Any:
        scores = score(part, calculate_entropy)
        scores.logprobs = scores.logprobs.roll(1)
        return scores

    actor._score = shifted
    assert not test_gradient_correctness(actor, device="cpu")
    assert "WRONG" in capsys.readouterr().out


def test_dummy_batches() -> None:
    torch.manual_seed(0)
    batch = create_dummy_batch(7, 3, 12, 6, vocab_size=50, device="cpu", add_padding=True, pad_token_id=49)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    assert ids.shape == mask.shape == batch["position_ids"].shape == (7, 18)
    assert batch["response_length"] == 6
    assert torch.equal(batch["responses"], ids[:, 12:])
    assert (ids[mask == 0] == 49).all()
    assert (ids[mask == 1] >= 1).all()
    prompts = [tuple(ids[row, :12][mask[row, :12].bool()].tolist()) for row in range(7)]
    assert [prompts.index(prompt) for prompt in prompts] == [0, 0, 2, 2, 4, 4, 0]  # neighbours, the rest round robin
    assert (mask[:, :12].diff(dim=1) >= 0).all()
    assert (mask[:, 12:].diff(dim=1) <= 0).all()
    assert (mask[:, :12].sum(1) >= 5).all()
    assert torch.equal(batch["position_ids"][mask == 1], torch.cat([torch.arange(n) for n in mask.sum(1).tolist()]))
    full = create_dummy_batch(device="cpu", include_training_fields=True)
    assert full["attention_mask"].all()
    assert all(full[name].shape == (8, 8) for name in ("old_log_probs", "advantages", "ref_log_prob"))


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = ROOT / "arctic_platform" / "rl" / "zorro_train" / name
    return subprocess.run(
        [sys.executable, str(path), *arguments], capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )


def test_demo_prints_its_reports(model_folder: Callable[[str], Path]) -> None:
    done = run_script(
        "demo.py", "--model", str(model_folder("tiny-random-Qwen3")), "--device", "cpu", "--dtype", "float64"
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for words in ("log-probability", "gradient of 36 parameters", "x speedup", "rho", "Everything agrees."):
        assert words in done.stdout


def test_perf_prints_the_lines_and_writes_json(model_folder: Callable[[str], Path]) -> None:
    done = run_script(
        "test_perf.py",
        *("--model", str(model_folder("tiny-random-Qwen3")), "--device", "cpu", "--dtype", "float32"),
        *("--batch-size", "6", "--num-unique-prompts", "2", "--prompt-len", "40", "--response-len", "8"),
        *("--baseline", "unpatched", "--repeats", "1", "--json"),
    )
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert [line.split(":")[0] for line in lines[2:]] == ["Forward pass", "Backward pass", "Overall", "Bound", "Memory"]
    assert "s (deduplicated) vs " in lines[2]
    assert lines[2].endswith("x speedup")
    figures = json.loads(done.stdout)
    assert figures["rho"] == pytest.approx(6 * 48 / (2 * 40 + 6 * 8))
    assert figures["achieved_over_bound"] == pytest.approx(figures["speedup"] / figures["bound"])
    assert 0 < figures["saved_bytes"]["dedup"] < figures["saved_bytes"]["baseline"]


@pytest.mark.parametrize("script", [demo, test_perf], ids=["demo", "test_perf"])
def test_scripts_say_what_is_wrong(
    script: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["script", "--help"])
    with pytest.raises(SystemExit) as stopped:
        script.main()
    assert stopped.value.code == 0
    assert "usage:" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["script", "--model", "./nothing", "--device", "cpu"])
    assert script.main() == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "model_name_or_path must hold a model, got ./nothing" in error
