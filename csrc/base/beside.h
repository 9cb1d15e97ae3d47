// Libraries that are loaded on demand: they lie beside the library, or the extension, that this code is a part of.
#pragma once

#include <filesystem>
#include <string>

namespace ep {

std::filesystem::path own_folder();

// The function `symbol` of the library `file` there; null if the library has none. `what`: for the error's text, "the
// kernels for ...". Throws kSystem where the library does not load.
void* function_beside(const std::string& file, const char* symbol, const char* what);

}  // namespace ep
