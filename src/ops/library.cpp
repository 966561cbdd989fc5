#include <torch/library.h>

// The namespace torch.ops.zorro. Schemas of other families join it as fragments beside their
// kernels.
TORCH_LIBRARY(zorro, m) {
  m.def(
      "forest_attention(Tensor q, Tensor k, Tensor v, Tensor visible_until, Tensor nodes, "
      "float scale, int q_begin, str path) -> (Tensor out, Tensor lse)");
  m.def(
      "forest_attention_backward(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, "
      "Tensor lse, Tensor visible_until, Tensor nodes, float scale, int q_begin, str path) "
      "-> (Tensor dq, Tensor dk, Tensor dv)");
}
