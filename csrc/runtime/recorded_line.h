// The line of a recording's file that an operation becomes (docs/report.md).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/observed.h"

namespace ep {

// What is known of an operation when its call returns, and later what its GPU says.
struct RecordedLine {
  std::string buffer;
  const char* operation;
  uint64_t number;
  int rank;
  Shape shape;
  int num_tokens, hidden, row_bytes;
  bool is_home_bound, has_failed;
  int device_index;
  int64_t begin_ns, end_ns;

  bool is_captured = false;
  bool has_times = false;
  int64_t device_begin_ns = 0;
  int64_t device_ns = 0;
  bool has_rows = false;
  std::vector<int32_t> rows;     // [R]
  std::vector<int32_t> choices;  // [E], or none

  RecordedLine(const Observation& seen, int64_t begin_ns, int64_t end_ns, bool has_failed);

  bool can_have_rows() const { return row_bytes > 0 && !has_failed; }
  bool has_choices() const { return !is_home_bound; }
  void count(const Observation& seen);  // of an operation on the CPU
  void take(const uint64_t* words);     // of its GPU, as GpuRecording has them
  std::string device() const { return device_index < 0 ? "cpu" : "cuda:" + std::to_string(device_index); }
  std::string text() const;  // JSON, the inside of an object
};

}  // namespace ep
