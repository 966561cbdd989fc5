"""Times forward and backward of a deduplicated batch against the naive batch, in one process.

Run from the repository root: python arctic_platform/rl/zorro_train/test_perf.py
The defaults take under two minutes on two cores. On a GPU try --batch-size 32 --prompt-len 8192 --response-len 1024.
"""

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

if not __package__:  # run by path: import from the root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[3])


def main() -> int:
    """The benchmark; 0, or 2 when an argument is wrong."""
    from transformers.utils import logging

    from arctic_platform.rl.zorro_train import _script

    logging.disable_progress_bar()
    options = _script.parser("Speed-up of forward and backward by computing shared prompts once.")
    options.add_argument("--batch-size", type=int, default=16, help="rollouts, 16 to 32 in practice")
    options.add_argument("--num-unique-prompts", type=int, default=2, help="1 to 4")
    options.add_argument("--prompt-len", type=int, default=512, help="tokens; 4096 to 8192 on a GPU")
    options.add_argument("--response-len", type=int, default=64, help="tokens; 512 to 1024 on a GPU")
    options.add_argument("--repeats", type=int, default=3, help="timed pairs after the warm-up")
    options.add_argument(
        "--baseline",
        default="replicated",
        choices=["replicated", "unpatched"],
        help="the naive batch on the same kernels and head, or the plain transformers model",
    )
    options.add_argument("--forward-only", action="store_true", help="time no backward pass")
    options.add_argument("--json", action="store_true", help="one JSON object on stdout, everything else on stderr")
    arguments = options.parse_args()
    out = sys.stdout
    with contextlib.ExitStack() as stack:
        if arguments.json:
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        try:
            figures = run(arguments)
        except (ValueError, RuntimeError, OSError) as error:
            print(f"test_perf: {error}", file=sys.stderr)
            return 2
    if arguments.json:
        print(json.dumps(figures, indent=1), file=out)
    return 0


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Loads the model, prints the report and returns its figures."""
    import torch

    from arctic_platform.rl.zorro_train import _script, tests

    torch.manual_seed(arguments.seed)
    actor = _script.load_actor(arguments, max_token_len=1 << 20)
    print(
        f"{arguments.batch_size} rollouts of {arguments.num_unique_prompts} prompts, "
        f"{arguments.prompt_len} + {arguments.response_len} tokens, baseline {arguments.baseline}"
    )
    return tests.benchmark_performance(
        actor,
        arguments.batch_size,
        arguments.num_unique_prompts,
        arguments.prompt_len,
        arguments.response_len,
        device=arguments.device,
        repeats=arguments.repeats,
        baseline=arguments.baseline,
        forward_only=arguments.forward_only,
    )


if __name__ == "__main__":
    sys.exit(main())
