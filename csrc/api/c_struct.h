// Structs of callers that were built with an older or a newer nccl_ep.h: read as this library's, missing fields as INIT
// leaves them. A newer caller is served as long as it does not use what this library has not.
#pragma once

#include <cstddef>
#include <span>

#include "base/check.h"
#include "nccl_ep.h"

namespace ep::c {

struct Head {
  size_t size;
  uint32_t magic, version;
};

template <class T>
struct Init;
#define EP_C_STRUCT(type, init)                    \
  template <>                                      \
  struct Init<type> {                              \
    static constexpr const char* kName = #type;    \
    static constexpr type value() { return init; } \
  };
EP_C_STRUCT(ncclEpTensor_t, NCCL_EP_TENSOR_INIT)
EP_C_STRUCT(ncclEpGroupConfig_t, NCCL_EP_GROUP_CONFIG_INIT)
EP_C_STRUCT(ncclEpGroupInfo_t, NCCL_EP_GROUP_INFO_INIT)
EP_C_STRUCT(ncclEpHandleConfig_t, NCCL_EP_HANDLE_CONFIG_INIT)
EP_C_STRUCT(ncclEpHandleInfo_t, NCCL_EP_HANDLE_INFO_INIT)
EP_C_STRUCT(ncclEpDispatchInputs_t, NCCL_EP_DISPATCH_INPUTS_INIT)
EP_C_STRUCT(ncclEpDispatchOutputs_t, NCCL_EP_DISPATCH_OUTPUTS_INIT)
EP_C_STRUCT(ncclEpDispatchConfig_t, NCCL_EP_DISPATCH_CONFIG_INIT)
EP_C_STRUCT(ncclEpCombineInputs_t, NCCL_EP_COMBINE_INPUTS_INIT)
EP_C_STRUCT(ncclEpCombineOutputs_t, NCCL_EP_COMBINE_OUTPUTS_INIT)
EP_C_STRUCT(ncclEpCombineConfig_t, NCCL_EP_COMBINE_CONFIG_INIT)
EP_C_STRUCT(ncclEpCompleteConfig_t, NCCL_EP_COMPLETE_CONFIG_INIT)
#undef EP_C_STRUCT

// Of an int32 that is yes or no.
inline void check_flag(int32_t value, const char* name) {
  EP_CHECK(value == 0 || value == 1, name, " is ", value, ", must be 0 or 1");
}

struct Field {
  size_t offset, bytes;
};
// The arrays of a struct. An older struct ends before one or behind it.
template <class T>
constexpr std::span<const Field> kArrays{};
template <class T>
constexpr Field kExtraArray[] = {{offsetof(T, extra), sizeof(T::extra)}};
constexpr Field kTensorArrays[] = {{offsetof(ncclEpTensor_t, sizes), sizeof(ncclEpTensor_t::sizes)},
                                   {offsetof(ncclEpTensor_t, strides), sizeof(ncclEpTensor_t::strides)}};
template <>
constexpr std::span<const Field> kArrays<ncclEpTensor_t>{kTensorArrays};
template <>
constexpr std::span<const Field> kArrays<ncclEpDispatchInputs_t>{kExtraArray<ncclEpDispatchInputs_t>};
template <>
constexpr std::span<const Field> kArrays<ncclEpDispatchOutputs_t>{kExtraArray<ncclEpDispatchOutputs_t>};

void read_struct(void* full, size_t known, std::span<const Field> arrays, const void* given, const char* type,
                 const char* name);
void write_struct(void* given, const void* full, size_t known);

// `name`: of the argument.
template <class T>
T take(const T* given, const char* name) {
  T full = Init<T>::value();
  read_struct(&full, sizeof full, kArrays<T>, given, Init<T>::kName, name);
  return full;
}

template <class T>
T take_or_default(const T* given, const char* name) {
  return given == nullptr ? Init<T>::value() : take(given, name);
}

// Fields that a later version may give a meaning to.
template <class T>
void check_reserved(const T& full) {
  EP_CHECK(full.reserved == 0, "reserved of ", Init<T>::kName, " is ", full.reserved, ", must be 0");
}

// Everything behind the head, as far as the caller's struct reaches. The caller's was taken before.
template <class T>
void give(T* given, const T& full) {
  write_struct(given, &full, sizeof full);
}

}  // namespace ep::c
