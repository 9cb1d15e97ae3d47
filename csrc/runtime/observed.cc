#include "runtime/observed.h"

#include <atomic>
#include <exception>

#include "runtime/group.h"

namespace ep {
namespace {

std::atomic<Observer*> current{nullptr};

}  // namespace

void set_observer(Observer* observer) { current.store(observer, std::memory_order_release); }
Observer* observer() { return current.load(std::memory_order_acquire); }

Observation Observation::of(const Group& group, const char* operation, uint64_t number, const Shape& shape,
                            int num_tokens, int hidden, void* stream) {
  return {.buffer = group.config().name,
          .operation = operation,
          .number = number,
          .rank = group.rank(),
          .shape = shape,
          .num_tokens = num_tokens,
          .hidden = hidden,
          .device_index = group.config().device_index,
          .stream = stream};
}

Observed::Observed(const Observation& operation)
    : operation_(operation),
      range_(operation.buffer, operation.operation, operation.number),
      observer_(observer()),
      begun_(observer_ != nullptr ? observer_->begin(operation_) : nullptr),
      exceptions_(observer_ != nullptr ? std::uncaught_exceptions() : 0) {}

Observed::~Observed() {
  if (observer_ != nullptr) observer_->end(operation_, begun_, std::uncaught_exceptions() > exceptions_);
}

}  // namespace ep
