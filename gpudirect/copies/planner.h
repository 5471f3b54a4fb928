// Picks the fastest way to copy a list of pieces from, to or within a device.
//
// Small pieces are expensive: each copy descriptor takes half a microsecond of the CPU and time of
// the copy engine; a kernel gathers pieces at memory speed but occupies the device. The best way
// depends on the size of the pieces, their number and the device, so it comes from a table that is
// measured when the device is opened (copier.h).
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "gpudirect/cuda_types.h"
#include "gpudirect/device.h"
#include "gpudirect/kernels/arguments.h"
#include "gpudirect/launcher.h"

namespace baton::gpudirect {

// Contiguous at both ends. Host memory is registered with the driver.
struct CopyPiece {
  DevicePointer from = 0;
  DevicePointer to = 0;
  size_t bytes = 0;
};

enum class CopyRoute : uint8_t { kToHost, kToDevice, kOnDevice };
inline constexpr size_t kCopyRoutes = 3;

enum class CopyWay : uint8_t {
  kSingle,  // a copy for each piece
  kRows,    // copies of rows: pieces of one size, at equal distances
  kBatch,   // calls with many descriptors
  kPacked,  // a kernel packs or unpacks on the device, the copy engine moves one piece
  kKernel,  // a kernel does it all, over the host's link too
};
inline constexpr size_t kCopyWays = 5;
std::string_view name_of(CopyRoute route);
std::string_view name_of(CopyWay way);

// A set of ways.
class CopyWays {
 public:
  constexpr CopyWays() = default;
  constexpr CopyWays(std::initializer_list<CopyWay> ways) {
    for (const CopyWay way : ways) add(way);
  }
  constexpr void add(CopyWay way) { bits_ |= 1u << static_cast<unsigned>(way); }
  constexpr bool has(CopyWay way) const { return (bits_ >> static_cast<unsigned>(way) & 1) != 0; }
  constexpr CopyWays operator&(CopyWays other) const {
    other.bits_ &= bits_;
    return other;
  }

 private:
  unsigned bits_ = 0;
};

// The costs of each way, in nanoseconds, for some sizes and numbers of pieces.
class CopyTable {
 public:
  static constexpr std::array<size_t, 7> kSizes = {1 << 10,  4 << 10,   16 << 10, 32 << 10,
                                                   64 << 10, 256 << 10, 1 << 20};
  static constexpr std::array<size_t, 8> kCounts = {1, 2, 4, 8, 16, 64, 256, 1024};
  using Costs = std::array<double, kCopyWays>;

  // By places in kSizes and kCounts. Until then a nanosecond.
  void set(CopyRoute route, CopyWay way, size_t size, size_t count, double nanoseconds);
  // The same, of every size and count: nanoseconds(size, count).
  template <class Function>
  void fill(CopyRoute route, CopyWay way, const Function& nanoseconds) {
    for (size_t size = 0; size < kSizes.size(); ++size) {
      for (size_t count = 0; count < kCounts.size(); ++count) {
        set(route, way, size, count, nanoseconds(kSizes[size], kCounts[count]));
      }
    }
  }
  // Between the figures of the table a straight line in logarithms of all three. Smaller pieces
  // cost what the smallest do; larger ones, and more of them, in proportion.
  double nanoseconds(CopyRoute route, CopyWay way, size_t pieces, size_t bytes) const;
  // The binary logarithms of the costs of all ways.
  Costs logarithms(CopyRoute route, size_t pieces, size_t bytes) const;

 private:
  std::array<std::array<std::array<Costs, kCounts.size()>, kSizes.size()>, kCopyRoutes> costs_{};
};

// The properties of a list that decide the way, after adjacent pieces were merged.
struct CopyShape {
  size_t pieces = 0;
  size_t bytes = 0;
  size_t largest = 0;        // piece
  bool rows = false;         // of one size, at equal distances at both ends that are no less
  bool from_in_row = false;  // the sources follow each other without gaps: one piece
  bool to_in_row = false;
};
CopyShape shape_of(absl::Span<const CopyPiece> pieces);

// Appends to `out`, with neighbours at both ends made one; empty pieces are left out.
void merge_pieces(absl::Span<const CopyPiece> pieces, std::vector<CopyPiece>& out);

// The ways that a list of this shape can go.
CopyWays ways_for(CopyRoute route, const CopyShape& shape);

// The cheapest of `ways`, which has one at least. Of equals the first in CopyWay's order.
CopyWay cheapest(const CopyTable& table, CopyRoute route, const CopyShape& shape, CopyWays ways);

// "512 pieces, 2097152 bytes, to host: packed 60.1 us, batch 210.0 us, single 402.5 us"; the
// cheapest first.
std::string explain(const CopyTable& table, CopyRoute route, const CopyShape& shape, CopyWays ways);

// The costs of combining vectors by the kernel on a device, for each element type.

// In nanoseconds.
struct SumCosts {
  std::array<double, kernels::kSumElements> start{};  // of one launch, until its end is seen
  std::array<double, kernels::kSumElements> byte{};   // for each byte of every source
  double host_copy = 0;                               // by the CPU, for each byte
};

// Blocks that suit vectors of so many bytes.
constexpr uint64_t sum_blocks(size_t bytes) { return bytes / 16 / 256 + 1; }

// By trying, in some milliseconds of the device's time: two vectors of `bytes`, the shortest of
// some tries. Blocks.
absl::StatusOr<SumCosts> measure_sums(const Device& device, const Launcher& launcher,
                                      size_t bytes = 4 << 20, int tries = 3);

}  // namespace baton::gpudirect
