#include "api/c_struct.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace ep::c {
namespace {

constexpr size_t kAlignment = alignof(size_t);  // of every struct, so that its size is a multiple
constexpr size_t kMaxBytes = 65536;             // beyond it a size is no size

std::string version_text(uint32_t version) {
  return concat(version / 10000, ".", version / 100 % 100, ".", version % 100);
}

}  // namespace

void read_struct(void* full, size_t known, std::span<const Field> arrays, const void* given, const char* type,
                 const char* name) {
  EP_CHECK(given != nullptr, name, " is null, must be a ", type);
  Head head;
  std::memcpy(&head, given, sizeof head);
  EP_CHECK(head.magic == NCCL_EP_MAGIC, name, " is no ", type, " that was filled by its INIT macro: its magic is ",
           head.magic, ", must be ", NCCL_EP_MAGIC);
  EP_CHECK(head.version / 10000 == NCCL_EP_MAJOR, name, " is a ", type, " of nccl_ep.h ", version_text(head.version),
           ", this library is ", version_text(NCCL_EP_VERSION));
  EP_CHECK(head.size >= sizeof head && head.size <= kMaxBytes, name, " is a ", type, " of ", head.size,
           " bytes, must be ", sizeof head, " to ", kMaxBytes);
  const bool cuts_array = std::any_of(arrays.begin(), arrays.end(), [&](const Field& array) {
    return head.size > array.offset && head.size < array.offset + array.bytes;
  });
  EP_CHECK(head.size % kAlignment == 0 && !cuts_array, name, " is a ", type, " of ", head.size,
           " bytes, which end inside a field: no nccl_ep.h has such a ", type);
  const char* bytes = static_cast<const char*>(given);
  for (size_t i = known; i < head.size; i++) {
    EP_CHECK(bytes[i] == 0, name, " is a ", type, " of ", head.size, " bytes of nccl_ep.h ", version_text(head.version),
             " and sets byte ", i, "; this library, ", version_text(NCCL_EP_VERSION), ", knows ", known,
             " bytes of it");
  }
  std::memcpy(full, given, std::min(known, head.size));
}

void write_struct(void* given, const void* full, size_t known) {
  Head head;
  std::memcpy(&head, given, sizeof head);
  const size_t size = std::min(known, head.size);
  std::memcpy(static_cast<char*>(given) + sizeof head, static_cast<const char*>(full) + sizeof head,
              size - sizeof head);
}

}  // namespace ep::c
