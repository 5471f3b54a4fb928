// Fills memory with a pattern or with poison, and checks it.
#include "bench/report/pattern.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "absl/strings/str_format.h"
#include "transport/base/splitmix.h"

namespace baton::bench {
namespace {

constexpr auto kPoison = std::byte{0xa5};

// Eight bytes of pattern (splitmix64).
uint64_t word_at(uint64_t seed, uint64_t index) {
  return base::splitmix_hash(seed + (index + 1) * base::kSplitmixStep);
}

std::byte byte_at(uint64_t seed, size_t position) {
  return static_cast<std::byte>(word_at(seed, position / 8) >> (8 * (position % 8)));
}

void write_run(std::byte* at, size_t position, size_t bytes, uint64_t seed) {
  size_t i = 0;
  for (; i < bytes && (position + i) % 8 != 0; ++i) at[i] = byte_at(seed, position + i);
  for (; i + 8 <= bytes; i += 8) {
    const uint64_t word = word_at(seed, (position + i) / 8);
    std::memcpy(at + i, &word, 8);
  }
  for (; i < bytes; ++i) at[i] = byte_at(seed, position + i);
}

// Calls `visit(offset, position, bytes)` for every contiguous run of the layout, in order.
template <typename Visit>
void for_each_run(const Layout& layout, Visit visit) {
  const size_t total = layout.bytes();
  LayoutWalker walker(layout, 0);
  for (size_t position = 0; position < total;) {
    const size_t bytes = walker.run();
    if (!visit(walker.offset(), position, bytes)) return;
    position += bytes;
    if (position < total) walker.advance(bytes);
  }
}

}  // namespace

void fill(std::byte* base, const Layout& layout, uint64_t seed) {
  for_each_run(layout, [&](size_t offset, size_t position, size_t bytes) {
    write_run(base + offset, position, bytes, seed);
    return true;
  });
}

void poison(std::byte* base, size_t size) { std::fill_n(base, size, kPoison); }

absl::Status check(std::byte* base, size_t size, const Layout& layout, uint64_t seed) {
  absl::Status status;
  std::array<std::byte, 4096> want;
  for_each_run(layout, [&](size_t offset, size_t position, size_t bytes) {
    for (size_t done = 0; done < bytes && status.ok();) {
      const size_t n = std::min(bytes - done, want.size());
      write_run(want.data(), position + done, n, seed);
      const std::byte* have = base + offset + done;
      const auto wrong = std::mismatch(have, have + n, want.data()).first;
      if (wrong != have + n) {
        status = absl::DataLossError(absl::StrFormat(
            "byte %u of the transfer (offset %u of the region) is %02x and should be %02x%s",
            position + done + static_cast<size_t>(wrong - have), static_cast<size_t>(wrong - base),
            static_cast<int>(*wrong), static_cast<int>(want[static_cast<size_t>(wrong - have)]),
            *wrong == kPoison ? ": it never arrived" : ""));
      }
      done += n;
    }
    std::fill_n(base + offset, bytes, kPoison);
    return status.ok();
  });
  if (!status.ok()) return status;
  const auto stray = std::find_if(base, base + size, [](std::byte b) { return b != kPoison; });
  if (stray == base + size) return status;
  return absl::DataLossError(absl::StrFormat(
      "offset %u of the region was written to, but is not part of the transfer", stray - base));
}

}  // namespace baton::bench
