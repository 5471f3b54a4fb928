// Loads libibverbs.
#include "verbs/verbs_api.h"

#include <dlfcn.h>

#include <cerrno>

#include "absl/strings/str_cat.h"

namespace baton::verbs {
namespace {

absl::StatusOr<const VerbsApi*> load() {
  static VerbsApi table;
  void* library = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    return absl::UnavailableError(absl::StrCat(
        "no RDMA library here (", dlerror(),
        "): install it with `apt-get install libibverbs1 ibverbs-providers` if this machine has an "
        "RDMA device"));
  }
  const char* missing = nullptr;
#define BATON_LOAD(name)                                                   \
  table.name = reinterpret_cast<decltype(&::name)>(dlsym(library, #name)); \
  if (table.name == nullptr) missing = #name;
  BATON_VERBS_FUNCTIONS(BATON_LOAD)
#undef BATON_LOAD
  if (missing != nullptr) {
    return absl::UnavailableError(absl::StrCat("the RDMA library here is too old: it lacks ",
                                               missing, "; install rdma-core 34 or newer"));
  }
  // Before any resource is made; kernels from 5.12 on do not need it and say so.
  table.ibv_fork_init();
  return &table;
}

}  // namespace

absl::StatusOr<const VerbsApi*> load_verbs() {
  static const absl::StatusOr<const VerbsApi*> loaded = load();
  return loaded;
}

int query_port(ibv_context* context, uint8_t port, ibv_port_attr* attributes) {
  verbs_context* extended = verbs_get_ctx(context);
  if (extended == nullptr || extended->query_port == nullptr) return ENOSYS;
  return extended->query_port(context, port, attributes, sizeof *attributes);
}

}  // namespace baton::verbs
