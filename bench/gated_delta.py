"""forest_gated_delta against transformers' pure-torch chunked rule with autograd, forward and backward, in one run.

Both see the same tokens of sequences of equal length, nothing shared. Prints one JSON object.

Usage: python bench/gated_delta.py [--sequences 8] [--tokens 512] [--heads 8] [--dim 64] [--repeats 5]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def seconds(run: Callable[[], torch.Tensor], inputs: list[torch.Tensor]) -> tuple[float, list[torch.Tensor]]:
    """One forward and backward of the mean square."""
    start = time.perf_counter()
    gradients = torch.autograd.grad(run().square().mean(), inputs)
    return time.perf_counter() - start, list(gradients)


def main() -> int:
    """Times both in turn and compares their gradients."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

    from arctic_platform.rl.zorro_train._native import ops

    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--sequences", type=int, default=8)
    options.add_argument("--tokens", type=int, default=512)
    options.add_argument("--heads", type=int, default=8)
    options.add_argument("--dim", type=int, default=64)
    options.add_argument("--repeats", type=int, default=5)
    sizes = options.parse_args()
    torch.manual_seed(0)
    shape = (sizes.sequences, sizes.tokens, sizes.heads)
    q, k, v = torch.randn(3, *shape, sizes.dim)
    inputs = [q, k, v, -torch.rand(shape), torch.rand(shape)]
    inputs = [x.requires_grad_() for x in inputs]
    _, nodes, _ = ops.replicated_structure(torch.full((sizes.sequences,), sizes.tokens))

    def ours() -> torch.Tensor:
        out: torch.Tensor = ops.normalized_gated_delta(*(x.flatten(0, 1) for x in inputs), nodes)[0]
        return out

    def theirs() -> torch.Tensor:
        out: torch.Tensor = torch_chunk_gated_delta_rule(
            *inputs[:3], g=inputs[3], beta=inputs[4], use_qk_l2norm_in_kernel=True
        )[0]
        return out

    times: dict[str, list[float]] = {"ours": [], "theirs": []}
    errors = []
    for repeat in range(sizes.repeats + 1):
        our_time, our_gradients = seconds(ours, inputs)
        their_time, their_gradients = seconds(theirs, inputs)
        errors = [((a - b).norm() / b.norm()).item() for a, b in zip(our_gradients, their_gradients, strict=True)]
        if repeat > 0:  # the first warms up
            times["ours"].append(our_time)
            times["theirs"].append(their_time)
    ratios = [b / a for a, b in zip(times["ours"], times["theirs"], strict=True)]
    figures = {
        **vars(sizes),
        "threads": torch.get_num_threads(),
        "zorro_s": statistics.median(times["ours"]),
        "transformers_s": statistics.median(times["theirs"]),
        "speedup": statistics.median(ratios),
        "slowest": min(ratios),
        "fastest": max(ratios),
        "worst_gradient_error": max(errors),
    }
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
