// Steps that every rank takes and that fail on all ranks if they fail on one, so that no rank goes on alone and waits.
// But a rank that is interrupted leaves alone.
#pragma once

#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "base/check.h"
#include "base/interruption.h"
#include "transport/process.h"
#include "transport/transport.h"

namespace ep {

template <class T>
std::string_view bytes_of(const T& value) {
  static_assert(std::is_trivially_copyable_v<T>);
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

// `what`: what the record describes, as "its window".
template <class T>
T record_of(int rank, std::string_view bytes, const char* what) {
  static_assert(std::is_trivially_copyable_v<T>);
  if (bytes.size() != sizeof(T)) {
    raise(ErrorKind::kMismatch, "rank ", rank, " sent ", bytes.size(), " bytes to describe ", what, ", expected ",
          sizeof(T));
  }
  T value;
  std::memcpy(&value, bytes.data(), sizeof value);
  return value;
}

// The records of all ranks.
template <class T>
std::vector<T> gather(Bootstrap& bootstrap, const T& mine, const char* what) {
  std::vector<T> all;
  for (const std::string& bytes : bootstrap.allgather(bytes_of(mine))) {
    all.push_back(record_of<T>(bootstrap.rank_at(static_cast<int>(all.size())), bytes, what));
  }
  return all;
}

[[noreturn]] inline void refuse_outcome(int rank, size_t bytes) {
  raise(ErrorKind::kMismatch, "rank ", rank, " sent ", bytes, " bytes that are not the outcome of its step");
}

// What the step of every rank returned, as bytes. The rank whose step failed throws its own error, the others one that
// names the first such rank.
template <class Step>
std::vector<std::string> outcomes_of(Bootstrap& bootstrap, Step&& step) {
  constexpr char kDone = '=';  // before the bytes; else there is the kind of the error, and its text
  const auto failed = [](ErrorKind kind, const char* text) {
    return static_cast<char>('0' + static_cast<int>(kind)) + std::string(text);
  };
  std::exception_ptr own;
  std::string outcome;
  try {
    outcome.assign(1, kDone).append(step());
  } catch (const Interrupted&) {
    throw;  // without a word to the others, whom it may have to wait for
  } catch (const Error& error) {
    own = std::current_exception();
    outcome = failed(error.kind(), error.what());
  } catch (const std::exception& error) {
    own = std::current_exception();
    outcome = failed(ErrorKind::kSystem, error.what());
  }
  auto outcomes = bootstrap.allgather(outcome);
  if (own) std::rethrow_exception(own);
  for (size_t r = 0; r < outcomes.size(); r++) {
    const char first = outcomes[r].empty() ? '\0' : outcomes[r][0];
    if (first == kDone) {
      outcomes[r].erase(0, 1);
    } else if (first >= '0' && first <= '0' + static_cast<int>(ErrorKind::kSystem)) {
      raise(static_cast<ErrorKind>(first - '0'), "on rank ", bootstrap.rank_at(static_cast<int>(r)), ": ",
            outcomes[r].substr(1));
    } else {
      refuse_outcome(bootstrap.rank_at(static_cast<int>(r)), outcomes[r].size());
    }
  }
  return outcomes;
}

template <class Step>
void on_all_ranks(Bootstrap& bootstrap, Step&& step) {
  const auto outcomes = outcomes_of(bootstrap, [&] {
    step();
    return std::string_view();
  });
  for (size_t r = 0; r < outcomes.size(); r++) {
    if (!outcomes[r].empty()) refuse_outcome(bootstrap.rank_at(static_cast<int>(r)), outcomes[r].size() + 1);
  }
}

// The records that the ranks' steps return.
template <class Step>
auto gather_from_steps(Bootstrap& bootstrap, Step&& step, const char* what) {
  std::vector<std::invoke_result_t<Step>> all;
  const auto outcomes = outcomes_of(bootstrap, [&] { return std::string(bytes_of(step())); });
  for (const std::string& bytes : outcomes) {
    all.push_back(record_of<std::invoke_result_t<Step>>(bootstrap.rank_at(static_cast<int>(all.size())), bytes, what));
  }
  return all;
}

// An object of this process that rank `rank` has added to LocalObjects.
template <class T>
std::shared_ptr<T> local_object(int rank, const Token& token, const char* what) {
  std::shared_ptr<T> object = LocalObjects<T>::find(token);
  if (object == nullptr) {
    raise(ErrorKind::kMismatch, "rank ", rank, " says that ", what, " ", hex_of(token),
          " is in this process, where there is none: the rank has given up, or its record is damaged");
  }
  return object;
}

// What rank 0 makes, for all ranks, which are threads of one process.
template <class T, class Make>
std::shared_ptr<T> made_by_rank_0(Bootstrap& bootstrap, Make&& make) {
  std::shared_ptr<T> made;
  const auto tokens = gather_from_steps(
      bootstrap,
      [&] {
        if (bootstrap.rank() != 0) return Token{};
        made = make();
        return LocalObjects<T>::add(made);
      },
      "what rank 0 made");
  on_all_ranks(bootstrap, [&] { made = local_object<T>(0, tokens[0], "what it made"); });
  return made;
}

}  // namespace ep
