# ep_core, ep_cuda and ep_api: what needs neither torch nor Python.
ep_add_library(ep_core STATIC ${core_sources})
set_source_files_properties(csrc/runtime/group.cc PROPERTIES COMPILE_DEFINITIONS EP_VERSION="${PROJECT_VERSION}")
# Ranges for profilers, from headers alone, where there is a CUDA toolkit.
find_path(EP_NVTX_INCLUDE_DIR nvtx3/nvToolsExt.h HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda
          PATH_SUFFIXES include)
if(EP_NVTX_INCLUDE_DIR)
  set_source_files_properties(csrc/runtime/ranges.cc PROPERTIES COMPILE_DEFINITIONS EP_WITH_NVTX=1
                              COMPILE_OPTIONS "-isystem${EP_NVTX_INCLUDE_DIR}")
endif()
target_link_libraries(ep_core PUBLIC Threads::Threads ${CMAKE_DL_LIBS} rt)

set(backends ep_core)
if(EP_WITH_CUDA)
  ep_add_library(ep_cuda STATIC ${cuda_sources})
  ep_use_cuda(ep_cuda PUBLIC)
  set_source_files_properties(csrc/transport/nccl/gin/library.cc csrc/cuda/host/one_gpu_library.cc PROPERTIES
                              COMPILE_DEFINITIONS EP_VERSION="${PROJECT_VERSION}")
  list(PREPEND backends ep_cuda)
elseif(NCCL_EP_EMULATED_GPU)
  include(EpEmulatedGpu)
  list(PREPEND backends ep_cuda)
endif()
if(TARGET ep_cuda)
  target_compile_definitions(ep_cuda PUBLIC $<$<BOOL:${NCCL_EP_LAB}>:EP_LAB=1>)
endif()

string(REPLACE "\"" "" without_cuda "${no_cuda}")
set_source_files_properties(csrc/api/factory.cc PROPERTIES COMPILE_DEFINITIONS EP_WITHOUT_CUDA="${without_cuda}")
ep_add_library(ep_api OBJECT ${api_sources})
target_include_directories(ep_api PUBLIC csrc/include)
target_link_libraries(ep_api PUBLIC ${backends})
export(TARGETS ${backends} ep_api FILE ${PROJECT_BINARY_DIR}/ep_targets.cmake)  # for NCCL_EP_PREBUILT
