// Loads libibverbs.
#include "verbs/device/verbs_api.h"

#include <dlfcn.h>

#include <cerrno>

#include "absl/strings/str_cat.h"

namespace baton::verbs {
namespace {

// Takes symbols from a library that is never unloaded; remembers the first that is missing.
class Library {
 public:
  Library(const char* file, const char* packages) : handle_(dlopen(file, RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ != nullptr) return;
    status_ = absl::UnavailableError(absl::StrCat("no RDMA library here (", dlerror(),
                                                  "): install it with `apt-get install ", packages,
                                                  "` if this machine has an RDMA device"));
  }
  template <typename Function>
  void optional(const char* name, Function& function) {
    if (handle_ != nullptr) function = reinterpret_cast<Function>(dlsym(handle_, name));
  }
  template <typename Function>
  void take(const char* name, Function& function) {
    optional(name, function);
    if (function != nullptr || !status_.ok()) return;
    status_ = absl::UnavailableError(absl::StrCat("the RDMA library here is too old: it lacks ",
                                                  name, "; install rdma-core 34 or newer"));
  }
  const absl::Status& status() const { return status_; }

 private:
  void* handle_;
  absl::Status status_;
};

#define BATON_TAKE(name) library.take(#name, table.name);
#define BATON_TAKE_OPTIONAL(name) library.optional(#name, table.name);

absl::StatusOr<const VerbsApi*> load_verbs_once() {
  static VerbsApi table;
  Library library("libibverbs.so.1", "libibverbs1 ibverbs-providers");
  BATON_VERBS_FUNCTIONS(BATON_TAKE)
  BATON_VERBS_OPTIONAL(BATON_TAKE_OPTIONAL)
  if (!library.status().ok()) return library.status();
  return &table;
}

#undef BATON_TAKE
#undef BATON_TAKE_OPTIONAL

}  // namespace

absl::StatusOr<const VerbsApi*> load_verbs() {
  static const absl::StatusOr<const VerbsApi*> loaded = load_verbs_once();
  return loaded;
}

int query_port(ibv_context* context, uint8_t port, ibv_port_attr* attributes) {
  verbs_context* extended = verbs_get_ctx(context);
  if (extended == nullptr || extended->query_port == nullptr) return ENOSYS;
  return extended->query_port(context, port, attributes, sizeof *attributes);
}

}  // namespace baton::verbs
