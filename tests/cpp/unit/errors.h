// What a call throws.
#pragma once

#include <string>

#include "base/check.h"

namespace ep {

// The text of the Error that `body` throws, "" if none.
template <class Body>
std::string error_of(Body body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "";
}

}  // namespace ep
