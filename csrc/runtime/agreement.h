// What all ranks must have in common before they share a window.
#pragma once

#include <sstream>
#include <string>

#include "transport/transport.h"

namespace ep {

class Agreement {
 public:
  template <class T>
  void add(const std::string& name, const T& value) {
    text_ << name << '=' << value << '\n';
  }
  // Throws kMismatch with the first entry in which two ranks differ, and both values.
  void check(Bootstrap& bootstrap) const;

 private:
  std::ostringstream text_;
};

}  // namespace ep
