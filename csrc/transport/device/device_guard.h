// Calls of CUDA outside the hot path: on the buffer's device, and harmless to a graph capture of the caller or of
// another thread.
#pragma once

#include "transport/device/check_cuda.h"

namespace ep {

class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    EP_CUDA(cudaGetDevice(&previous_));
    if (previous_ != device) EP_CUDA(cudaSetDevice(device));
    has_mode_ = cudaThreadExchangeStreamCaptureMode(&mode_) == cudaSuccess;
  }
  ~DeviceGuard() {
    if (has_mode_) cudaThreadExchangeStreamCaptureMode(&mode_);
    cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;  // swapped with the thread's own
  bool has_mode_ = false;
};

// While it lives, calls of CUDA in this thread do not disturb a capture in another.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace ep
