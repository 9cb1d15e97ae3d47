#include "torch/ops/registry.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <map>
#include <mutex>
#include <shared_mutex>

#include "base/check.h"

namespace ep {
namespace {

struct Registry {
  std::shared_mutex mutex;
  std::map<std::string, std::shared_ptr<Registered>, std::less<>> groups;
  std::atomic<int> forks = 0;  // counted, because asking for the process id at every call is a call of the kernel
};

Registry& registry() {
  static Registry* instance = [] {
    static auto* made = new Registry;  // never destroyed: buffers may outlive static objects
    pthread_atfork(nullptr, nullptr, [] { made->forks++; });
    return made;
  }();
  return *instance;
}

}  // namespace

void register_group(const std::string& name, std::shared_ptr<Group> group) {
  auto entry = std::make_shared<Registered>();
  entry->group = std::move(group);
  entry->process = getpid();
  entry->forks = registry().forks;
  std::unique_lock lock(registry().mutex);
  const bool is_new = registry().groups.emplace(name, std::move(entry)).second;
  EP_CHECK(is_new, "a buffer named ", name, " exists already in this process");
}

std::shared_ptr<Registered> unregister_group(const std::string& name) {
  std::unique_lock lock(registry().mutex);
  const auto entry = registry().groups.extract(name);
  return entry.empty() ? nullptr : entry.mapped();
}

std::shared_ptr<Registered> find_group(std::string_view name) {
  std::shared_lock lock(registry().mutex);
  const auto found = registry().groups.find(name);
  EP_CHECK_USAGE(found != registry().groups.end(), "the buffer ", name, " was destroyed, or never made here");
  // A fork has the parent's window, but neither its threads nor its place among the ranks.
  const std::shared_ptr<Registered>& entry = found->second;
  EP_CHECK_USAGE(entry->forks == registry().forks, "the buffer ", name, " belongs to process ", entry->process,
                 ", this is its fork ", getpid(), ": make a buffer here");
  return entry;
}

}  // namespace ep
