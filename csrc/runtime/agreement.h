// What all ranks must have in common before they share a window.
#pragma once

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>

#include "transport/transport.h"

namespace ep {

class Agreement {
 public:
  template <class T>
  void add(const std::string& name, const T& value) {
    text_ << name << '=' << value << '\n';
    num_lines_++;
  }
  // What entries that are added later follow from: "name=value, name=value". It may differ; where one of those entries
  // does, the error is about the first of these values that does.
  void explain(const std::string& values) {
    first_explained_ = ++num_lines_;
    text_ << "made with=" << values << '\n';
  }
  // An error about an entry that is added later ends with the question.
  void ask(const std::string& question) {
    first_asked_ = num_lines_;
    question_ = question;
  }
  // Throws kMismatch with the first entry in which two ranks differ, and both values.
  void check(Bootstrap& bootstrap) const;

 private:
  void compare(int rank, int other_rank, const std::string& other) const;

  std::ostringstream text_;
  size_t num_lines_ = 0, first_asked_ = SIZE_MAX, first_explained_ = SIZE_MAX;
  std::string question_;
};

}  // namespace ep
