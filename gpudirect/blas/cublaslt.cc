// Loads cuBLASLt by its name.
#include "gpudirect/blas/cublaslt.h"

#include <dlfcn.h>

#include <cstdlib>
#include <string_view>

#include "absl/strings/str_cat.h"

namespace baton::gpudirect {

absl::StatusOr<CublasLt> load_cublaslt(const char* library) {
  void* const handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* const why = dlerror();
    return absl::UnavailableError(
        absl::StrCat("no cuBLASLt: ", why != nullptr ? why : "it cannot be loaded"));
  }
  CublasLt table;
  const char* missing = nullptr;
#define BATON_FIND(name, result, parameters)                                 \
  table.name = reinterpret_cast<decltype(table.name)>(dlsym(handle, #name)); \
  if (table.name == nullptr) missing = #name;
  BATON_BLAS_ENTRIES(BATON_FIND)
#undef BATON_FIND
  if (missing != nullptr) {
    dlclose(handle);
    return absl::UnavailableError(absl::StrCat("no cuBLASLt: ", library, " has no ", missing));
  }
  return table;  // the library stays: streams may have kernels of it
}

absl::StatusOr<const CublasLt*> machine_cublaslt() {
  static const absl::StatusOr<CublasLt>* const loaded = [] {
    const char* const named = std::getenv("BATON_CUBLASLT");
    if (named != nullptr && std::string_view(named) == "none") {
      return new absl::StatusOr<CublasLt>(
          absl::UnavailableError("BATON_CUBLASLT=none switches it off"));
    }
    if (named != nullptr && *named != '\0') {
      return new absl::StatusOr<CublasLt>(load_cublaslt(named));
    }
    auto* newest = new absl::StatusOr<CublasLt>(load_cublaslt("libcublasLt.so.13"));
    if (newest->ok()) return newest;
    absl::StatusOr<CublasLt> older = load_cublaslt("libcublasLt.so.12");
    if (older.ok()) *newest = *older;
    return newest;
  }();
  if (!loaded->ok()) return loaded->status();
  return &**loaded;
}

}  // namespace baton::gpudirect
