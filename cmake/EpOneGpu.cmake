# The one-GPU library, with NCCL_EP_LAB: kernels that hold all ranks of a world on one GPU, for tests and tools. It is
# loaded on demand, from beside the library that wants it (csrc/cuda/host/one_gpu_world.h).
file(GLOB one_gpu_sources CONFIGURE_DEPENDS csrc/cuda/host/one_gpu/*.cc csrc/cuda/host/one_gpu/*.cu)
add_library(nccl_ep_one_gpu MODULE ${one_gpu_sources} csrc/cuda/testing/stamps.cc csrc/cuda/testing/testing.cc)
ep_configure(nccl_ep_one_gpu)
ep_use_cuda(nccl_ep_one_gpu PRIVATE)
target_compile_definitions(nccl_ep_one_gpu PRIVATE EP_LAB=1 EP_VERSION="${PROJECT_VERSION}")
target_link_options(nccl_ep_one_gpu PRIVATE -Wl,--no-undefined)
ep_export_only(nccl_ep_one_gpu cmake/exports_one_gpu.map)
ep_install_beside(nccl_ep_one_gpu)
