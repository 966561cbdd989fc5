#include "zorro/ops/forest_short_conv.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <tuple>
#include <vector>

#include "ops/checks.h"

namespace zorro {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr const char* kOp = "forest_short_conv";
using ForwardSignature = at::Tensor(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                    int64_t);
using Backward = std::tuple<at::Tensor, at::Tensor>;
using BackwardSignature = Backward(const at::Tensor&, const at::Tensor&, const at::Tensor&,
                                   const at::Tensor&, int64_t);

void check(const at::Tensor& u, const at::Tensor& weight, const at::Tensor& previous) {
  check_dims(kOp, "u", u, 2, "[T, C]");
  check_dims(kOp, "weight", weight, 2, "[C, K]");
  check_dims(kOp, "previous", previous, 1, "[T]");
  check_float_dtype(kOp, "u", u);
  check_same_dtype(kOp, "weight", weight, u);
  check_same_device(kOp, "weight", weight, u);
  check_int64(kOp, "previous", previous);
  check_size(kOp, "weight", weight, 0, u.sym_size(1));
  check_size(kOp, "previous", previous, 0, u.sym_size(0));
  ZORRO_CHECK(weight.sym_size(1) >= 1, "[", kOp, "] weight must have at least one tap, got shape ",
              weight.sym_sizes(), ".");
}

/// [K, T] the token of each tap, newest first; -1 past the begin of the path. On u's device.
at::Tensor taps_of(const at::Tensor& previous, int64_t count, int64_t q_begin) {
  const at::Tensor host = previous.cpu().contiguous();
  const auto* before = host.const_data_ptr<int64_t>();
  const int64_t tokens = host.size(0) - q_begin;
  at::Tensor taps = at::empty({count, tokens}, at::kLong);
  auto* tap = taps.mutable_data_ptr<int64_t>();
  for (int64_t t = 0; t < tokens; ++t) {
    int64_t token = t + q_begin;
    for (int64_t j = 0; j < count; ++j) {
      tap[j * tokens + t] = token;
      if (token < 0) continue;
      ZORRO_CHECK(before[token] < token, "[", kOp, "] previous[", token, "] must be below ", token,
                  ", got ", before[token], ".");
      token = before[token];
    }
  }
  return taps;
}

/// weight [C, K] -> [K, C], newest tap first, in the accumulation type.
at::Tensor newest_first(const at::Tensor& weight, at::ScalarType dtype) {
  return weight.to(dtype).t().flip({0}).contiguous();
}

// Threads own channels, so that every sum has one owner and runs over tokens in packed order.
constexpr int64_t kChannels = 64;

template <typename T>
void forward_channels(const T* u, const T* weight, const int64_t* taps, T* y, int64_t tokens,
                      int64_t channels, int64_t count, int64_t begin, int64_t end) {
  for (int64_t t = 0; t < tokens; ++t) {
    T* __restrict row = y + t * channels;
    std::fill(row + begin, row + end, T{0});
    for (int64_t j = 0; j < count; ++j) {
      const int64_t tap = taps[j * tokens + t];
      if (tap < 0) break;
      const T* __restrict from = u + tap * channels;
      const T* __restrict w = weight + j * channels;
      for (int64_t c = begin; c < end; ++c) row[c] += w[c] * from[c];
    }
  }
}

template <typename T>
void backward_channels(const T* d_y, const T* u, const T* weight, const int64_t* taps, T* d_u,
                       T* d_weight, int64_t tokens, int64_t channels, int64_t count, int64_t begin,
                       int64_t end) {
  for (int64_t t = 0; t < tokens; ++t) {
    const T* __restrict row = d_y + t * channels;
    for (int64_t j = 0; j < count; ++j) {
      const int64_t tap = taps[j * tokens + t];
      if (tap < 0) break;
      const T* __restrict from = u + tap * channels;
      const T* __restrict w = weight + j * channels;
      T* __restrict to = d_u + tap * channels;
      T* __restrict sum = d_weight + j * channels;
      for (int64_t c = begin; c < end; ++c) {
        to[c] += w[c] * row[c];
        sum[c] += from[c] * row[c];
      }
    }
  }
}

template <typename Body>
void over_channels(int64_t channels, const Body& body) {
  const int64_t blocks = (channels + kChannels - 1) / kChannels;
  at::parallel_for(0, blocks, 1, [&](int64_t first, int64_t last) {
    body(first * kChannels, std::min(last * kChannels, channels));
  });
}

/// The rows that a tap reads, zero past the begin of a path.
at::Tensor tap_rows(const at::Tensor& u, const at::Tensor& tap) {
  return at::where(tap.lt(0).unsqueeze(1), 0, u.index_select(0, tap.clamp_min(0)));
}

at::Tensor forward(const at::Tensor& u, const at::Tensor& weight, const at::Tensor& previous,
                   int64_t q_begin) {
  check(u, weight, previous);
  const int64_t channels = u.size(1), count = weight.size(1), tokens = u.size(0) - q_begin;
  const at::ScalarType dtype = accumulate_dtype(u.scalar_type());
  const at::Tensor x = u.to(dtype).contiguous(), w = newest_first(weight, dtype);
  const at::Tensor taps = taps_of(previous, count, q_begin);
  at::Tensor y = at::empty({tokens, channels}, x.options());
  if (x.is_cpu()) {
    AT_DISPATCH_FLOATING_TYPES(dtype, kOp, [&] {
      over_channels(channels, [&](int64_t begin, int64_t end) {
        forward_channels(x.const_data_ptr<scalar_t>(), w.const_data_ptr<scalar_t>(),
                         taps.const_data_ptr<int64_t>(), y.mutable_data_ptr<scalar_t>(), tokens,
                         channels, count, begin, end);
      });
    });
  } else {
    y.zero_();
    const at::Tensor there = taps.to(u.device());
    for (int64_t j = 0; j < count; ++j)
      y.add_(tap_rows(x, there.select(0, j)).mul_(w.select(0, j)));
  }
  return y.to(u.scalar_type());
}

Backward backward(const at::Tensor& d_out, const at::Tensor& u, const at::Tensor& weight,
                  const at::Tensor& previous, int64_t q_begin) {
  const int64_t channels = u.size(1), count = weight.size(1), tokens = u.size(0) - q_begin;
  const at::ScalarType dtype = accumulate_dtype(u.scalar_type());
  const at::Tensor x = u.to(dtype).contiguous(), w = newest_first(weight, dtype);
  const at::Tensor d_y = d_out.to(dtype).contiguous();
  const at::Tensor taps = taps_of(previous, count, q_begin);
  at::Tensor d_u = at::zeros(x.sizes(), x.options()), d_w = at::zeros(w.sizes(), w.options());
  if (x.is_cpu()) {
    AT_DISPATCH_FLOATING_TYPES(dtype, kOp, [&] {
      over_channels(channels, [&](int64_t begin, int64_t end) {
        backward_channels(d_y.const_data_ptr<scalar_t>(), x.const_data_ptr<scalar_t>(),
                          w.const_data_ptr<scalar_t>(), taps.const_data_ptr<int64_t>(),
                          d_u.mutable_data_ptr<scalar_t>(), d_w.mutable_data_ptr<scalar_t>(),
                          tokens, channels, count, begin, end);
      });
    });
  } else {
    const at::Tensor there = taps.to(u.device());
    for (int64_t j = 0; j < count; ++j) {
      const at::Tensor tap = there.select(0, j);
      d_w.select(0, j).copy_(tap_rows(x, tap).mul_(d_y).sum(0));
      const at::Tensor owed = at::where(tap.lt(0).unsqueeze(1), 0, d_y.mul(w.select(0, j)));
      d_u.index_add_(0, tap.clamp_min(0), owed);
    }
  }
  return {d_u.to(u.scalar_type()), d_w.flip({0}).t().to(weight.scalar_type()).contiguous()};
}

at::Tensor forward_meta(const at::Tensor& u, const at::Tensor& weight, const at::Tensor& previous,
                        int64_t q_begin) {
  check(u, weight, previous);
  return at::empty_symint({u.sym_size(0) - q_begin, u.sym_size(1)}, u.options());
}

Backward backward_meta(const at::Tensor&, const at::Tensor& u, const at::Tensor& weight,
                       const at::Tensor&, int64_t) {
  return {at::empty_like(u), at::empty_like(weight)};
}

struct ShortConv : torch::autograd::Function<ShortConv> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& u, const at::Tensor& weight,
                            const at::Tensor& previous, int64_t q_begin) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("zorro::forest_short_conv", "")
                               .typed<ForwardSignature>();
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    context->save_for_backward({u, weight, previous});
    context->saved_data["q_begin"] = q_begin;
    return op.call(u, weight, previous, q_begin);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("zorro::forest_short_conv_backward", "")
                               .typed<BackwardSignature>();
    const variable_list saved = context->get_saved_variables();
    auto [d_u, d_weight] =
        op.call(grads[0], saved[0], saved[1], saved[2], context->saved_data["q_begin"].toInt());
    return {d_u, d_weight, {}, {}};
  }
};

at::Tensor differentiable(const at::Tensor& u, const at::Tensor& weight, const at::Tensor& previous,
                          int64_t q_begin) {
  return ShortConv::apply(u, weight, previous, q_begin);
}

}  // namespace

at::Tensor forest_short_conv(const at::Tensor& u, const at::Tensor& weight,
                             const at::Tensor& previous, int64_t q_begin) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("zorro::forest_short_conv", "")
                             .typed<ForwardSignature>();
  return op.call(u, weight, previous, q_begin);
}

TORCH_LIBRARY_FRAGMENT(zorro, m) {
  m.def("forest_short_conv(Tensor u, Tensor weight, Tensor previous, int q_begin) -> Tensor");
  m.def(
      "forest_short_conv_backward(Tensor d_out, Tensor u, Tensor weight, Tensor previous, "
      "int q_begin) -> (Tensor d_u, Tensor d_weight)");
}

TORCH_LIBRARY_IMPL(zorro, CompositeExplicitAutograd, m) {
  m.impl("forest_short_conv", forward);
  m.impl("forest_short_conv_backward", backward);
}

TORCH_LIBRARY_IMPL(zorro, Meta, m) {
  m.impl("forest_short_conv", forward_meta);
  m.impl("forest_short_conv_backward", backward_meta);
}

TORCH_LIBRARY_IMPL(zorro, Autograd, m) {
  m.impl("forest_short_conv", differentiable);
  m.impl("forest_short_conv_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace zorro
