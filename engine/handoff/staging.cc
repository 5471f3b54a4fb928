// The memory behind it.
#include "engine/handoff/staging.h"

#include <sys/mman.h>

#include "absl/strings/str_cat.h"
#include "transport/base/limits/memory_left.h"

namespace baton::engine::handoff {

absl::StatusOr<std::unique_ptr<Staging>> Staging::make(size_t bytes) {
  absl::Status fits =
      base::memory_fits("staging for KV that is handed over (--kv-staging-mib)", bytes);
  if (!fits.ok()) return fits;
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for ", bytes >> 20,
                     " MiB of staging for KV that is handed over: use less --kv-staging-mib"));
  }
  return std::unique_ptr<Staging>(new Staging(static_cast<std::byte*>(memory), bytes));
}

Staging::~Staging() { munmap(base_, bytes_); }

}  // namespace baton::engine::handoff
