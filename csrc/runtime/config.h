// One description of an operation. A line of a table is an option: struct, op schema, Python's packing and their checks
// follow from it. docs/adding_an_option.md has the other places.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "base/check.h"

namespace ep {

// FIELD(name, default). Of the routing that a handle stands for: equal in a dispatch and its combines.
#define EP_ROUTING_FIELDS(FIELD)         \
  FIELD(num_experts, 0)                  \
  FIELD(topk, 0)                         \
  FIELD(max_tokens, 0)                   \
  FIELD(layout, 0)    /* OutputLayout */ \
  FIELD(alignment, 1) /* packed: of first rows */
#define EP_DISPATCH_FIELDS(FIELD)                                                             \
  EP_ROUTING_FIELDS(FIELD)                                                                    \
  FIELD(quant, 0)        /* Quant */                                                          \
  FIELD(zero_padding, 0) /* 0 or 1 */                                                         \
  FIELD(reports_ids, 1)  /* 0: another operation of the call has reported ids out of range */ \
  FIELD(num_sms, 0)      /* CUDA; 0: the plan's choice */
#define EP_COMBINE_FIELDS(FIELD)                                    \
  EP_ROUTING_FIELDS(FIELD)                                          \
  FIELD(weighting, 0)  /* Weighting */                              \
  FIELD(out_dtype, 0)  /* DType */                                  \
  FIELD(wire_dtype, 0) /* DType */                                  \
  FIELD(num_sms, 0)                                                 \
  FIELD(rows_per_signal, 0) /* RowSignals; 0: the rows are there */ \
  FIELD(signal_threshold, 0)

#define EP_CONFIG_MEMBER(name, fallback) int64_t name = fallback;
#define EP_CONFIG_COUNT(name, fallback) +1
#define EP_CONFIG_FIELD(name, fallback) ConfigField{#name, fallback},
#define EP_CONFIG_VALUE(name, fallback) name,
#define EP_CONFIG_TAKE(name, fallback) config.name = *value++;

struct ConfigField {
  const char* name;
  int64_t fallback;
};

// `unpack`: from the numbers of an op, in the order of the table.
#define EP_CONFIG(Name, FIELDS, what)                                                                                 \
  struct Name {                                                                                                       \
    FIELDS(EP_CONFIG_MEMBER)                                                                                          \
    static constexpr std::array<ConfigField, 0 FIELDS(EP_CONFIG_COUNT)> kFields{{FIELDS(EP_CONFIG_FIELD)}};           \
    static Name unpack(std::span<const int64_t> values) {                                                             \
      EP_CHECK(values.size() == kFields.size(), "the config of a " what " has ", values.size(), " numbers, must be ", \
               kFields.size());                                                                                       \
      Name config;                                                                                                    \
      const int64_t* value = values.data();                                                                           \
      FIELDS(EP_CONFIG_TAKE)                                                                                          \
      return config;                                                                                                  \
    }                                                                                                                 \
    std::array<int64_t, kFields.size()> pack() const { return {FIELDS(EP_CONFIG_VALUE)}; }                            \
  };

EP_CONFIG(DispatchConfig, EP_DISPATCH_FIELDS, "dispatch")
EP_CONFIG(CombineConfig, EP_COMBINE_FIELDS, "combine")

}  // namespace ep
