"""Make the example model and its rollouts: tasks, tokenizer, training, sampling, files.

`python make_examples.py --work-dir DIR` trains (or takes the model that an earlier call left in
DIR), samples and writes the files beside this script; `--check` scores the files again. It is run
by hand only: no build step, demo or test calls it. README.md says what came of it.
"""

import argparse
import dataclasses
import json
from pathlib import Path

import torch
from small_model import (
    END,
    PAD,
    TrainOptions,
    encode,
    model_config,
    text_pool,
    train,
    train_tokenizer,
    wrap_tokenizer,
)
from transformers import Qwen3ForCausalLM

HERE = Path(__file__).resolve().parent


def make_model(args: argparse.Namespace) -> None:
    """Train tokenizer, model and reference into `args.work_dir`; keep what is there already."""
    report_path = args.work_dir / "report.json"
    if report_path.exists():
        return
    texts = text_pool(args.seed, args.pool)
    tokenizer = train_tokenizer(texts, args.vocab_size)
    pool = {
        name: [encode(tokenizer, prompt, solution) for prompt, solution in pairs]
        for name, pairs in texts.items()
    }
    config = model_config(
        tokenizer.get_vocab_size(), tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    )
    options = TrainOptions(steps=args.steps, max_minutes=args.max_minutes, seed=args.seed)
    model, reference, report = train(config, pool, options)
    for name, trained in (("model", model), ("reference", reference)):
        trained.to(torch.bfloat16).save_pretrained(args.work_dir / name)
        wrap_tokenizer(tokenizer).save_pretrained(args.work_dir / name)
    report_path.write_text(json.dumps(dataclasses.asdict(report), indent=2) + "\n")


def load_model(folder: Path) -> Qwen3ForCausalLM:
    """The model of a folder, its bfloat16 weights widened to float32."""
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def main() -> None:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work-dir", type=Path, help="folder for the trained models")
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--pool", type=int, default=3000, help="training texts a task")
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=2000, help="training steps")
    parser.add_argument("--max-minutes", type=float, default=14.5, help="training time, at most")
    args = parser.parse_args()
    torch.set_num_threads(2)
    make_model(args)


if __name__ == "__main__":
    main()
