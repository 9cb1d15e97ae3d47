# How every target of ours is compiled and linked.

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 11)
  message(FATAL_ERROR "nccl_ep needs g++ 11 or newer; ${CMAKE_CXX_COMPILER} is ${CMAKE_CXX_COMPILER_VERSION}.")
endif()

set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_COMPILE_WARNING_AS_ERROR ${NCCL_EP_WERROR})
find_package(Threads REQUIRED)

if(NCCL_EP_SANITIZE STREQUAL "thread")
  set(sanitize -fsanitize=thread)
elseif(NCCL_EP_SANITIZE STREQUAL "address")
  set(sanitize -fsanitize=address,undefined -fno-sanitize-recover=undefined)
elseif(NCCL_EP_SANITIZE)
  message(FATAL_ERROR "NCCL_EP_SANITIZE is '${NCCL_EP_SANITIZE}'; it can be thread, address or empty.")
endif()
if(NCCL_EP_SANITIZE)
  add_compile_options(${sanitize} -g -fno-omit-frame-pointer)
  add_link_options(${sanitize})
endif()

# Flags, include root and visibility. No contraction of a*b+c: results are the same bits on every backend. The machine
# code of kernels is compressed, to an eighth.
function(ep_configure target)
  target_include_directories(${target} PUBLIC ${PROJECT_SOURCE_DIR}/csrc)
  target_compile_options(${target} PRIVATE
    "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-Wpedantic;-ffp-contract=off>"
    "$<$<COMPILE_LANGUAGE:CUDA>:--fmad=false;--expt-relaxed-constexpr;-Xfatbin=-compress-all>"
    "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-ffp-contract=off>")
  if(NCCL_EP_TESTING)
    target_compile_definitions(${target} PRIVATE EP_TESTING=1)
  endif()
  set_target_properties(${target} PROPERTIES
    CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
endfunction()

# Libraries are built when a product needs them.
function(ep_add_library target kind)
  add_library(${target} ${kind} EXCLUDE_FROM_ALL ${ARGN})
  ep_configure(${target})
endfunction()

# A shared library shows the symbols that its version script names, and binds its own calls to itself. With
# NCCL_EP_GLIBC_STUBS it starts on systems from glibc 2.28 on; what was a library of its own there is named.
function(ep_export_only target version_script)
  if(NCCL_EP_GLIBC_STUBS)
    target_sources(${target} PRIVATE ${PROJECT_SOURCE_DIR}/cmake/glibc_2_28.cc)
    target_link_options(${target} PRIVATE -L${NCCL_EP_GLIBC_STUBS}
                        -Wl,--push-state,--no-as-needed,-lpthread,-ldl,-lrt,--pop-state)
  endif()
  set(script ${PROJECT_SOURCE_DIR}/${version_script})
  target_link_options(${target} PRIVATE -Wl,-Bsymbolic -Wl,--version-script=${script})
  set_property(TARGET ${target} APPEND PROPERTY LINK_DEPENDS ${script})
endfunction()

# NCCL's headers come before the toolkit's, which may hold an older nccl.h. (To nvcc the toolkit's are no system headers,
# so NCCL's must not be either.) NCCL is never linked: the few host functions are looked up in the process at run time.
function(ep_use_cuda target scope)
  target_include_directories(${target} BEFORE ${scope} $<$<COMPILE_LANGUAGE:CUDA>:${EP_NCCL_INCLUDE_DIR}>)
  target_include_directories(${target} SYSTEM BEFORE ${scope} $<$<COMPILE_LANGUAGE:CXX>:${EP_NCCL_INCLUDE_DIR}>)
  target_compile_definitions(${target} ${scope} EP_WITH_CUDA=1)
  target_link_libraries(${target} ${scope} ep_core CUDA::cudart_static)
endfunction()

# A library that both products load on demand lies beside each of them.
function(ep_install_beside target)
  if(NCCL_EP_IN_PLACE)
    set_target_properties(${target} PROPERTIES LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_SOURCE_DIR}/nccl_ep)
  endif()
  install(TARGETS ${target} LIBRARY DESTINATION nccl_ep COMPONENT python)
  if(NCCL_EP_BUILD_C_LIBRARY)
    include(GNUInstallDirs)
    install(TARGETS ${target} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT c_library)
  endif()
endfunction()

# Files of a folder that are compiled as one: of a small file a compiler spends most of its time on headers. Names of
# anonymous namespaces meet there. Takes names without .cc.
function(ep_together group folder)
  list(TRANSFORM ARGN PREPEND ${folder}/)
  list(TRANSFORM ARGN APPEND .cc)
  set_source_files_properties(${ARGN} PROPERTIES UNITY_GROUP ${group})
endfunction()
