#include "torch/ops/registry.h"

#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/fork.h"
#include "torch/ops/arguments.h"

namespace ep {
namespace {

// Ids of a process begin at a random number, so that a handle of another process is not taken for one of this. They are
// larger than most lengths of tensors, which a compiler could take for the same symbol; and not larger than that, as
// parts of torch (export, opcheck) take memory for a tensor by its lengths though one of them is 0.
int64_t first_id() {
  static const int64_t first = (int64_t{1} << 20) + (std::random_device{}() & 0x7FFFFF);
  return first;
}

struct Registry {
  std::shared_mutex& mutex = process_mutex<Registry, std::shared_mutex>();
  std::vector<std::shared_ptr<Registered>> groups;  // by id; null: destroyed
  std::vector<std::string> names;                   // of all that there were
};

Registry& registry() {
  static Registry& instance = *new Registry;  // never destroyed: buffers may outlive static objects
  return instance;
}

int64_t id_of(const at::Tensor& seq) {
  EP_CHECK(seq.dim() == 4 && seq.scalar_type() == at::kLong && seq.size(3) == 0, "seq is ", name_of(seq.scalar_type()),
           " of shape ", seq.sizes(), ", must be the tensor of a buffer");
  return seq.size(0);
}

}  // namespace

int64_t register_group(const std::string& name, std::shared_ptr<Group> group) {
  auto entry = std::make_shared<Registered>();
  entry->name = name;
  entry->group = std::move(group);
  entry->process = getpid();
  entry->forks = num_forks();
  std::unique_lock lock(registry().mutex);
  auto& groups = registry().groups;
  const bool is_new = std::none_of(groups.begin(), groups.end(),
                                   [&](const auto& other) { return other != nullptr && other->name == name; });
  EP_CHECK(is_new, "a buffer named ", name, " exists already in this process");
  groups.push_back(std::move(entry));
  registry().names.push_back(name);
  return first_id() + static_cast<int64_t>(groups.size()) - 1;
}

std::shared_ptr<Registered> unregister_group(int64_t id) {
  std::unique_lock lock(registry().mutex);
  return std::exchange(registry().groups.at(static_cast<size_t>(id - first_id())), nullptr);
}

std::shared_ptr<Registered> find_group(const at::Tensor& seq) {
  const int64_t id = id_of(seq), index = id - first_id();
  std::shared_lock lock(registry().mutex);
  const auto& groups = registry().groups;
  EP_CHECK_USAGE(index >= 0 && index < static_cast<int64_t>(groups.size()), "a buffer numbered ", id,
                 " was never made here");
  const std::shared_ptr<Registered>& entry = groups[index];
  EP_CHECK_USAGE(entry != nullptr, "the buffer ", registry().names[index], " was destroyed");
  // A fork has the parent's window, but neither its threads nor its place among the ranks.
  EP_CHECK_USAGE(entry->forks == num_forks(), "the buffer ", entry->name, " belongs to process ", entry->process,
                 ", this is its fork ", getpid(), ": make a buffer here");
  return entry;
}

}  // namespace ep
