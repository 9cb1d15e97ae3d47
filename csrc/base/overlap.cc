#include "base/overlap.h"

namespace ep {
namespace {

std::string text_of(const char* name, const Extent& memory) {
  if (memory.sizes == nullptr) return concat(name, " of ", memory.bytes, " bytes");
  return concat(name, " of shape ", text_of_sizes(memory.sizes, memory.ndim));
}

}  // namespace

std::string text_of_sizes(const int64_t* sizes, int ndim) {
  std::string text = "[";
  for (int i = 0; i < ndim; i++) text += concat(i == 0 ? "" : ", ", sizes[i]);
  return text + "]";
}

void OverlapCheck::refuse(const char* name, const Extent& memory, const Noted& other) {
  raise(ErrorKind::kInvalidArgument, text_of(name, memory), " overlaps ", text_of(other.name, other.memory),
        ", which is ", other.use, " while it is written");
}

}  // namespace ep
