# Decides whether the CUDA backend is built. Sets EP_WITH_CUDA and, with it, EP_NCCL_INCLUDE_DIR.
# The build machine's GPU is never looked at.

set(EP_WITH_CUDA OFF)
set(no_cuda)

if(NCCL_EP_CUDA STREQUAL "OFF")
  set(no_cuda "NCCL_EP_CUDA is OFF")
elseif(NCCL_EP_BUILD_PYTHON AND NOT EP_TORCH_CUDA)
  set(no_cuda "the installed torch is built without CUDA")
else()
  list(TRANSFORM NCCL_EP_CUDA_ARCHS APPEND "-real" OUTPUT_VARIABLE CMAKE_CUDA_ARCHITECTURES)  # machine code, no PTX
  if(NOT DEFINED ENV{CUDACXX} AND NOT CMAKE_CUDA_COMPILER)
    find_program(EP_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
    if(EP_NVCC)
      set(CMAKE_CUDA_COMPILER ${EP_NVCC})
    endif()
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    set(no_cuda "no CUDA compiler (nvcc) was found")
  endif()
endif()

# The headers of the NCCL wheel that torch uses: the kernels' data structures must be those of the library loaded.
if(NOT no_cuda)
  set(EP_NCCL_INCLUDE_DIR ${NCCL_EP_NCCL_INCLUDE_DIR})
  if(NOT EP_NCCL_INCLUDE_DIR AND NCCL_EP_BUILD_PYTHON)
    set(EP_NCCL_INCLUDE_DIR ${EP_TORCH_NCCL})
  elseif(NOT EP_NCCL_INCLUDE_DIR)
    find_package(Python 3.10 COMPONENTS Interpreter)
    if(Python_EXECUTABLE)
      execute_process(
        COMMAND ${Python_EXECUTABLE} -c "import nvidia.nccl; print(list(nvidia.nccl.__path__)[0] + '/include')"
        OUTPUT_VARIABLE EP_NCCL_INCLUDE_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    endif()
  endif()
  if(NOT EXISTS "${EP_NCCL_INCLUDE_DIR}/nccl_device.h")
    set(no_cuda "no NCCL headers with a device API were found: install the NCCL wheel of your torch or set "
                "NCCL_EP_NCCL_INCLUDE_DIR")
    string(CONCAT no_cuda ${no_cuda})
  endif()
endif()

if(no_cuda)
  if(NCCL_EP_CUDA STREQUAL "ON")
    message(FATAL_ERROR "NCCL_EP_CUDA is ON, but ${no_cuda}.")
  endif()
  message(STATUS "nccl_ep: CPU backend only (${no_cuda})")
  return()
endif()

set(EP_WITH_CUDA ON)
enable_language(CUDA)
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)  # CMake before 3.25.2 does not know that nvcc has C++20
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION "-std=c++20")
endif()
set(CMAKE_CUDA_STANDARD 20)
find_package(CUDAToolkit REQUIRED)
file(STRINGS ${EP_NCCL_INCLUDE_DIR}/nccl.h nccl_version REGEX "^#define NCCL_(MAJOR|MINOR|PATCH) ")
string(REGEX REPLACE "[^0-9;]" "" nccl_version "${nccl_version}")
string(REPLACE ";" "." nccl_version "${nccl_version}")
message(STATUS "nccl_ep: CUDA ${CUDAToolkit_VERSION} for ${NCCL_EP_CUDA_ARCHS}, NCCL ${nccl_version} headers from "
               "${EP_NCCL_INCLUDE_DIR}")
if(NCCL_EP_BUILD_PYTHON)
  list(APPEND EP_TORCH_LIBRARIES ${torch_lib_dir}/libc10_cuda.so ${torch_lib_dir}/libtorch_cuda.so)
endif()
