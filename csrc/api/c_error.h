// Errors at the C boundary: nothing is thrown across it, and the text stays with the thread.
#pragma once

#include <cxxabi.h>

#include "base/check.h"
#include "nccl_epx.h"

namespace ep::c {

// For results that the layers below do not know.
class ApiError : public Error {
 public:
  ApiError(ncclEpxError_t kind, const std::string& text) : Error(ErrorKind::kInvalidUsage, text), kind_(kind) {}
  ncclEpxError_t kind() const { return kind_; }

 private:
  ncclEpxError_t kind_;
};

// The result for the exception in flight, whose text becomes the thread's last error.
ncclResult_t take_exception(const char* function) noexcept;

template <class Body>
ncclResult_t guarded(const char* function, Body&& body) {
  try {
    body();
    return ncclSuccess;
  } catch (const abi::__forced_unwind&) {  // pthread_cancel, which must not be held up
    throw;
  } catch (...) {
    return take_exception(function);
  }
}

}  // namespace ep::c
