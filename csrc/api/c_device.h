// The group's device, in builds with CUDA and without.
#pragma once

#include <cstddef>

namespace ep::c {

// Makes `device` the calling thread's while it lives. Negative: the CPU, nothing to do.
class ScopedDevice {
 public:
  explicit ScopedDevice(int device);
  ~ScopedDevice();
  ScopedDevice(const ScopedDevice&) = delete;
  ScopedDevice& operator=(const ScopedDevice&) = delete;

 private:
  int previous_ = -1;  // to go back to; -1: none
};

bool is_capturing(int device, void* stream);
void synchronize(int device, void* stream);

void* allocate(int device, size_t bytes);  // aligned to 64 bytes at least
void release(int device, void* memory) noexcept;

}  // namespace ep::c
