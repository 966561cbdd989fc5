"""Shows on one model that deduplicated log-probabilities and gradients are exact, then how much time they save.

Run from the repository root: python arctic_platform/rl/zorro_train/demo.py
"""

import sys
from pathlib import Path

if not __package__:  # run by path: import from the root, not from this folder
    sys.path[0] = str(Path(__file__).resolve().parents[3])


def main() -> int:
    """The two reports; 0 when everything agreed, 2 when an argument is wrong."""
    import torch
    from transformers.utils import logging

    from arctic_platform.rl.zorro_train import _script, tests

    logging.disable_progress_bar()
    options = _script.parser("Exactness of deduplicated training on one model, then its speed.")
    options.add_argument("--no-benchmark", action="store_true", help="only the exactness report")
    arguments = options.parse_args()
    try:
        torch.manual_seed(arguments.seed)
        actor = _script.load_actor(arguments, max_token_len=1 << 20)
        good = tests.test_gradient_correctness(
            actor, batch_size=8, num_unique_prompts=2, prompt_len=64, response_len=24, device=arguments.device
        )
        if not arguments.no_benchmark:
            print(tests.LINE, "Speed: 16 rollouts of 2 prompts, 512 + 64 tokens", tests.LINE, sep="\n")
            tests.benchmark_performance(actor, device=arguments.device)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    print("Everything agrees." if good else "Something is WRONG: see above.")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
