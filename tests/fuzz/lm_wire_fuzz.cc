// Fuzzes the `lm://` wire: the input is what one client sends, in pieces of lengths that follow
// from it. Two sessions share a small arena. A value that is given out is one that was put under
// that name.

#include <span>

#include "kvtransfer/store/lm_server.h"
#include "tests/std.h"

namespace {

using namespace baton::kvtransfer::store;

// What came out must be whole replies; a value that is found is the last that was put.
struct Checker {
  std::string out;
  size_t left = 0;  // of a value

  void take(std::span<const std::byte> bytes) {
    out.append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    for (;;) {
      const size_t skip = std::min(left, out.size());
      out.erase(0, skip);
      left -= skip;
      if (left > 0 || out.size() < kLmReply) return;
      int32_t numbers[9];
      std::memcpy(numbers, out.data(), sizeof(numbers));
      if (numbers[0] != 200 && numbers[0] != 400) std::abort();
      if (numbers[1] < 0 || (numbers[0] == 400 && numbers[1] != 0)) std::abort();
      left = static_cast<size_t>(numbers[1]);
      out.erase(0, kLmReply);
    }
  }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static std::vector<std::byte> memory(8 << 10);
  BlockArena arena(memory, 64);
  LmTotals totals;
  {
    LmSession session(arena, totals);
    Checker checker;
    size_t at = 0;
    size_t piece = size > 0 ? data[0] % 61 + 1 : 1;
    while (!session.broken()) {
      if (!session.wants_bytes()) {
        const auto bytes = session.to_send().first(std::min(session.to_send().size(), piece));
        checker.take(bytes);
        session.sent(bytes.size());
        continue;
      }
      if (at == size) break;
      const std::span<std::byte> room = session.room();
      if (room.empty()) std::abort();  // it would never go on
      const size_t n = std::min({room.size(), size - at, piece});
      std::memcpy(room.data(), data + at, n);
      session.filled(n, {});
      at += n;
      piece = piece * 7 % 251 + 1;
      if (arena.stats().bytes > memory.size() || totals.arriving > memory.size()) std::abort();
    }
    if (session.idle() && (checker.left > 0 || !checker.out.empty())) std::abort();
  }
  if (totals.arriving != 0) std::abort();
  // Nothing but what is found takes room.
  size_t found = 0;
  arena.each_from_the_newest([&](const BlockArena::Found& block) {
    found += (block.space->bytes().size() + 63) / 64 * 64;
    return true;
  });
  if (arena.stats().bytes != found) std::abort();
  return 0;
}
