// First fit among the gaps.
#include "engine/handoff/staging.h"

#include <sys/mman.h>

#include <iterator>

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

std::optional<uint32_t> Staging::allocate(size_t size) {
  for (auto gap = free_.begin(); gap != free_.end(); ++gap) {
    const auto [begin, end] = *gap;
    const size_t number = (begin + size - 1) / size;
    const size_t first = number * size;
    if (first + size > end) continue;
    free_.erase(gap);
    if (begin < first) free_.emplace(begin, first);
    if (first + size < end) free_.emplace(first + size, end);
    used_ += size;
    return static_cast<uint32_t>(number);
  }
  return std::nullopt;
}

void Staging::release(size_t size, uint32_t number) {
  size_t begin = size * number;
  size_t end = begin + size;
  used_ -= size;
  auto next = free_.lower_bound(begin);
  if (next != free_.end() && next->first == end) {
    end = next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin() && std::prev(next)->second == begin) {
    begin = std::prev(next)->first;
    free_.erase(std::prev(next));
  }
  free_.emplace(begin, end);
}

}  // namespace baton::engine::handoff
