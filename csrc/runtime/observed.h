// What a process can watch of its operations, eager, compiled or of a backward pass: nccl_ep.record of Python does.
// Without an observer an operation tests a pointer.
#pragma once

#include <cstdint>
#include <string>

#include "layout/common/shape.h"
#include "runtime/common/recorded_words.h"
#include "runtime/ranges.h"

namespace ep {

class Group;

// An operation as its rank asks for it.
struct Observation {
  const std::string& buffer;
  const char* operation;  // as ranges have it
  uint64_t number;        // of the host's calls
  int rank;
  Shape shape;
  int num_tokens = 0;
  int hidden = 0;                   // elements of a row; 0: no rows
  int row_bytes = 0;                // of a row that travels; 0: none does, or the send of a split call has sent them
  bool is_home_bound = false;       // rows come to the rank whose tokens they are; else they leave it
  bool has_row_per_choice = false;  // else a row for each rank that has an expert of the token
  const void* ids = nullptr;        // [T, K] experts of the own tokens, on the device
  bool is_idx64 = false;
  const int32_t* rows = nullptr;  // [R] rows to or from each rank, on the device when it is over; null: by the ids
  int device_index = -1;          // CUDA device; -1: the CPU
  void* stream = nullptr;
  // Its kernels write RecordedWords: the times, and the counts. Else kernels before and behind it do.
  bool has_own_times = false, has_own_counts = false;

  // All but the rows that travel.
  static Observation of(const Group& group, const char* operation, uint64_t number, const Shape& shape, int num_tokens,
                        int hidden, void* stream);
};

class Observer {
 public:
  virtual ~Observer() = default;
  // What end() is given, in the same thread.
  virtual void* begin(const Observation& operation) noexcept = 0;
  // For the kernels of an operation that has its own times.
  virtual RecordedWords words_of(void* begun) noexcept = 0;
  // The call returns, or fails; on a GPU the operation is on its stream.
  virtual void end(const Observation& operation, void* begun, bool has_failed) noexcept = 0;
};

// Which lives as long as the process; null: none. Calls that have begun end with the observer of their beginning.
void set_observer(Observer* observer);
Observer* observer();

// An operation from here to the end of the scope, for profilers and the observer.
class Observed {
 public:
  explicit Observed(const Observation& operation);
  ~Observed();
  Observed(const Observed&) = delete;
  Observed& operator=(const Observed&) = delete;

  RecordedWords words() const { return observer_ != nullptr ? observer_->words_of(begun_) : RecordedWords(); }

 private:
  const Observation operation_;
  const Range range_;
  Observer* const observer_;
  void* const begun_;
  const int exceptions_;
};

}  // namespace ep
