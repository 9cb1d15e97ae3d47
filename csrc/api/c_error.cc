#include "api/c_error.h"

#include <algorithm>
#include <cstdio>
#include <new>
#include <string_view>

namespace ep::c {
namespace {

thread_local char text[4096] = "";  // no allocation: it must work when memory has run out

// The layers below call a group "the buffer", as Python does.
void name_the_group() {
  constexpr std::string_view kTheirs = "the buffer", kOurs = "the group";
  static_assert(kOurs.size() <= kTheirs.size());
  char* to = text;
  for (std::string_view rest = text; !rest.empty();) {
    const bool is_theirs = rest.starts_with(kTheirs);
    to = is_theirs ? std::copy(kOurs.begin(), kOurs.end(), to) : std::copy_n(rest.begin(), 1, to);
    rest.remove_prefix(is_theirs ? kTheirs.size() : 1);
  }
  *to = '\0';
}

thread_local ncclEpxError_t last_kind = NCCL_EPX_NO_ERROR;

ncclResult_t result_of(ncclEpxError_t kind) {
  switch (kind) {
    case NCCL_EPX_INVALID_ARGUMENT:
    case NCCL_EPX_NOT_SUPPORTED:
      return ncclInvalidArgument;
    case NCCL_EPX_TIMEOUT:
      return ncclRemoteError;
    case NCCL_EPX_SYSTEM_ERROR:
      return ncclSystemError;
    default:
      return ncclInvalidUsage;
  }
}

ncclResult_t keep(ncclEpxError_t kind, const char* function, const char* what) noexcept {
  std::snprintf(text, sizeof text, "%s: %s", function, what);
  name_the_group();
  last_kind = kind;
  return result_of(kind);
}

ncclEpxError_t kind_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInvalidArgument:
      return NCCL_EPX_INVALID_ARGUMENT;
    case ErrorKind::kInvalidUsage:
      return NCCL_EPX_INVALID_USAGE;
    case ErrorKind::kTimeout:
      return NCCL_EPX_TIMEOUT;
    case ErrorKind::kMismatch:
      return NCCL_EPX_MISMATCH;
    case ErrorKind::kSystem:
      return NCCL_EPX_SYSTEM_ERROR;
  }
  return NCCL_EPX_SYSTEM_ERROR;
}

}  // namespace

ncclResult_t take_exception(const char* function) noexcept {
  try {
    throw;
  } catch (const ApiError& error) {
    return keep(error.kind(), function, error.what());
  } catch (const Error& error) {
    return keep(kind_of(error.kind()), function, error.what());
  } catch (const std::bad_alloc&) {
    return keep(NCCL_EPX_SYSTEM_ERROR, function, "out of host memory");
  } catch (const std::exception& error) {
    return keep(NCCL_EPX_SYSTEM_ERROR, function, error.what());
  } catch (...) {
    return keep(NCCL_EPX_SYSTEM_ERROR, function, "an exception that is no std::exception, from a callback perhaps");
  }
}

}  // namespace ep::c

extern "C" {

ncclResult_t ncclEpGetVersion(int* version) {
  return ep::c::guarded("ncclEpGetVersion", [&] {
    EP_CHECK(version != nullptr, "version is null");
    *version = NCCL_EP_VERSION_CODE;
  });
}

ncclResult_t ncclEpxGetVersion(int* version) {
  return ep::c::guarded("ncclEpxGetVersion", [&] {
    EP_CHECK(version != nullptr, "version is null");
    *version = NCCL_EPX_VERSION;
  });
}

const char* ncclEpxGetErrorString(ncclEpxError_t kind) {
  switch (kind) {
    case NCCL_EPX_NO_ERROR:
      return "no error";
    case NCCL_EPX_INVALID_ARGUMENT:
      return "invalid argument";
    case NCCL_EPX_INVALID_USAGE:
      return "invalid usage";
    case NCCL_EPX_TIMEOUT:
      return "timeout";
    case NCCL_EPX_MISMATCH:
      return "mismatch between ranks";
    case NCCL_EPX_SYSTEM_ERROR:
      return "system error";
    case NCCL_EPX_NOT_SUPPORTED:
      return "not supported";
    case NCCL_EPX_OVERFLOW:
      return "overflow";
    default:
      return "unknown error";
  }
}

ncclEpxError_t ncclEpxGetLastErrorKind(void) { return ep::c::last_kind; }
const char* ncclEpxGetLastError(void) { return ep::c::text; }

}  // extern "C"
