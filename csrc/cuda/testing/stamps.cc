#include "cuda/testing/stamps.h"

#include <algorithm>
#include <set>
#include <string>

#include "base/check.h"

namespace ep {
namespace {

struct NamedReader {
  std::string_view kernel;
  StampsReader read;
};

// Made when it is first asked for: files of kernels add themselves before main() begins, in any order.
std::vector<NamedReader>& readers() {
  static std::vector<NamedReader> all;
  return all;
}

bool has_any(const TimeLine& line) {
  return std::any_of(line.begin(), line.end(), [](const std::vector<uint64_t>& warps) {
    return std::any_of(warps.begin(), warps.end(), [](uint64_t at) { return at != ~0ull; });
  });
}

}  // namespace

bool add_stamps_reader(const char* kernel, StampsReader reader) {
  readers().push_back({kernel, reader});
  return true;
}

TimeLine take_stamps(std::string_view kernel) {
  TimeLine taken;
  bool is_known = false;
  for (const NamedReader& each : readers()) {
    if (each.kernel != kernel) continue;
    TimeLine line = each.read();
    if (!is_known || has_any(line)) taken = std::move(line);
    is_known = true;
  }
  if (is_known) return taken;
  std::set<std::string_view> names;
  for (const NamedReader& each : readers()) names.insert(each.kernel);
  std::string known;
  for (const std::string_view name : names) known += concat(known.empty() ? "" : ", ", name);
  raise(ErrorKind::kInvalidArgument, "no kernel ", kernel, ": there are ", known);
}

}  // namespace ep
