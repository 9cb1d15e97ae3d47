#include "runtime/recorded_line.h"

#include <charconv>

namespace ep {
namespace {

void append(std::string& text, const char* name, int64_t value) {
  char digits[24];
  const auto end = std::to_chars(digits, digits + sizeof digits, value).ptr;
  ((text += ", \"") += name) += "\": ";
  text.append(digits, end);
}

void append(std::string& text, const char* name, const std::vector<int32_t>& values) {
  ((text += ", \"") += name) += "\": [";
  char digits[16];
  for (size_t i = 0; i < values.size(); i++) {
    if (i > 0) text += ", ";
    text.append(digits, std::to_chars(digits, digits + sizeof digits, values[i]).ptr);
  }
  text += "]";
}

// A number of JSON in any locale.
void append_us(std::string& text, const char* name, int64_t ns) {
  append(text, name, ns / 1000);
  const std::string digits = std::to_string(1000 + ns % 1000);  // of which the first is none
  (text += ".").append(digits, 1);
}

}  // namespace

RecordedLine::RecordedLine(const Observation& seen, int64_t began_ns, int64_t ended_ns, bool failed)
    : buffer(seen.buffer),
      operation(seen.operation),
      number(seen.number),
      rank(seen.rank),
      shape(seen.shape),
      num_tokens(seen.num_tokens),
      hidden(seen.hidden),
      row_bytes(seen.row_bytes),
      is_home_bound(seen.is_home_bound),
      has_failed(failed),
      device_index(seen.device_index),
      begin_ns(began_ns),
      end_ns(ended_ns) {}

void RecordedLine::count(const Observation& seen) {
  const auto ranks = static_cast<size_t>(shape.num_ranks), experts = static_cast<size_t>(shape.num_experts);
  has_rows = true;
  if (seen.rows != nullptr) {
    rows.assign(seen.rows, seen.rows + ranks);
    return;
  }
  rows.assign(ranks, 0);
  std::vector<int32_t> counts(experts), owners(experts), last(ranks, -1);
  for (size_t i = 0; i < experts; i++) owners[i] = shape.owner(static_cast<int>(i));
  int64_t at = 0;
  for (int token = 0; token < num_tokens; token++) {
    for (int k = 0; k < shape.topk; k++, at++) {
      const int64_t id =
          seen.is_idx64 ? static_cast<const int64_t*>(seen.ids)[at] : static_cast<const int32_t*>(seen.ids)[at];
      if (!shape.valid(id)) continue;
      const auto expert = static_cast<size_t>(id);
      const auto owner = static_cast<size_t>(owners[expert]);
      counts[expert]++;
      rows[owner] += seen.has_row_per_choice || last[owner] != token ? 1 : 0;
      last[owner] = token;
    }
  }
  if (has_choices()) choices = std::move(counts);
}

void RecordedLine::take(const uint64_t* words) {
  const auto count_at = [words](size_t i) { return static_cast<int32_t>(static_cast<uint32_t>(words[i])); };
  const auto ranks = static_cast<size_t>(shape.num_ranks);
  has_rows = true;
  rows.resize(ranks);
  for (size_t i = 0; i < ranks; i++) rows[i] = count_at(i);
  if (!has_choices()) return;
  choices.resize(static_cast<size_t>(shape.num_experts));
  for (size_t i = 0; i < choices.size(); i++) choices[i] = count_at(ranks + i);
}

std::string RecordedLine::text() const {
  std::string text;
  text.reserve(512 + 6 * (rows.size() + choices.size()));
  ((text += "\"operation\": \"") += operation) += "\"";
  append(text, "number", static_cast<int64_t>(number));
  append(text, "begin_ns", begin_ns);
  append(text, "end_ns", end_ns);
  append(text, "tokens", num_tokens);
  append(text, "hidden", hidden);
  append(text, "topk", shape.topk);
  append(text, "experts", shape.num_experts);
  append(text, "row_bytes", row_bytes);
  text += is_home_bound ? ", \"is_home_bound\": true" : ", \"is_home_bound\": false";
  if (has_failed) text += ", \"has_failed\": true";
  if (is_captured) text += ", \"is_captured\": true";
  if (has_times) {
    append(text, "device_begin_ns", device_begin_ns);
    append_us(text, "device_us", device_ns);
  }
  if (has_rows) append(text, "rows", rows);
  if (!choices.empty()) append(text, "choices", choices);
  return text;
}

}  // namespace ep
