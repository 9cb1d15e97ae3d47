// Ending a wait of the host before its deadline, as for Ctrl-C.
#pragma once

#include <atomic>

namespace ep {

// A host that waits calls it now and then. True ends the wait, and with it the buffer. The program that embeds the
// library sets it; null: it is not called.
inline std::atomic<bool (*)()> is_interrupted{nullptr};

}  // namespace ep
