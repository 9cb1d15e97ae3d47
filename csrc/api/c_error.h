// Errors at the C boundary: nothing is thrown across it, and the text stays with the thread.
#pragma once

#include <cxxabi.h>

#include "base/check.h"
#include "nccl_ep.h"

namespace ep::c {

// For results that the layers below do not know.
class ApiError : public Error {
 public:
  ApiError(ncclEpResult_t result, const std::string& text) : Error(ErrorKind::kInvalidUsage, text), result_(result) {}
  ncclEpResult_t result() const { return result_; }

 private:
  ncclEpResult_t result_;
};

// The result for the exception in flight, whose text becomes the thread's last error.
ncclEpResult_t take_exception(const char* function) noexcept;
const char* last_error() noexcept;

template <class Body>
ncclEpResult_t guarded(const char* function, Body&& body) {
  try {
    body();
    return NCCL_EP_SUCCESS;
  } catch (const abi::__forced_unwind&) {  // pthread_cancel, which must not be held up
    throw;
  } catch (...) {
    return take_exception(function);
  }
}

}  // namespace ep::c
