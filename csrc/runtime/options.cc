#include "runtime/options.h"

#include <string>

namespace ep {
namespace {

std::string text_of(const Option& option, int64_t number) {
  return option.kind == OptionKind::kFloat ? concat(from_number<float>(number)) : concat(number);
}

// What a number out of the range must be.
std::string requirement(const Option& option, int64_t number) {
  const bool is_integer = option.kind == OptionKind::kInteger;
  if (option.kind == OptionKind::kFlag) return "must be 0 or 1";
  if (is_integer && option.least == 0 && number < 0) return "must not be negative";
  if (is_integer && option.most == INT64_MAX) return concat("must be at least ", option.least);
  if (option.kind == OptionKind::kFloat && from_number<float>(option.most) == std::numeric_limits<float>::max()) {
    return "must be a finite number";
  }
  return concat("must be from ", text_of(option, option.least), " to ", text_of(option, option.most));
}

}  // namespace

void refuse_option(const Option& option, int64_t number) {
  const std::string text = text_of(option, number);
  const std::string what = option.kind == OptionKind::kChoice ? concat(" ", text, " is unknown") : concat(" is ", text);
  raise(ErrorKind::kInvalidArgument, option.name, what, ", ", requirement(option, number));
}

void check_options(std::span<const Option> options, std::span<const int64_t> numbers, Modes mode) {
  for (size_t i = 0; i < options.size(); i++) {
    const Option& option = options[i];
    check_option(option, numbers[i]);
    const bool has = (static_cast<int>(option.modes) & static_cast<int>(mode)) != 0;
    EP_CHECK(has || numbers[i] == option.fallback, option.name, " is ", text_of(option, numbers[i]), ", but ",
             mode == Modes::kLl ? "low latency" : "high throughput", " has no such option");
  }
}

}  // namespace ep
