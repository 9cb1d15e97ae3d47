// makecontext() enters a new stack once; from then on setjmp() and longjmp() switch, which needs no system call.
#undef _FORTIFY_SOURCE  // its longjmp() refuses another stack
#include "fiber.h"

#include <ucontext.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace ep::emulator {
namespace {

thread_local Fiber* entering = nullptr;

// Tell AddressSanitizer of the stack that runs next, and where the last one was.
void leave_for([[maybe_unused]] void** fake_stack, [[maybe_unused]] const void* stack, [[maybe_unused]] size_t bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(fake_stack, stack, bytes);
#endif
}
void arrived([[maybe_unused]] void* fake_stack, [[maybe_unused]] const void** from, [[maybe_unused]] size_t* bytes) {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake_stack, from, bytes);
#endif
}

}  // namespace

void Fiber::start(char* stack, size_t bytes, void (*body)(void*), void* argument) {
  body_ = body;
  argument_ = argument;
  stack_ = stack;
  bytes_ = bytes;
  has_started_ = has_ended_ = false;
}

void Fiber::enter() {
  Fiber* self = entering;
  arrived(nullptr, &self->resumer_stack_, &self->resumer_bytes_);
  self->body_(self->argument_);
  self->has_ended_ = true;
  leave_for(nullptr, self->resumer_stack_, self->resumer_bytes_);  // its fake stack goes
  _longjmp(self->resumer_, 1);
}

void Fiber::resume() {
  if (_setjmp(resumer_) == 0) {
    leave_for(&resumer_fake_stack_, stack_, bytes_);
    if (has_started_) _longjmp(own_, 1);
    has_started_ = true;
    entering = this;
    ucontext_t context;
    getcontext(&context);
    context.uc_stack.ss_sp = stack_;
    context.uc_stack.ss_size = bytes_;
    context.uc_link = nullptr;
    makecontext(&context, &Fiber::enter, 0);
    setcontext(&context);
  }
  arrived(resumer_fake_stack_, nullptr, nullptr);
}

void Fiber::pause() {
  if (_setjmp(own_) == 0) {
    leave_for(&own_fake_stack_, resumer_stack_, resumer_bytes_);
    _longjmp(resumer_, 1);
  }
  arrived(own_fake_stack_, &resumer_stack_, &resumer_bytes_);
}

}  // namespace ep::emulator
