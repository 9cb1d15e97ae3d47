// Threads of an emulated GPU: control flows of one host thread, each on a stack of its own.
#pragma once

#include <csetjmp>
#include <cstddef>

namespace ep::emulator {

class Fiber {
 public:
  // `stack` must outlive it. Nothing runs before the first resume().
  void start(char* stack, size_t bytes, void (*body)(void*), void* argument);
  // Runs it until it pauses or ends.
  void resume();
  // Called within: back to the one who resumed it.
  void pause();
  bool has_ended() const { return has_ended_; }

 private:
  static void enter();

  void (*body_)(void*) = nullptr;
  void* argument_ = nullptr;
  char* stack_ = nullptr;
  size_t bytes_ = 0;
  bool has_started_ = false, has_ended_ = false;
  jmp_buf own_, resumer_;
  // AddressSanitizer's stacks.
  void* own_fake_stack_ = nullptr;
  void* resumer_fake_stack_ = nullptr;
  const void* resumer_stack_ = nullptr;
  size_t resumer_bytes_ = 0;
};

}  // namespace ep::emulator
