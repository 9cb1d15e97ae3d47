// Structs of callers that were built with an older or a newer header: read as this library's, missing fields as INIT
// leaves them. What a newer header has behind the fields that are known here is not looked at.
#pragma once

#include <array>
#include <cstddef>
#include <cstring>
#include <span>

#include "base/check.h"
#include "nccl_epx.h"

namespace ep::c {

// A field of an enumeration as a number: a caller may have put any number there.
template <class Enum>
uint32_t number_of(const Enum& field) {
  static_assert(sizeof(Enum) == sizeof(uint32_t));
  uint32_t number;
  std::memcpy(&number, &field, sizeof number);
  return number;
}
// Where a caller left the default, or gave a number of `most` at the most.
template <class Enum>
uint32_t choice_of(const Enum& field, uint32_t most, const char* name) {
  const uint32_t number = number_of(field);
  EP_CHECK(number <= most, name, " ", number, " is unknown");
  return number;
}

// The sizes that versions of a struct have had, all of them at the ends of fields.
template <class T>
struct Sized;
#define EP_C_STRUCT(type, ...)                                                   \
  template <>                                                                    \
  struct Sized<type> {                                                           \
    static constexpr const char* kName = #type;                                  \
    static constexpr std::array kSizes = std::to_array<unsigned>({__VA_ARGS__}); \
    static_assert(kSizes.back() == sizeof(type));                                \
  };
EP_C_STRUCT(ncclEpTensor_t, NCCL_EP_TENSOR_V1_SIZE)
EP_C_STRUCT(ncclEpTensorAllocConfig_t, NCCL_EP_TENSOR_ALLOC_CONFIG_V1_SIZE)
EP_C_STRUCT(ncclEpGroupConfig_t, NCCL_EP_GROUP_CONFIG_V1_SIZE, NCCL_EP_GROUP_CONFIG_V2_SIZE)
EP_C_STRUCT(ncclEpHandleConfig_t, NCCL_EP_HANDLE_CONFIG_V1_SIZE)
EP_C_STRUCT(ncclEpLayoutInfo_t, NCCL_EP_LAYOUT_INFO_V1_SIZE, NCCL_EP_LAYOUT_INFO_V2_SIZE)
EP_C_STRUCT(ncclEpDispatchInputs_t, NCCL_EP_DISPATCH_INPUTS_V1_SIZE)
EP_C_STRUCT(ncclEpDispatchOutputs_t, NCCL_EP_DISPATCH_OUTPUTS_V1_SIZE)
EP_C_STRUCT(ncclEpDispatchConfig_t, NCCL_EP_DISPATCH_CONFIG_V1_SIZE, NCCL_EP_DISPATCH_CONFIG_V2_SIZE)
EP_C_STRUCT(ncclEpCombineInputs_t, NCCL_EP_COMBINE_INPUTS_V1_SIZE, NCCL_EP_COMBINE_INPUTS_V2_SIZE)
EP_C_STRUCT(ncclEpCombineOutputs_t, NCCL_EP_COMBINE_OUTPUTS_V1_SIZE)
EP_C_STRUCT(ncclEpCombineConfig_t, NCCL_EP_COMBINE_CONFIG_V1_SIZE, NCCL_EP_COMBINE_CONFIG_V2_SIZE)
EP_C_STRUCT(ncclEpCompleteConfig_t, NCCL_EP_COMPLETE_CONFIG_V1_SIZE)
EP_C_STRUCT(ncclEpxGroupOptions_t, sizeof(ncclEpxGroupOptions_t))
EP_C_STRUCT(ncclEpxGroupInfo_t, sizeof(ncclEpxGroupInfo_t))
EP_C_STRUCT(ncclEpxHandleOptions_t, sizeof(ncclEpxHandleOptions_t))
EP_C_STRUCT(ncclEpxHandleInfo_t, sizeof(ncclEpxHandleInfo_t))
EP_C_STRUCT(ncclEpxDispatchExtra_t, sizeof(ncclEpxDispatchExtra_t))
EP_C_STRUCT(ncclEpxCombineExtra_t, sizeof(ncclEpxCombineExtra_t))
#undef EP_C_STRUCT

// Descriptors that ncclEpTensorAlloc made.
constexpr unsigned kAllocatedMagic = 0xBEEFBEEFu;

void read_struct(void* full, std::span<const unsigned> sizes, const void* given, bool is_tensor, const char* type,
                 const char* name);
void write_struct(void* given, const void* full, size_t known);

// Filled as by INIT.
template <class T>
T filled() {
  constexpr bool kIsTensor = std::is_same_v<T, ncclEpTensor_t>;
  return NCCL_EP_STRUCT_INIT(T, kIsTensor ? NCCL_EP_TENSOR_MAGIC : NCCL_EP_MAGIC);
}

// `name`: of the argument.
template <class T>
T take(const T* given, const char* name) {
  T full = filled<T>();
  read_struct(&full, Sized<T>::kSizes, given, std::is_same_v<T, ncclEpTensor_t>, Sized<T>::kName, name);
  return full;
}

template <class T>
T take_or_default(const T* given, const char* name) {
  return given == nullptr ? filled<T>() : take(given, name);
}

// Of a number that is yes or no.
inline void check_flag(int32_t value, const char* name) {
  EP_CHECK(value == 0 || value == 1, name, " is ", value, ", must be 0 or 1");
}

// Fields that a later version may give a meaning to.
template <class T>
void check_reserved(const T& full) {
  EP_CHECK(full.reserved == 0, "reserved of ", Sized<T>::kName, " is ", full.reserved, ", must be 0");
}

// Everything behind the head, as far as the caller's struct reaches. The caller's was taken before.
template <class T>
void give(T* given, const T& full) {
  write_struct(given, &full, sizeof full);
}

}  // namespace ep::c
