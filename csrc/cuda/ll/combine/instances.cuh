// The template arguments of low-latency combine, from its params.
#pragma once

#include <type_traits>

#include "base/check.h"
#include "cuda/device/kernel_set.cuh"
#include "cuda/device/with_types.h"
#include "runtime/ll/params.h"

namespace ep {

namespace ll {
namespace {

constexpr int kMaxThreads = 640;
constexpr int kMaxStreamThreads = 512;
constexpr int kScalarThreads = 256;

}  // namespace
}  // namespace ll

namespace {

// Whether rows of these types can be sent as their signals come.
template <class T>
constexpr bool kAwaitsSignals = (!kMasksRanks && T::in == T::wire && T::in == T::out);

// Calls body with the template instance for these parameters.
template <class Body>
void with_instance(const LlCombineParams& p, bool is_signalled, Body body) {
  with_types(p.dtype, p.options.wire_dtype, p.options.out_dtype, [&](auto types) {
    if constexpr (kAwaitsSignals<decltype(types)>) {
      if (is_signalled) return body(types, std::true_type{}, std::true_type{}, std::true_type{});
    }
    EP_CHECK(!is_signalled, name_of(p.dtype), " rows for a ", name_of(p.options.wire_dtype),
             " wire: no kernel awaits signals");
    if (p.sends_unweighted) return body(types, std::true_type{}, std::true_type{}, std::false_type{});
    if (p.options.weighting == Weighting::kHome)
      return body(types, std::true_type{}, std::false_type{}, std::false_type{});
    return body(types, std::false_type{}, std::false_type{}, std::false_type{});
  });
}

// Calls body with every instance.
template <class Body>
void for_all_instances(Body body) {
  for_all_types([&](auto types) {
    body(types, std::false_type{}, std::false_type{}, std::false_type{});
    body(types, std::true_type{}, std::false_type{}, std::false_type{});
    body(types, std::true_type{}, std::true_type{}, std::false_type{});
    if constexpr (kAwaitsSignals<decltype(types)>) body(types, std::true_type{}, std::true_type{}, std::true_type{});
  });
}

// Whether there is a kernel that streams the rows (streamed_rows.cuh): a whole operation within a domain, of 16-bit
// rows that stay what they are, and without masks.
[[maybe_unused]] inline bool can_stream(const LlCombineParams& p) {
  return p.phase == Phase::kFused && p.domain_size == p.shape.num_ranks && !p.offsets.by_source &&
         (p.dtype == DType::kBF16 || p.dtype == DType::kF16) && p.options.wire_dtype == p.dtype &&
         p.options.out_dtype == p.dtype;
}

// Calls body with each of these kernels.
template <class Body>
void for_all_streamed(Body body) {
  const auto with_type = [&](auto type) {
    body(type, std::false_type{});
    body(type, std::true_type{});
  };
  with_type(std::integral_constant<DType, DType::kBF16>{});
  with_type(std::integral_constant<DType, DType::kF16>{});
}
template <class Body>
void with_streamed(const LlCombineParams& p, Body body) {
  EP_CHECK(can_stream(p), name_of(p.dtype), " rows: no kernel streams them");
  for_all_streamed([&](auto type, auto home) {
    if (type() == p.dtype && home() == (p.options.weighting == Weighting::kHome)) body(type, home);
  });
}

}  // namespace
}  // namespace ep
