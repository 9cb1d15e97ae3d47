// Ending a wait of the host before its deadline, as for Ctrl-C.
#pragma once

#include <atomic>
#include <string>

#include "base/check.h"

namespace ep {

// A host that waits calls it now and then. True ends the wait, and with it the buffer. The program that embeds the
// library sets it; null: it is not called.
inline std::atomic<bool (*)()> is_interrupted{nullptr};

// Ends the making of a buffer. The rank leaves at once, and the others find out by their own deadlines.
class Interrupted : public Error {
 public:
  explicit Interrupted(const std::string& what) : Error(ErrorKind::kTimeout, what + " was interrupted") {}
};

inline bool has_interruption() {
  const auto asks = is_interrupted.load(std::memory_order_relaxed);
  return asks != nullptr && asks();
}

}  // namespace ep
