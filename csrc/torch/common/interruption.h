// Signals of Python while the host waits for another rank: Ctrl-C ends the wait, not only the deadline.
#pragma once

namespace ep {

// From now on, host waits of any group look for signals.
void watch_signals();
// Throws what a signal's handler has raised in a wait of this thread, as Python's exception. Nothing else is left of
// it.
void rethrow_interruption();

}  // namespace ep
