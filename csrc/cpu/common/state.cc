#include "cpu/common/state.h"

#include "base/check.h"
#include "runtime/failure_node.h"
#include "runtime/group.h"

namespace ep {

Failure::Code code_of(Deadline::End end) {
  switch (end) {
    case Deadline::End::kInterrupted:
      return Failure::kInterrupted;
    case Deadline::End::kDestroyed:
      return Failure::kDestroyed;
    default:
      return Failure::kTimeout;
  }
}

void fail(CpuState& state, const Failure& failure, const Transport& transport) {
  state.failure.set(failure);
  raise(kind_of(failure), describe(failure, transport.rank(), state.control.timeout_seconds),
        node_of(failure, transport.topology()));
}

}  // namespace ep
