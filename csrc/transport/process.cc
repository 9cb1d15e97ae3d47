#include "transport/process.h"

#include <unistd.h>

#include <cstdio>
#include <random>

namespace ep {
namespace {

uint64_t random_word(std::random_device& random) { return static_cast<uint64_t>(random()) << 32 | random(); }

}  // namespace

Token random_token() {
  std::random_device random;
  return {{random_word(random), random_word(random)}};
}

std::string hex_of(const Token& token) {
  char text[33];
  std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(token.words[0]),
                static_cast<unsigned long long>(token.words[1]));
  return text;
}

ProcessIdentity own_process() {
  static const uint64_t number = random_token().words[0];
  return {getpid(), number};
}

}  // namespace ep
