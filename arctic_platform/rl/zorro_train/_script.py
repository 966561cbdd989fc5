"""What `demo.py` and `test_perf.py` share: their options and the model they fall back to."""

import argparse
import tempfile
from pathlib import Path

import torch

from arctic_platform.rl.zorro_train.actor import DeduplicatedActor

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "qwen3-small"
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
# The sizes of `zorro bench`'s default model.
RANDOM_MODEL = {
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}


def parser(description: str) -> argparse.ArgumentParser:
    """The options that both scripts have."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    default = str(EXAMPLE) if EXAMPLE.is_dir() else "random"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = "float32" if device == "cpu" else "bfloat16"
    options.add_argument("--model", default=default, help="folder, hub name, or 'random' for a seeded random Qwen3")
    options.add_argument("--device", default=device)
    options.add_argument("--dtype", default=dtype, choices=list(DTYPES))
    options.add_argument("--attention", default="flash_attention_2", help="eager: the plain definition; else fused")
    options.add_argument("--logits-optimization", default="memory", choices=["none", "compute", "memory"])
    options.add_argument("--seed", type=int, default=0)
    return options


def random_model(folder: Path, seed: int) -> str:
    """Saves a random Qwen3 with the sizes above; the same for the same seed."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    Qwen3ForCausalLM(Qwen3Config(**RANDOM_MODEL)).save_pretrained(folder)
    return str(folder)


def load_actor(arguments: argparse.Namespace, max_token_len: int) -> DeduplicatedActor:
    """The actor that the options ask for; says in one line what runs."""
    print(
        f"model {arguments.model}, {arguments.dtype} on {arguments.device}, {torch.get_num_threads()} threads, "
        f"attention {arguments.attention}, logits {arguments.logits_optimization}"
    )
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(Path(folder), arguments.seed) if arguments.model == "random" else arguments.model
        return DeduplicatedActor(
            model,
            device=arguments.device,
            logits_optimization=arguments.logits_optimization,
            attn_implementation=arguments.attention,
            max_token_len=max_token_len,
            dtype=DTYPES[arguments.dtype],
        )
