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

# Sources that know delays and planted bugs, or CUDA: the C++ tests have them once more, with these. (CMake has to run
# again for a new one.)
foreach(source IN LISTS core_sources api_sources)
  file(STRINGS ${source} found REGEX "\"base/testing.h\"|defined\\(EP_WITH_CUDA\\)")
  if(found)
    list(APPEND testing_sources ${source})
  endif()
endforeach()
# Without CUDA, where nobody measures, each folder is compiled as one. A linker takes an object whole, so what is there
# once more for tests is apart.
if(NOT EP_WITH_CUDA)
  set_target_properties(ep_core PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  foreach(source IN LISTS core_sources)
    cmake_path(GET source PARENT_PATH folder)
    cmake_path(RELATIVE_PATH folder BASE_DIRECTORY ${PROJECT_SOURCE_DIR}/csrc)
    if(source IN_LIST testing_sources)
      string(REPLACE "/" "_" group testing_${folder})
    else()
      string(REGEX MATCH "^[a-z]+" group ${folder})
    endif()
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP ${group})
  endforeach()
endif()

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
if(NOT EP_WITH_CUDA)
  set_target_properties(ep_api PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  ep_together(objects csrc/api c_combine c_comm c_error c_group c_handle c_live c_masks)
  ep_together(calls csrc/api c_dispatch c_plain c_tensor)
  ep_together(tensors csrc/api c_dispatch_tensors c_ht_dispatch c_struct)
endif()
target_include_directories(ep_api PUBLIC csrc/include)
target_link_libraries(ep_api PUBLIC ${backends})
export(TARGETS ${backends} ep_api FILE ${PROJECT_BINARY_DIR}/ep_targets.cmake)  # for NCCL_EP_PREBUILT
