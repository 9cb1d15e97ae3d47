# libnccl_ep.so with its headers, CMake package and pkg-config file.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

add_library(ncclep SHARED $<TARGET_OBJECTS:ep_api>)
# The name and the version of NCCL EP, whose place it takes.
file(STRINGS csrc/include/nccl_ep.h api REGEX "^#define NCCL_EP_(MAJOR|MINOR|PATCH) [0-9]+$")
string(REGEX REPLACE "[^0-9;]+" "" api "${api}")
string(REPLACE ";" "." api "${api}")
set_target_properties(ncclep PROPERTIES OUTPUT_NAME nccl_ep VERSION ${api} SOVERSION 0 LINKER_LANGUAGE CXX)
target_include_directories(ncclep PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/csrc/include>
                                         $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_link_libraries(ncclep PRIVATE ${backends})
target_link_options(ncclep PRIVATE -Wl,--no-undefined)
ep_export_only(ncclep cmake/exports_c.map)

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/ncclep)
install(TARGETS ncclep EXPORT ncclep LIBRARY COMPONENT c_library)
install(FILES csrc/include/nccl_ep.h csrc/include/nccl_epx.h TYPE INCLUDE COMPONENT c_library)
install(EXPORT ncclep FILE ncclep-config.cmake NAMESPACE ncclep:: DESTINATION ${package_dir} COMPONENT c_library)
write_basic_package_version_file(ncclep-config-version.cmake COMPATIBILITY SameMinorVersion)
file(RELATIVE_PATH pc_to_prefix /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
configure_file(cmake/ncclep.pc.in ncclep.pc @ONLY)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/ncclep-config-version.cmake DESTINATION ${package_dir} COMPONENT c_library)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/ncclep.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT c_library)
