// A GPU's side of a recording, on CUDA.
#pragma once

#include <memory>

#include "runtime/gpu_recording.h"

namespace ep {

std::unique_ptr<GpuRecording> make_gpu_recording(int device);
bool is_capturing_stream(void* stream);

}  // namespace ep
