#include "base/beside.h"

#include <dlfcn.h>

#include "base/check.h"

namespace ep {

std::filesystem::path own_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&own_folder), &info) == 0 || info.dli_fname == nullptr) return {};
  std::error_code error;
  const auto file = std::filesystem::weakly_canonical(info.dli_fname, error);
  return error ? std::filesystem::path(info.dli_fname).parent_path() : file.parent_path();
}

void* function_beside(const std::string& file, const char* symbol, const char* what) {
  void* const library = dlopen((own_folder() / file).c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) raise(ErrorKind::kSystem, what, " do not load: ", dlerror());
  return dlsym(library, symbol);
}

}  // namespace ep
