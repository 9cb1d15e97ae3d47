// Steps that every rank takes and that fail on all ranks if they fail on one, so that no rank goes on alone and waits.
// But a rank that is interrupted leaves alone.
#pragma once

#include <cstring>
#include <exception>
#include <memory>
#include <string>

#include "base/check.h"
#include "base/interruption.h"
#include "transport/transport.h"

namespace ep {

// The rank whose step failed throws its own error, the others one that names the first such rank.
template <class Step>
void on_all_ranks(Bootstrap& bootstrap, Step&& step) {
  std::exception_ptr own;
  std::string outcome;  // empty, or the kind of the error and its text
  try {
    step();
  } catch (const Interrupted&) {
    throw;  // without a word to the others, whom it may have to wait for
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

// What rank 0 makes, for all ranks, which are threads of one process.
template <class T, class Make>
std::shared_ptr<T> made_by_rank_0(Bootstrap& bootstrap, Make&& make) {
  std::shared_ptr<T> made;
  on_all_ranks(bootstrap, [&] {
    if (bootstrap.rank() == 0) made = make();
  });
  const std::shared_ptr<T>* mine = &made;
  const auto all = bootstrap.allgather({reinterpret_cast<const char*>(&mine), sizeof mine});
  if (bootstrap.rank() != 0) {
    const std::shared_ptr<T>* first = nullptr;
    std::memcpy(&first, all[0].data(), sizeof first);
    made = *first;
  }
  bootstrap.allgather("taken");  // until then rank 0's pointer stays where it is
  return made;
}

}  // namespace ep
