#include "torch/registry.h"

#include <unistd.h>

#include <map>
#include <mutex>
#include <shared_mutex>

#include "base/check.h"

namespace ep {
namespace {

struct Entry {
  std::shared_ptr<Group> group;
  pid_t process;
};

struct Registry {
  std::shared_mutex mutex;
  std::map<std::string, Entry, std::less<>> groups;
};

Registry& registry() {
  static auto* instance = new Registry;  // never destroyed: buffers may outlive static objects
  return *instance;
}

}  // namespace

void register_group(const std::string& name, std::shared_ptr<Group> group) {
  std::unique_lock lock(registry().mutex);
  const bool is_new = registry().groups.emplace(name, Entry{std::move(group), getpid()}).second;
  EP_CHECK(is_new, "a buffer named ", name, " exists already in this process");
}

void unregister_group(const std::string& name) {
  std::unique_lock lock(registry().mutex);
  registry().groups.erase(name);
}

std::shared_ptr<Group> find_group(std::string_view name) {
  std::shared_lock lock(registry().mutex);
  const auto found = registry().groups.find(name);
  EP_CHECK_USAGE(found != registry().groups.end(), "the buffer ", name, " was destroyed, or never made here");
  // A fork has the parent's window, but neither its threads nor its place among the ranks.
  EP_CHECK_USAGE(found->second.process == getpid(), "the buffer ", name, " belongs to process ", found->second.process,
                 ", this is its fork ", getpid(), ": make a buffer here");
  return found->second.group;
}

}  // namespace ep
