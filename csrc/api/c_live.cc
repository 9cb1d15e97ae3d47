#include "api/c_live.h"

#include <mutex>
#include <optional>
#include <shared_mutex>
#include <unordered_map>

#include "base/check.h"
#include "base/fork.h"

namespace ep::c {
namespace {

const char* name_of(ObjectKind kind) {
  switch (kind) {
    case ObjectKind::kGroup:
      return "group";
    case ObjectKind::kHandle:
      return "handle";
    case ObjectKind::kComm:
      break;
  }
  return "communicator";
}

class LiveObjects {
 public:
  // Never destroyed: programs may call from destructors at exit.
  static LiveObjects& all() {
    static LiveObjects& objects = *new LiveObjects;
    return objects;
  }

  void add(const void* object, ObjectKind kind) {
    const std::unique_lock lock(mutex_);
    kinds_[object] = kind;
  }
  bool has(const void* object, ObjectKind kind) const {
    const std::shared_lock lock(mutex_);
    const auto at = kinds_.find(object);
    return at != kinds_.end() && at->second == kind;
  }
  void require(const void* object, ObjectKind kind, const std::function<void()>& use) const {
    std::optional<ObjectKind> found;
    {
      const std::shared_lock lock(mutex_);
      if (const auto at = kinds_.find(object); at != kinds_.end()) found = at->second;
      if (found == kind && use) use();
    }
    check(found, object, kind);
  }
  void remove(const void* object, ObjectKind kind) {
    const std::unique_lock lock(mutex_);
    const auto at = kinds_.find(object);
    check(at == kinds_.end() ? std::nullopt : std::optional(at->second), object, kind);
    kinds_.erase(at);
  }

 private:
  static void check(std::optional<ObjectKind> found, const void* object, ObjectKind kind) {
    EP_CHECK(object != nullptr, name_of(kind), " is null");
    EP_CHECK(found, name_of(kind), " at address ", object, " was destroyed, or never made");
    EP_CHECK(*found == kind, name_of(kind), " at address ", object, " is a ", name_of(*found));
  }

  std::shared_mutex& mutex_ = process_mutex<LiveObjects, std::shared_mutex>();
  std::unordered_map<const void*, ObjectKind> kinds_;
};

}  // namespace

void add_live(const void* object, ObjectKind kind) { LiveObjects::all().add(object, kind); }
bool is_live(const void* object, ObjectKind kind) { return LiveObjects::all().has(object, kind); }
void require_live(const void* object, ObjectKind kind) { LiveObjects::all().require(object, kind, nullptr); }
void with_live(const void* object, ObjectKind kind, const std::function<void()>& use) {
  LiveObjects::all().require(object, kind, use);
}
void remove_live(const void* object, ObjectKind kind) { LiveObjects::all().remove(object, kind); }

}  // namespace ep::c
