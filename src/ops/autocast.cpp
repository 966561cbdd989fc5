#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <tuple>

// Under torch.autocast the ops take their arguments in the autocast dtype, as
// scaled_dot_product_attention and linear do; float64 stays float64.
namespace zorro {
namespace {

using Attention = std::tuple<at::Tensor, at::Tensor>;
using Head = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

template <at::DeviceType device>
at::Tensor cast(const at::Tensor& tensor) {
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), tensor, device);
}

template <at::DeviceType device, c10::DispatchKey key>
Attention attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const at::Tensor& visible_until, const at::Tensor& nodes, double scale,
                    int64_t q_begin, c10::string_view path) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("zorro::forest_attention", "")
          .typed<Attention(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                           const at::Tensor&, const at::Tensor&, double, int64_t,
                           c10::string_view)>();
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(key);
  return op.call(cast<device>(q), cast<device>(k), cast<device>(v), visible_until, nodes, scale,
                 q_begin, path);
}

template <at::DeviceType device, c10::DispatchKey key>
Head head(const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& row,
          const at::Tensor& label, const at::Tensor& temperature, c10::string_view mode,
          int64_t budget_bytes) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("zorro::linear_logprob", "")
          .typed<Head(const at::Tensor&, const at::Tensor&, const at::Tensor&, const at::Tensor&,
                      const at::Tensor&, c10::string_view, int64_t)>();
  const c10::impl::ExcludeDispatchKeyGuard without_autocast(key);
  return op.call(cast<device>(hidden), cast<device>(weight), row, label, temperature, mode,
                 budget_bytes);
}

template <at::DeviceType device, c10::DispatchKey key>
void register_casts(torch::Library& m) {
  m.impl("forest_attention", attention<device, key>);
  m.impl("linear_logprob", head<device, key>);
}

}  // namespace

TORCH_LIBRARY_IMPL(zorro, AutocastCPU, m) {
  register_casts<at::kCPU, c10::DispatchKey::AutocastCPU>(m);
}

TORCH_LIBRARY_IMPL(zorro, AutocastCUDA, m) {
  register_casts<at::kCUDA, c10::DispatchKey::AutocastCUDA>(m);
}

}  // namespace zorro
