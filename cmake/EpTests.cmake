# ep_tests (GoogleTest, CPU), and checks of what the libraries export.

add_custom_target(cuda_tests)  # those that need a build with CUDA
find_package(GTest QUIET)
if(GTest_FOUND)
  include(GoogleTest)
  # A second object of these. The linker takes it, and the rest from the libraries.
  ep_add_library(ep_core_testing OBJECT ${testing_sources})
  target_compile_definitions(ep_core_testing PUBLIC EP_TESTING=1)
  target_compile_options(ep_core_testing PUBLIC -O1)  # compiling takes longer than running
  target_include_directories(ep_core_testing PUBLIC csrc/include)
  set_target_properties(ep_core_testing PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  ep_add_library(ep_api_archive STATIC $<TARGET_OBJECTS:ep_api>)
  target_link_libraries(ep_api_archive PUBLIC ep_core)

  # The host half of the emulated GPUs' network: it needs neither the emulator nor CUDA.
  add_executable(ep_tests ${test_sources} tests/gpu_emulator/network/nic.cc)
  ep_configure(ep_tests)
  target_include_directories(ep_tests PRIVATE tests/cpp tests)
  target_link_libraries(ep_tests PRIVATE ep_core_testing ep_api_archive GTest::gtest GTest::gtest_main)
  target_precompile_headers(ep_tests PRIVATE <gtest/gtest.h>)
  # In four groups, by turns. Files with a name that another has too stay alone.
  list(FILTER test_sources EXCLUDE REGEX "/(graph_pools|ht_rail|ht_routing|small_blocks)_test.cc$")
  set(turn 0)
  foreach(source IN LISTS test_sources)
    set_source_files_properties(${source} PROPERTIES UNITY_GROUP tests_${turn})
    math(EXPR turn "(${turn} + 1) % 4")
  endforeach()
  set_target_properties(ep_tests PROPERTIES UNITY_BUILD ON UNITY_BUILD_MODE GROUP)
  gtest_discover_tests(ep_tests DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
    PROPERTIES TIMEOUT 600 ENVIRONMENT "TSAN_OPTIONS=halt_on_error=1")

  # What torch's own CUDA allocator does with the arena, over a CUDA runtime of the test's.
  if(EP_WITH_CUDA AND NCCL_EP_BUILD_PYTHON AND NOT NCCL_EP_SANITIZE)
    add_library(ep_no_driver SHARED EXCLUDE_FROM_ALL tests/torch_allocator/no_driver.c)
    set_target_properties(ep_no_driver PROPERTIES OUTPUT_NAME cuda VERSION 1 SOVERSION 1
      LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR}/no_driver)
    add_executable(ep_allocator_tests tests/torch_allocator/arena_pool_test.cc tests/torch_allocator/fake_cuda.cc
      csrc/torch/ops/arena_pool.cc csrc/torch/ops/device.cc)
    ep_configure(ep_allocator_tests)
    set_target_properties(ep_allocator_tests PROPERTIES CXX_VISIBILITY_PRESET default ENABLE_EXPORTS ON)
    target_compile_definitions(ep_allocator_tests PRIVATE EP_WITH_CUDA=1)
    target_include_directories(ep_allocator_tests PRIVATE tests)
    target_include_directories(ep_allocator_tests SYSTEM PRIVATE ${EP_TORCH_INCLUDE_DIRS} ${CUDAToolkit_INCLUDE_DIRS})
    list(GET EP_TORCH_LIBRARIES 0 one_of_torch)
    cmake_path(GET one_of_torch PARENT_PATH torch_libraries)
    target_link_options(ep_allocator_tests PRIVATE -Wl,--no-as-needed -Wl,--allow-shlib-undefined)
    target_link_libraries(ep_allocator_tests PRIVATE ep_core ep_no_driver GTest::gtest GTest::gtest_main
      ${torch_libraries}/libtorch_cuda.so ${torch_libraries}/libc10_cuda.so ${torch_libraries}/libtorch_cpu.so
      ${torch_libraries}/libc10.so)
    add_dependencies(cuda_tests ep_allocator_tests)
    gtest_discover_tests(ep_allocator_tests DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60 PROPERTIES TIMEOUT 120)
  endif()
else()
  # No package of GoogleTest is on PyPI, so a bare machine goes without; ctest says so.
  message(WARNING "nccl_ep: GoogleTest was not found, the C++ tests are skipped (Debian: apt-get install libgtest-dev)")
  add_test(NAME cpp_tests COMMAND ${CMAKE_COMMAND} -E echo "skipped: GoogleTest was not found")
  set_tests_properties(cpp_tests PROPERTIES SKIP_REGULAR_EXPRESSION "skipped")
endif()

function(ep_check_exports target pattern)
  if(TARGET ${target})
    add_test(NAME exports.${target} COMMAND ${PROJECT_SOURCE_DIR}/tools/check_exports.sh $<TARGET_FILE:${target}> ${pattern})
  endif()
endfunction()
if(NOT NCCL_EP_SANITIZE)
  ep_check_exports(ncclep "^ncclEpx?[A-Z]")
  ep_check_exports(_C "^PyInit__C$")
endif()
