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

ncclEpResult_t keep(ncclEpResult_t result, const char* function, const char* what) noexcept {
  std::snprintf(text, sizeof text, "%s: %s", function, what);
  name_the_group();
  return result;
}

ncclEpResult_t result_of(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::kInvalidArgument:
      return NCCL_EP_INVALID_ARGUMENT;
    case ErrorKind::kInvalidUsage:
      return NCCL_EP_INVALID_USAGE;
    case ErrorKind::kTimeout:
      return NCCL_EP_TIMEOUT;
    case ErrorKind::kMismatch:
      return NCCL_EP_MISMATCH;
    case ErrorKind::kSystem:
      return NCCL_EP_SYSTEM_ERROR;
  }
  return NCCL_EP_SYSTEM_ERROR;
}

}  // namespace

ncclEpResult_t take_exception(const char* function) noexcept {
  try {
    throw;
  } catch (const ApiError& error) {
    return keep(error.result(), function, error.what());
  } catch (const Error& error) {
    return keep(result_of(error.kind()), function, error.what());
  } catch (const std::bad_alloc&) {
    return keep(NCCL_EP_SYSTEM_ERROR, function, "out of host memory");
  } catch (const std::exception& error) {
    return keep(NCCL_EP_SYSTEM_ERROR, function, error.what());
  } catch (...) {
    return keep(NCCL_EP_SYSTEM_ERROR, function, "an exception that is no std::exception, from a callback perhaps");
  }
}

const char* last_error() noexcept { return text; }

}  // namespace ep::c

extern "C" {

ncclEpResult_t ncclEpGetVersion(int* version) {
  return ep::c::guarded("ncclEpGetVersion", [&] {
    EP_CHECK(version != nullptr, "version is null");
    *version = NCCL_EP_VERSION;
  });
}

const char* ncclEpGetErrorString(ncclEpResult_t result) {
  switch (result) {
    case NCCL_EP_SUCCESS:
      return "success";
    case NCCL_EP_INVALID_ARGUMENT:
      return "invalid argument";
    case NCCL_EP_INVALID_USAGE:
      return "invalid usage";
    case NCCL_EP_TIMEOUT:
      return "timeout";
    case NCCL_EP_MISMATCH:
      return "mismatch between ranks";
    case NCCL_EP_SYSTEM_ERROR:
      return "system error";
    case NCCL_EP_NOT_SUPPORTED:
      return "not supported";
    case NCCL_EP_OVERFLOW:
      return "overflow";
    default:
      return "unknown result";
  }
}

const char* ncclEpGetLastError(void) { return ep::c::last_error(); }

}  // extern "C"
