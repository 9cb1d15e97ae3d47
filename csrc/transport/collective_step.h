// A step that every rank takes and that fails on all ranks if it fails on one, so that no rank goes on alone and waits.
#pragma once

#include <exception>
#include <string>

#include "base/check.h"
#include "transport/transport.h"

namespace ep {

// The rank whose step failed throws its own error, the others one that names the first such rank.
template <class Step>
void on_all_ranks(Bootstrap& bootstrap, Step&& step) {
  std::exception_ptr own;
  std::string outcome;  // empty, or the kind of the error and its text
  try {
    step();
  } catch (const Error& error) {
    own = std::current_exception();
    outcome = static_cast<char>('0' + static_cast<int>(error.kind())) + std::string(error.what());
  } catch (const std::exception& error) {
    own = std::current_exception();
    outcome = static_cast<char>('0' + static_cast<int>(ErrorKind::kSystem)) + std::string(error.what());
  }
  const auto outcomes = bootstrap.allgather(outcome);
  if (own) std::rethrow_exception(own);
  for (size_t r = 0; r < outcomes.size(); r++) {
    if (!outcomes[r].empty()) {
      raise(static_cast<ErrorKind>(outcomes[r][0] - '0'), "on rank ", r, ": ", outcomes[r].substr(1));
    }
  }
}

}  // namespace ep
