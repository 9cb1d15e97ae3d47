// The library's errors as Python's classes.
#pragma once

#include <string>

#include "base/check.h"

namespace ep {

// As nccl_ep/errors.py has them, or ValueError. An op throws the class itself, so that it stays one where a compiler
// calls the op. Takes the interpreter's lock.
[[noreturn]] void throw_in_python(const Error& error);
[[noreturn]] void throw_overflow(const std::string& text);
// throw_in_python() with the lock held: as Python's current error.
void set_in_python(const Error& error);

// While it lives, this thread is in a backward pass: errors of ranks that do not come together say so.
class InBackwardPass {
 public:
  InBackwardPass();
  ~InBackwardPass();
  InBackwardPass(const InBackwardPass&) = delete;
  InBackwardPass& operator=(const InBackwardPass&) = delete;
};

}  // namespace ep
