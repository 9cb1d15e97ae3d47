// The library for worlds on one GPU: what csrc/cuda/host/one_gpu_world.h says.
#include "cuda/host/one_gpu/world.h"

namespace ep {
namespace {

const OneGpuTable& table() {
  static const OneGpuTable table = [] {
    OneGpuTable made;
    made.build = EP_VERSION;
    made.join = &World::join;
    made.take_stamps = [](std::string_view kernel) { return take_stamps(kernel); };
#if defined(EP_HAS_DELAYS)
    made.set_testing = &set_on_current_gpu;
#endif
    return made;
  }();
  return table;
}

}  // namespace
}  // namespace ep

extern "C" __attribute__((visibility("default"))) const ep::OneGpuTable* ep::nccl_ep_one_gpu_table() {
  return &table();
}
