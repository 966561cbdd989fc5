"""ZoRRo: policy updates without redundant prompts, on live `transformers` models.

`ZoRRoTrain` rearranges batches by shared prompts, `Qwen3ModelOncePatcher` makes a model compute each prompt once,
forward and backward. Needs PyTorch and transformers; no GPU.
"""

from arctic_platform.rl.zorro_train import _native as _native
from arctic_platform.rl.zorro_train.qwen_model_patcher import Qwen3ModelOncePatcher
from arctic_platform.rl.zorro_train.zorro_train import ReconstructionInfo, ZoRRoTrain

__all__ = ["Qwen3ModelOncePatcher", "ReconstructionInfo", "ZoRRoTrain"]
__version__: str = _native.ops.version()
