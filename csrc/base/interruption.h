// Ending a wait of the host before its deadline, as for Ctrl-C.
#pragma once

#include <atomic>

namespace ep {

// Asked now and then by a host that waits; true ends the wait, and with it the buffer. Whoever embeds the library sets
// it; null: nobody asks.
inline std::atomic<bool (*)()> is_interrupted{nullptr};

}  // namespace ep
