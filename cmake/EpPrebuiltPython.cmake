# Where NCCL_EP_PREBUILT has the extension for this Python too, that is what is installed. Sets is_prebuilt.
load_cache(${NCCL_EP_PREBUILT} READ_WITH_PREFIX prebuilt_ Python_EXECUTABLE NCCL_EP_BUILD_PYTHON)
set(is_prebuilt OFF)
if(prebuilt_NCCL_EP_BUILD_PYTHON AND prebuilt_Python_EXECUTABLE STREQUAL "${Python_EXECUTABLE}")
  set(is_prebuilt ON)
  message(STATUS "nccl_ep: the extension of ${NCCL_EP_PREBUILT}")
  set(install_prebuilt "--install;${NCCL_EP_PREBUILT};--component;python;--prefix")
  install(CODE "execute_process(COMMAND ${CMAKE_COMMAND} ${install_prebuilt} \${CMAKE_INSTALL_PREFIX} COMMAND_ERROR_IS_FATAL ANY)"
          COMPONENT python)
endif()
