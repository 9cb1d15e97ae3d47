# ep_tests (GoogleTest, CPU), and checks of what the libraries export.

find_package(GTest QUIET)
if(GTest_FOUND)
  include(GoogleTest)
  ep_add_library(ep_core_testing STATIC ${core_sources} ${api_sources})
  target_compile_definitions(ep_core_testing PUBLIC EP_TESTING=1)
  target_include_directories(ep_core_testing PUBLIC csrc/include)
  target_link_libraries(ep_core_testing PUBLIC Threads::Threads ${CMAKE_DL_LIBS} rt)

  # The host half of the emulated GPUs' network: it needs neither the emulator nor CUDA.
  add_executable(ep_tests ${test_sources} tests/gpu_emulator/network/nic.cc)
  ep_configure(ep_tests)
  target_include_directories(ep_tests PRIVATE tests/cpp tests)
  target_link_libraries(ep_tests PRIVATE ep_core_testing GTest::gtest GTest::gtest_main)
  gtest_discover_tests(ep_tests DISCOVERY_MODE PRE_TEST DISCOVERY_TIMEOUT 60
    PROPERTIES TIMEOUT 600 ENVIRONMENT "TSAN_OPTIONS=halt_on_error=1")
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
  ep_check_exports(ncclep "^ncclEp[A-Z]")
  ep_check_exports(_C "^PyInit__C$")
endif()
