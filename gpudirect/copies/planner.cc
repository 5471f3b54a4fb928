// Shapes of lists, and what the table says of them.
#include "gpudirect/copies/planner.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "absl/strings/str_format.h"

namespace baton::gpudirect {
namespace {

constexpr CopyWay way_of(size_t number) { return static_cast<CopyWay>(number); }

}  // namespace

std::string_view name_of(CopyRoute route) {
  constexpr std::array<std::string_view, kCopyRoutes> kNames = {"to host", "to device",
                                                                "on device"};
  return kNames[static_cast<size_t>(route)];
}
std::string_view name_of(CopyWay way) {
  constexpr std::array<std::string_view, kCopyWays> kNames = {"single", "rows", "batch", "packed",
                                                              "kernel"};
  return kNames[static_cast<size_t>(way)];
}

double CopyTable::nanoseconds(CopyRoute route, CopyWay way, size_t pieces, size_t bytes) const {
  if (pieces == 0) return 0;
  const auto& row = costs[static_cast<size_t>(route)][static_cast<size_t>(way)];
  const double size = static_cast<double>(bytes) / static_cast<double>(pieces);
  CopyCost cost = row[0];
  if (const auto last = static_cast<double>(kSizes.back()); size >= last) {
    cost = {row.back().start, row.back().piece * size / last};
  } else {
    for (size_t i = 1; i < kSizes.size(); ++i) {
      const auto low = static_cast<double>(kSizes[i - 1]), high = static_cast<double>(kSizes[i]);
      if (size < low || size >= high) continue;
      const double share = (size - low) / (high - low);
      cost.start = row[i - 1].start + share * (row[i].start - row[i - 1].start);
      cost.piece = row[i - 1].piece + share * (row[i].piece - row[i - 1].piece);
    }
  }
  return cost.start + static_cast<double>(pieces) * cost.piece;
}

CopyShape shape_of(absl::Span<const CopyPiece> pieces) {
  CopyShape shape{.pieces = pieces.size(), .rows = true, .from_in_row = true, .to_in_row = true};
  for (size_t i = 0; i < pieces.size(); ++i) {
    shape.bytes += pieces[i].bytes;
    shape.largest = std::max(shape.largest, pieces[i].bytes);
    if (i == 0) continue;
    const CopyPiece& before = pieces[i - 1];
    const CopyPiece& here = pieces[i];
    shape.from_in_row = shape.from_in_row && before.from + before.bytes == here.from;
    shape.to_in_row = shape.to_in_row && before.to + before.bytes == here.to;
    // Unsigned: backwards is a distance too large.
    const DevicePointer from_step = here.from - before.from, to_step = here.to - before.to;
    constexpr DevicePointer kLargest = std::numeric_limits<int32_t>::max();
    shape.rows = shape.rows && here.bytes == before.bytes && from_step >= here.bytes &&
                 to_step >= here.bytes && from_step <= kLargest && to_step <= kLargest &&
                 from_step == pieces[1].from - pieces[0].from &&
                 to_step == pieces[1].to - pieces[0].to;
  }
  return shape;
}

void merge_pieces(absl::Span<const CopyPiece> pieces, std::vector<CopyPiece>& out) {
  const size_t begin = out.size();
  for (const CopyPiece& piece : pieces) {
    if (piece.bytes == 0) continue;
    if (out.size() > begin && out.back().from + out.back().bytes == piece.from &&
        out.back().to + out.back().bytes == piece.to) {
      out.back().bytes += piece.bytes;
    } else {
      out.push_back(piece);
    }
  }
}

CopyWays ways_for(CopyRoute route, const CopyShape& shape) {
  CopyWays ways = {CopyWay::kSingle, CopyWay::kBatch, CopyWay::kKernel};
  if (shape.rows) ways.add(CopyWay::kRows);
  const bool host_in_row = route == CopyRoute::kToHost ? shape.to_in_row : shape.from_in_row;
  if (route != CopyRoute::kOnDevice && host_in_row) ways.add(CopyWay::kPacked);
  return ways;
}

CopyWay cheapest(const CopyTable& table, CopyRoute route, const CopyShape& shape, CopyWays ways) {
  CopyWay best = CopyWay::kSingle;
  double least = std::numeric_limits<double>::infinity();
  for (size_t i = 0; i < kCopyWays; ++i) {
    if (!ways.has(way_of(i))) continue;
    const double cost = table.nanoseconds(route, way_of(i), shape.pieces, shape.bytes);
    if (cost < least) {
      least = cost;
      best = way_of(i);
    }
  }
  return best;
}

std::string explain(const CopyTable& table, CopyRoute route, const CopyShape& shape,
                    CopyWays ways) {
  std::vector<std::pair<double, CopyWay>> sorted;
  for (size_t i = 0; i < kCopyWays; ++i) {
    if (!ways.has(way_of(i))) continue;
    sorted.emplace_back(table.nanoseconds(route, way_of(i), shape.pieces, shape.bytes), way_of(i));
  }
  std::stable_sort(sorted.begin(), sorted.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  std::string out =
      absl::StrFormat("%u pieces, %u bytes, %s", shape.pieces, shape.bytes, name_of(route));
  const char* before = ": ";
  for (const auto& [cost, way] : sorted) {
    absl::StrAppendFormat(&out, "%s%s %.1f us", before, name_of(way), cost / 1000);
    before = ", ";
  }
  return out;
}

}  // namespace baton::gpudirect
