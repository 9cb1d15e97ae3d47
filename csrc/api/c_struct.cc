#include "api/c_struct.h"

#include <algorithm>
#include <string>

namespace ep::c {
namespace {

struct Head {
  unsigned size, magic;
};

}  // namespace

void read_struct(void* full, std::span<const unsigned> sizes, const void* given, bool is_tensor, const char* type,
                 const char* name) {
  EP_CHECK(given != nullptr, name, " is null, must be a ", type);
  Head head;
  std::memcpy(&head, given, sizeof head);
  const unsigned magic = is_tensor ? NCCL_EP_TENSOR_MAGIC : NCCL_EP_MAGIC;
  EP_CHECK(head.magic == magic || (is_tensor && head.magic == kAllocatedMagic), name, " is no ", type,
           " that was filled by its INIT macro: its magic is ", head.magic, ", must be ", magic);
  EP_CHECK(head.size >= sizes.front(), name, " is a ", type, " of ", head.size, " bytes, must have at least ",
           sizes.front());
  const unsigned known = sizes.back();
  EP_CHECK(head.size >= known || std::find(sizes.begin(), sizes.end(), head.size) != sizes.end(), name, " is a ", type,
           " of ", head.size, " bytes: no version of it ends there");
  std::memcpy(full, given, std::min(known, head.size));
}

void write_struct(void* given, const void* full, size_t known) {
  Head head;
  std::memcpy(&head, given, sizeof head);
  const size_t size = std::min<size_t>(known, head.size);
  std::memcpy(static_cast<char*>(given) + sizeof head, static_cast<const char*>(full) + sizeof head,
              size - sizeof head);
}

}  // namespace ep::c
