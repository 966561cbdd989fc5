"""A batch as a forest: what the operators need to know of its structure."""

from dataclasses import dataclass

import torch

from arctic_platform.rl.zorro_train._native import ops


@dataclass(frozen=True)
class Forest:
    """Integer tensors (int64) that describe B rows as T packed tokens, a shared prompt once.

    They lie on the device of the ids, `nodes`, `scored_offsets` and `lengths` on the CPU. M is the number of response
    tokens, row after row; N the number of valid tokens of the batch.
    """

    token_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [axes, T]
    previous: torch.Tensor  # [T] the token before it on its path, -1 at a root
    visible_until: torch.Tensor  # [T] one past the last token that may attend to it
    multiplicity: torch.Tensor  # [T] rows that run through it
    nodes: torch.Tensor  # [nodes, 5] begin, end, end of the subtree, parent, depth
    scored: torch.Tensor  # [M] packed index of each response token
    scored_offsets: torch.Tensor  # [B + 1]
    predictors: torch.Tensor  # [U] distinct packed tokens that predict one
    row: torch.Tensor  # [M] where in `predictors` each is predicted
    label: torch.Tensor  # [M] token id
    replicated: torch.Tensor  # [N] packed index of every valid token, row after row
    first_copy: torch.Tensor  # [T] where in `replicated` each packed token stands first
    cells: torch.Tensor  # [N] row * S + column
    lengths: torch.Tensor  # [B] valid tokens

    @classmethod
    def build(
        cls,
        input_ids: torch.Tensor,
        response_length: int,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        sharing: str = "prompts",
    ) -> "Forest":
        """The forest of a padded batch `[B, S]` whose last `response_length` columns are the responses.

        Raises ValueError naming the argument when a shape, a dtype or a mask value is wrong.
        """
        return cls(*ops.build_forest(input_ids, attention_mask, position_ids, response_length, sharing, 64))
