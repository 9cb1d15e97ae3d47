// This process among others, and objects of it that its ranks find by random tokens, so that no address travels.
// Whether another process has ended.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "base/fork.h"
#include "transport/file.h"

namespace ep {

// 128 random bits, which are never drawn twice.
struct Token {
  uint64_t words[2] = {};
  auto operator<=>(const Token&) const = default;
};
Token random_token();
std::string hex_of(const Token& token);

// The number is random: in containers, two processes may have one id. A fork has another id.
struct ProcessIdentity {
  int64_t pid = 0;
  uint64_t number = 0;
  bool operator==(const ProcessIdentity&) const = default;
};
ProcessIdentity own_process();

// Tells whether a process has ended, all of its threads and open files with it, whatever its id is given to later. An
// empty watch has none that runs. This process is not watched: whoever asks for its end asks nothing.
class ProcessWatch {
 public:
  ProcessWatch() = default;
  // Throws kSystem where there is no such process.
  explicit ProcessWatch(const ProcessIdentity& process);
  const ProcessIdentity& process() const { return process_; }
  // Waits for its end, until `seconds` are over.
  bool has_ended_within(double seconds) const;

 private:
  ProcessIdentity process_;
  File pidfd_;
};

// Objects of type T that ranks of this process share.
template <class T>
class LocalObjects {
 public:
  // The object can be found for as long as somebody holds it.
  static Token add(const std::shared_ptr<T>& object) {
    const Token token = random_token();
    std::lock_guard lock(mutex());
    std::erase_if(objects(), [](const auto& entry) { return entry.second.expired(); });
    objects()[token] = object;
    return token;
  }
  // Null: this process has no such object.
  static std::shared_ptr<T> find(const Token& token) {
    std::lock_guard lock(mutex());
    const auto found = objects().find(token);
    return found == objects().end() ? nullptr : found->second.lock();
  }

 private:
  static std::mutex& mutex() { return process_mutex<LocalObjects, std::mutex>(); }
  // Outlives every static object that holds a buffer.
  static std::map<Token, std::weak_ptr<T>>& objects() {
    static auto& objects = *new std::map<Token, std::weak_ptr<T>>;
    return objects;
  }
};

}  // namespace ep
