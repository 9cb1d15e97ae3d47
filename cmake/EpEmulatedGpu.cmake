# ep_cuda for a machine without GPU or CUDA toolkit: the same sources, compiled as C++ over tests/gpu_emulator, whose
# headers stand for the toolkit's and for those with inline assembly.
set(emulator ${PROJECT_SOURCE_DIR}/tests/gpu_emulator)
file(GLOB_RECURSE emulator_sources CONFIGURE_DEPENDS ${emulator}/*.cc csrc/cuda/*.cc csrc/cuda/*.cu)
list(FILTER emulator_sources EXCLUDE REGEX "/gin/")  # NCCL's own network
list(FILTER emulator_sources EXCLUDE REGEX "/csrc/cuda/host/one_gpu_library\\.cc$")  # no library of its own
list(FILTER emulator_sources EXCLUDE REGEX "/csrc/cuda/host/driver\\.cc$")
set_source_files_properties(${emulator_sources} PROPERTIES LANGUAGE CXX)
set_source_files_properties(csrc/cuda/host/one_gpu/table.cc PROPERTIES COMPILE_DEFINITIONS EP_VERSION="${PROJECT_VERSION}")
ep_add_library(ep_cuda STATIC ${emulator_sources})
target_include_directories(ep_cuda BEFORE PRIVATE ${emulator}/include)
target_compile_options(ep_cuda PRIVATE -include cuda_runtime.h -Wno-unknown-pragmas -Wno-unused-function
                       -Wno-unused-parameter -Wno-sign-compare -Wno-maybe-uninitialized -Wno-uninitialized
                       -Wno-missing-field-initializers -Wno-pedantic)
target_compile_definitions(ep_cuda PUBLIC EP_EMULATED_GPU=1)
target_link_libraries(ep_cuda PUBLIC ep_core)
