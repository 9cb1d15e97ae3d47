#include "torch/device.h"

#if defined(EP_WITH_CUDA)
#include <c10/cuda/CUDAStream.h>
#endif

namespace ep {

at::Device device_of(const Group& group) {
  const GroupConfig& config = group.config();
  if (config.device_index < 0) return at::Device(at::kCPU);
  return at::Device(at::kCUDA, static_cast<c10::DeviceIndex>(config.device_index));
}

void* current_stream([[maybe_unused]] const at::Device& device) {
#if defined(EP_WITH_CUDA)
  if (device.is_cuda()) return c10::cuda::getCurrentCUDAStream(device.index()).stream();
#endif
  return nullptr;
}

}  // namespace ep
