# Finds Python and asks torch itself for its paths. (find_package(Torch) refuses a CUDA build of torch where there is no
# CUDA toolkit.) The pybind11 headers are torch's own too: another version's types would not mix with torch's.
# Sets EP_TORCH_INCLUDE_DIRS, EP_TORCH_LIBRARIES, EP_TORCH_CUDA (torch's CUDA version, or empty) and EP_TORCH_NCCL (the
# headers of the NCCL wheel beside torch, or empty).
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)

execute_process(
  COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/torch_paths.py
  OUTPUT_VARIABLE torch_paths ERROR_VARIABLE torch_error RESULT_VARIABLE torch_failed OUTPUT_STRIP_TRAILING_WHITESPACE)
if(torch_failed)
  message(FATAL_ERROR "${Python_EXECUTABLE} cannot import torch, which nccl_ep is built against: pip install torch.\n${torch_error}")
endif()
list(GET torch_paths 0 torch_version)
list(GET torch_paths 1 torch_cuda)
list(GET torch_paths 2 torch_cxx11_abi)
list(GET torch_paths 3 torch_lib_dir)
list(GET torch_paths 4 torch_nccl)
list(SUBLIST torch_paths 5 -1 EP_TORCH_INCLUDE_DIRS)
string(REPLACE "none" "" EP_TORCH_CUDA "${torch_cuda}")
string(REPLACE "none" "" EP_TORCH_NCCL "${torch_nccl}")
message(STATUS "nccl_ep: torch ${torch_version}, CUDA ${torch_cuda}, ${torch_lib_dir}")

set(EP_TORCH_LIBRARIES)
foreach(name IN ITEMS c10 torch_cpu torch torch_python)
  list(APPEND EP_TORCH_LIBRARIES ${torch_lib_dir}/lib${name}.so)
endforeach()

# Strings pass between torch and the libraries below it, so all share its C++ ABI.
add_compile_definitions(_GLIBCXX_USE_CXX11_ABI=${torch_cxx11_abi})
