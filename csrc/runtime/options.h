// One description of an operation's numbers. A line of a table is an option: members of structs, the numbers of an op,
// their checks, the loader of Python's arguments (torch/common/load_option.h) and Python's list follow from it.
// docs/adding_an_option.md has the other places.
#pragma once

#include <array>
#include <bit>
#include <cfloat>
#include <cstdint>
#include <limits>
#include <span>
#include <type_traits>

#include "base/check.h"
#include "layout/common/dtype.h"
#include "layout/common/outputs.h"

namespace ep {

// How expert rows are weighted on their way home.
enum class Weighting : int { kNone = 0, kDispatch = 1, kHome = 2 };

// OPTION(type, name, default, least, most, modes). The type tells the kind: bool is a flag, int and int64_t are
// integers, float is a float, an enum is a choice. The default says that nothing was asked for, and need not lie within
// the range.

// Of the routing that a handle stands for: equal in a dispatch and its combines. Shape::make() and OutputShape::make()
// check the sizes.
#define EP_ROUTING_NUMBERS(OPTION)                                                                          \
  OPTION(int64_t, num_experts, 0, kLeast, kMost, Modes::kBoth)                                              \
  OPTION(int64_t, topk, 0, kLeast, kMost, Modes::kBoth)                                                     \
  OPTION(int64_t, max_tokens, 0, kLeast, kMost, Modes::kBoth)                                               \
  OPTION(OutputLayout, layout, OutputLayout::kExpertMajor, OutputLayout::kExpertMajor, OutputLayout::kFlat, \
         Modes::kBoth)                                                                                      \
  OPTION(int64_t, alignment, 1, kLeast, kMost, Modes::kBoth) /* packed: of first rows */

// reports_ids: false where another operation of the call has reported ids out of range. all_weights: rows of rank
// layouts bring the weights of all choices of their token, also of those whose experts are elsewhere. num_sms: on GPUs;
// 0: the plan's choice.
#define EP_DISPATCH_OPTIONS(OPTION)                                                     \
  OPTION(Quant, quant, Quant::kNone, Quant::kNone, Quant::kNvfp4Swizzled, Modes::kBoth) \
  OPTION(bool, zero_padding, false, false, true, Modes::kBoth)                          \
  OPTION(bool, reports_ids, true, false, true, Modes::kLl)                              \
  OPTION(bool, all_weights, false, false, true, Modes::kLl)                             \
  OPTION(int, num_sms, 0, 0, INT32_MAX, Modes::kBoth)

// rows_per_signal, signal_threshold: RowSignals (common/row_signals.h); 0: the rows are there.
#define EP_COMBINE_OPTIONS(OPTION)                                                                 \
  OPTION(Weighting, weighting, Weighting::kNone, Weighting::kNone, Weighting::kHome, Modes::kBoth) \
  OPTION(DType, out_dtype, DType::kBF16, DType::kBF16, DType::kLogFmt, Modes::kBoth)               \
  OPTION(DType, wire_dtype, DType::kBF16, DType::kBF16, DType::kLogFmt, Modes::kBoth)              \
  OPTION(int, num_sms, 0, 0, INT32_MAX, Modes::kBoth)                                              \
  OPTION(float, scale, 1, -FLT_MAX, FLT_MAX, Modes::kBoth)                                         \
  OPTION(int64_t, rows_per_signal, 0, 1, kMost, Modes::kBoth)                                      \
  OPTION(int, signal_threshold, 0, 1, INT32_MAX, Modes::kBoth)

enum class Modes : int { kLl = 1, kHt = 2, kBoth = 3 };
enum class OptionKind : int { kFlag, kInteger, kFloat, kChoice };

// Values as the numbers of an op: a float by its bits.
struct Option {
  const char* name;
  OptionKind kind;
  Modes modes;
  int64_t fallback, least, most;
};

template <class T>
constexpr OptionKind kKindOf = std::is_same_v<T, bool>       ? OptionKind::kFlag
                               : std::is_floating_point_v<T> ? OptionKind::kFloat
                               : std::is_enum_v<T>           ? OptionKind::kChoice
                                                             : OptionKind::kInteger;

template <class T>
constexpr int64_t to_number(T value) {
  if constexpr (std::is_same_v<T, float>) return std::bit_cast<uint32_t>(value);
  return static_cast<int64_t>(value);
}
template <class T>
constexpr T from_number(int64_t number) {
  if constexpr (std::is_same_v<T, float>) return std::bit_cast<float>(static_cast<uint32_t>(number));
  return static_cast<T>(number);
}

constexpr bool is_within(const Option& option, int64_t number) {
  if (number == option.fallback) return true;
  if (option.kind != OptionKind::kFloat) return number >= option.least && number <= option.most;
  const auto value = from_number<float>(number);  // false where it is no number
  return value >= from_number<float>(option.least) && value <= from_number<float>(option.most);
}
// With a text that has the name, the value, and what it must be.
[[noreturn]] void refuse_option(const Option& option, int64_t number);
// A number out of its option's range is refused. Of a known option a compiler leaves two comparisons.
constexpr void check_option(const Option& option, int64_t number) {
  if (!is_within(option, number)) refuse_option(option, number);
}
// And an option that the mode has not got.
void check_options(std::span<const Option> options, std::span<const int64_t> numbers, Modes mode);

#define EP_OPTION_MEMBER(type, name, fallback, least, most, modes) type name = fallback;
#define EP_OPTION_COUNT(type, name, fallback, least, most, modes) +1
#define EP_OPTION_OF(type, name, fallback, least, most, modes) \
  (Option{#name, kKindOf<type>, modes, to_number<type>(fallback), to_number<type>(least), to_number<type>(most)})
#define EP_OPTION_LINE(...) EP_OPTION_OF(__VA_ARGS__),
#define EP_OPTION_PACK(type, name, fallback, least, most, modes) to_number<type>(name),
#define EP_OPTION_UNPACK(type, name, fallback, least, most, modes)               \
  check_option(EP_OPTION_OF(type, name, fallback, least, most, modes), *number); \
  made.name = from_number<type>(*number++);

#define EP_OPTIONS(Name, OPTIONS)                                                                      \
  struct Name {                                                                                        \
    OPTIONS(EP_OPTION_MEMBER)                                                                          \
    static constexpr int64_t kLeast = INT64_MIN, kMost = INT64_MAX;                                    \
    static constexpr std::array<Option, 0 OPTIONS(EP_OPTION_COUNT)> kTable{{OPTIONS(EP_OPTION_LINE)}}; \
    std::array<int64_t, kTable.size()> pack() const { return {OPTIONS(EP_OPTION_PACK)}; }              \
    static Name unpack(const int64_t* number) {                                                        \
      Name made;                                                                                       \
      OPTIONS(EP_OPTION_UNPACK)                                                                        \
      return made;                                                                                     \
    }                                                                                                  \
    void check(Modes mode) const { check_options(kTable, pack(), mode); }                              \
  };

EP_OPTIONS(RoutingNumbers, EP_ROUTING_NUMBERS)
EP_OPTIONS(DispatchOptions, EP_DISPATCH_OPTIONS)
EP_OPTIONS(CombineOptions, EP_COMBINE_OPTIONS)

// All numbers of an operation, in the order of the tables.
template <class Options>
struct Config : RoutingNumbers, Options {
  static constexpr size_t kSize = RoutingNumbers::kTable.size() + Options::kTable.size();

  static Config unpack(std::span<const int64_t> numbers) {
    constexpr const char* kName = std::is_same_v<Options, DispatchOptions> ? "dispatch" : "combine";
    EP_CHECK(numbers.size() == kSize, "the config of a ", kName, " has ", numbers.size(), " numbers, must be ", kSize);
    return {RoutingNumbers::unpack(numbers.data()), Options::unpack(numbers.data() + RoutingNumbers::kTable.size())};
  }
  std::array<int64_t, kSize> pack() const {
    std::array<int64_t, kSize> numbers;
    const auto routing = RoutingNumbers::pack();
    const auto options = Options::pack();
    std::copy(options.begin(), options.end(), std::copy(routing.begin(), routing.end(), numbers.begin()));
    return numbers;
  }
};
using DispatchConfig = Config<DispatchOptions>;
using CombineConfig = Config<CombineOptions>;

}  // namespace ep
