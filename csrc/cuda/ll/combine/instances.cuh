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

}  // namespace
}  // namespace ep
