# ep_core, ep_cuda and ep_api of another build directory, NCCL_EP_PREBUILT, and its GIN libraries. Neither torch nor Python
# is in them: extensions for several of these share them (tools/wheels.py). That directory has the same sources.
include(${NCCL_EP_PREBUILT}/ep_targets.cmake)
set(backends ep_core)
if(EP_WITH_CUDA)
  list(PREPEND backends ep_cuda)
endif()
file(GLOB gin_libraries ${NCCL_EP_PREBUILT}/libnccl_ep_gin_*.so)
install(FILES ${gin_libraries} DESTINATION nccl_ep COMPONENT python)
