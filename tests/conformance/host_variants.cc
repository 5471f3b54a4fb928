// What the suite runs over: every provider, with memory of the host.
#include <string_view>

#include "tests/conformance/harness.h"
#include "tests/sanitized.h"

namespace baton {

std::vector<Variant> all_variants() {
  std::vector<Variant> variants = {
      {.name = "sim", .provider = "sim"},
      {.name = "shm", .provider = "shm"},
      {.name = "tcp", .provider = "tcp"},
      {.name = "tcp_integrity", .provider = "tcp", .settings = {{"tcp.integrity", "on"}}},
      {.name = "tcp_encrypt", .provider = "tcp", .settings = {{"tcp.encrypt", "on"}}},
      {.name = "example", .provider = "loopback"},  // of docs/write-a-provider.md
      {.name = "verbs_fake", .provider = "verbs_fake"},
      {.name = "verbs_fake_own_receives",
       .provider = "verbs_fake",
       .settings = {{"verbs.shared_receives", "0"}}},
      {.name = "shaped_traced_shm", .provider = "shm", .decorated = true}};
  for (const auto& [name, factory] : registered_providers()) {
    // On a real device, or soft-RoCE, where there is one.
    // Small slices and little under way: transfers of few bytes, which is what soft-RoCE moves
    // quickly, then have as many slices and as many chances to be stopped as large ones elsewhere.
    if (name == "verbs") {
      variants.push_back({.name = "verbs",
                          .provider = "verbs",
                          .settings = {{"verbs.slice_kib", "64"}, {"verbs.inflight_kib", "512"}},
                          .slow = true});
    }
    if (name != "ucx") continue;
    variants.push_back({.name = "ucx_tcp", .provider = "ucx", .settings = {{"ucx.tls", "tcp"}}});
    variants.push_back({.name = "ucx_encrypt",
                        .provider = "ucx",
                        .settings = {{"ucx.tls", "tcp"}, {"ucx.encrypt", "on"}}});
    variants.push_back({.name = "ucx_shm", .provider = "ucx", .settings = {{"ucx.tls", "posix"}}});
  }
  // A third of the time under a sanitizer, for what the others have as well: seals, UCX's frames.
  if (kSanitized) {
    std::erase_if(variants, [](const Variant& each) {
      const std::string_view name = each.name;
      return name == "tcp_integrity" || name == "ucx_encrypt" || name == "ucx_shm";
    });
  }
#ifdef __SANITIZE_THREAD__
  // Ten times slower, and threads meet in the worker: two providers in full.
  for (Variant& variant : variants) {
    const std::string_view name = variant.name;
    variant.slow = variant.slow || (name != "shm" && name != "tcp");
  }
#endif
  return variants;
}

std::unique_ptr<Devices> fake_devices(bool, Ipc) { return nullptr; }

}  // namespace baton
