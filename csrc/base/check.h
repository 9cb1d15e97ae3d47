// Errors with the values in their text. Every layer throws ep::Error; the C API and torch translate it.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>
#include <utility>

namespace ep {

enum class ErrorKind {
  kInvalidArgument,  // a tensor, size or option that cannot be served
  kInvalidUsage,     // right arguments at the wrong time: destroyed buffer, second un-received send
  kTimeout,          // nothing came from a peer within the deadline
  kMismatch,         // ranks disagree about the buffer or about the call
  kSystem,           // the operating system, CUDA or NCCL refused
};

class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& text) : std::runtime_error(text), kind_(kind) {}
  ErrorKind kind() const { return kind_; }

 private:
  ErrorKind kind_;
};

template <class... Parts>
std::string concat(Parts&&... parts) {
  std::ostringstream text;
  (text << ... << std::forward<Parts>(parts));
  return text.str();
}

template <class... Parts>
[[noreturn]] void raise(ErrorKind kind, Parts&&... parts) {
  throw Error(kind, concat(std::forward<Parts>(parts)...));
}

}  // namespace ep

// Refuses an argument: EP_CHECK(a % b == 0, a, " experts do not divide over ", b, " ranks")
#define EP_CHECK(condition, ...)                                                   \
  do {                                                                             \
    if (!(condition)) ::ep::raise(::ep::ErrorKind::kInvalidArgument, __VA_ARGS__); \
  } while (0)

// Refuses a call made at the wrong time.
#define EP_CHECK_USAGE(condition, ...)                                          \
  do {                                                                          \
    if (!(condition)) ::ep::raise(::ep::ErrorKind::kInvalidUsage, __VA_ARGS__); \
  } while (0)
