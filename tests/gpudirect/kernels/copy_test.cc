// Gathering and scattering pages, and pieces of any size and alignment.
#include "tests/gpudirect/kernels/emulated_memory.h"
#include "tests/test.h"

namespace baton::gpudirect::kernels {
namespace {

std::vector<std::byte> random_bytes(size_t size, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<std::byte> out(size);
  for (std::byte& byte : out) byte = static_cast<std::byte>(random());
  return out;
}

uint32_t chunks_of(const std::vector<Piece>& pieces) {
  uint64_t most = 0;
  for (const Piece& piece : pieces) most = std::max(most, piece.bytes);
  return static_cast<uint32_t>((most + kChunkBytes - 1) / kChunkBytes);
}

std::optional<std::string> copy(const std::vector<Piece>& pieces, EmulatedMemory& memory,
                                uint32_t blocks, uint64_t seed) {
  const CopyPieces arguments{memory.read(pieces), static_cast<uint32_t>(pieces.size()),
                             chunks_of(pieces)};
  return run_kernel("baton_copy_pieces", arguments, blocks, memory, seed);
}

TEST(CopyPieces, GathersPagesAndScattersThemBack) {
  for (const size_t page : {64u, 1024u, 4096u, 6144u}) {
    constexpr size_t kPages = 24;
    const std::vector<std::byte> cache = random_bytes(2 * kPages * page, page);
    std::vector<size_t> numbers(2 * kPages);
    std::iota(numbers.begin(), numbers.end(), 0u);
    std::shuffle(numbers.begin(), numbers.end(), std::mt19937_64(page));
    numbers.resize(kPages);
    std::vector<std::byte> packed(kPages * page), back(cache.size());
    std::vector<Piece> gather, scatter;
    for (size_t i = 0; i < kPages; ++i) {
      gather.push_back({cache.data() + numbers[i] * page, packed.data() + i * page, page});
      scatter.push_back({packed.data() + i * page, back.data() + numbers[i] * page, page});
    }
    EmulatedMemory memory;
    memory.allow(cache);
    memory.allow(packed, true);
    memory.allow(back, true);
    EXPECT_EQ(copy(gather, memory, 7, page), std::nullopt);
    EXPECT_EQ(copy(scatter, memory, 3, page), std::nullopt);
    for (size_t i = 0; i < kPages; ++i) {
      const auto begin = static_cast<ptrdiff_t>(numbers[i] * page);
      EXPECT_TRUE(std::equal(cache.begin() + begin,
                             cache.begin() + begin + static_cast<ptrdiff_t>(page),
                             packed.begin() + static_cast<ptrdiff_t>(i * page)));
      EXPECT_TRUE(std::equal(cache.begin() + begin,
                             cache.begin() + begin + static_cast<ptrdiff_t>(page),
                             back.begin() + begin));
    }
  }
}

TEST(CopyPieces, AnySizeAndAlignment) {
  for (uint64_t seed = 0; seed < 40; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const std::vector<std::byte> from = random_bytes(40000, seed);
    std::vector<std::byte> to(40000, std::byte{0xee});
    std::vector<std::byte> wanted = to;
    std::vector<Piece> pieces;
    for (size_t at = random() % 40; at < to.size();) {
      const size_t bytes = std::min<size_t>(random() % (seed % 3 == 0 ? 9000 : 70), to.size() - at);
      const size_t source = random() % (from.size() - bytes + 1) / (1 + seed % 4) * (1 + seed % 4);
      if (source + bytes > from.size()) continue;
      pieces.push_back({from.data() + source, to.data() + at, bytes});
      std::copy_n(from.begin() + static_cast<ptrdiff_t>(source), bytes,
                  wanted.begin() + static_cast<ptrdiff_t>(at));
      at += bytes + random() % 50;
    }
    EmulatedMemory memory;
    memory.allow(from);
    memory.allow(to, true);
    EXPECT_EQ(copy(pieces, memory, 1 + seed % 5, seed), std::nullopt);
    EXPECT_TRUE(to == wanted);
  }
}

}  // namespace
}  // namespace baton::gpudirect::kernels
