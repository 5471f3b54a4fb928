// Shapes of lists, and what the table says of them.
#include "gpudirect/copies/planner.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "gpudirect/device_memory.h"

namespace baton::gpudirect {
namespace {

constexpr CopyWay way_of(size_t number) { return static_cast<CopyWay>(number); }

// Between two of the values of a table: from the one at `at` so much of the way to the next, and so
// far past the last one; of their logarithms.
struct Place {
  size_t at = 0;
  double share = 0;
  double beyond = 0;
};
template <size_t kValues>
Place place_in(const std::array<size_t, kValues>& values, double logarithm) {
  const auto of = [&](size_t i) { return static_cast<double>(std::bit_width(values[i]) - 1); };
  if (logarithm >= of(kValues - 1)) return {kValues - 2, 1, logarithm - of(kValues - 1)};
  Place place;
  while (logarithm >= of(place.at + 1)) ++place.at;
  const double low = of(place.at);
  place.share = std::max(0.0, logarithm - low) / (of(place.at + 1) - low);
  return place;
}

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

void CopyTable::set(CopyRoute route, CopyWay way, size_t size, size_t count, double nanoseconds) {
  costs_[static_cast<size_t>(route)][size][count][static_cast<size_t>(way)] =
      std::log2(std::max(nanoseconds, 1.0));
}

CopyTable::Costs CopyTable::logarithms(CopyRoute route, size_t pieces, size_t bytes) const {
  const double count = std::log2(static_cast<double>(pieces));
  const Place of_size = place_in(kSizes, std::log2(static_cast<double>(bytes)) - count);
  const Place of_count = place_in(kCounts, count);
  const auto& sizes = costs_[static_cast<size_t>(route)];
  Costs out{};
  for (size_t way = 0; way < kCopyWays; ++way) {
    const auto at = [&](size_t size) {
      const double low = sizes[size][of_count.at][way], high = sizes[size][of_count.at + 1][way];
      return low + of_count.share * (high - low);
    };
    const double low = at(of_size.at), high = at(of_size.at + 1);
    out[way] = low + of_size.share * (high - low) + of_size.beyond + of_count.beyond;
  }
  return out;
}

double CopyTable::nanoseconds(CopyRoute route, CopyWay way, size_t pieces, size_t bytes) const {
  if (pieces == 0 || bytes == 0) return 0;
  return std::exp2(logarithms(route, pieces, bytes)[static_cast<size_t>(way)]);
}

CopyShape shape_of(absl::Span<const CopyPiece> pieces) {
  constexpr DevicePointer kLargest = std::numeric_limits<int32_t>::max();
  CopyShape shape{.pieces = pieces.size(), .from_in_row = true, .to_in_row = true};
  bool even = !pieces.empty() && pieces[0].bytes <= kLargest;
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
    const bool row = from_step >= here.bytes && to_step >= here.bytes && from_step <= kLargest &&
                     to_step <= kLargest && from_step == pieces[1].from - pieces[0].from &&
                     to_step == pieces[1].to - pieces[0].to;
    even = even && row && here.bytes == before.bytes;
  }
  shape.rows = even;
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
  const CopyTable::Costs costs = table.logarithms(route, shape.pieces, shape.bytes);
  for (size_t i = 0; i < kCopyWays; ++i) {
    if (!ways.has(way_of(i)) || costs[i] >= least) continue;
    least = costs[i];
    best = way_of(i);
  }
  return best;
}

std::string explain(const CopyTable& table, CopyRoute route, const CopyShape& shape,
                    CopyWays ways) {
  std::vector<std::pair<double, CopyWay>> sorted;
  const CopyTable::Costs costs = table.logarithms(route, shape.pieces, shape.bytes);
  for (size_t i = 0; i < kCopyWays; ++i) {
    if (ways.has(way_of(i))) sorted.emplace_back(std::exp2(costs[i]), way_of(i));
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

namespace {

constexpr size_t kSmall = 4096;
constexpr std::chrono::seconds kSumPatience{2};
using Steady = std::chrono::steady_clock;

double nanoseconds_since(Steady::time_point begin) {
  return std::chrono::duration<double, std::nano>(Steady::now() - begin).count();
}

class SumMeasurement {
 public:
  SumMeasurement(const Device& device, const Launcher& launcher, DevicePointer at, size_t bytes)
      : device_(device), launcher_(launcher), at_(at), bytes_(bytes) {}

  // The shortest of some sums of two vectors of so many bytes.
  absl::StatusOr<double> time(kernels::SumElement element, size_t bytes, int tries) const {
    constexpr std::array<size_t, kernels::kSumElements> kSizes = {4, 2, 2, 8, 1, 1, 4, 8};
    kernels::ReduceSum sum{.target = pointer_of<void>(at_),
                           .count = bytes / kSizes[static_cast<size_t>(element)],
                           .source_count = 2,
                           .element = element};
    sum.sources[0] = sum.target;
    sum.sources[1] = pointer_of<void>(at_ + bytes_);
    double least = std::numeric_limits<double>::infinity();
    for (int i = 0; i < tries; ++i) {
      const auto begin = Steady::now();
      absl::Status status = launcher_.reduce_sum(sum, sum_blocks(bytes), stream());
      if (status.ok()) status = wait();
      if (!status.ok()) return status;
      least = std::min(least, nanoseconds_since(begin));
    }
    return least;
  }

  absl::Status wait() const {
    const auto begin = Steady::now();
    while (true) {
      const Result result = device_.driver().cuStreamQuery(stream());
      if (result != kNotReady) return device_.check(result, "waiting for a sum");
      if (Steady::now() - begin > kSumPatience) {
        return absl::DeadlineExceededError("a sum of two small vectors has not ended in 2 s");
      }
    }
  }

 private:
  Stream stream() const { return device_.stream(Direction::kBetween); }

  const Device& device_;
  const Launcher& launcher_;
  const DevicePointer at_;
  const size_t bytes_;
};

double host_copy(size_t bytes, int tries) {
  const std::vector<std::byte> from(bytes, std::byte{1});
  std::vector<std::byte> to(bytes);
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < tries; ++i) {
    const auto begin = Steady::now();
    std::memcpy(to.data(), from.data(), bytes);
    least = std::min(least, nanoseconds_since(begin));
  }
  return least / static_cast<double>(bytes);
}

}  // namespace

absl::StatusOr<SumCosts> measure_sums(const Device& device, const Launcher& launcher, size_t bytes,
                                      int tries) {
  const auto slab = DeviceSlab::create(device, 2 * bytes, {.rdma = false, .shareable = false});
  if (!slab.ok()) return slab.status();
  const Device::Current current(device);
  if (!current.status().ok()) return current.status();
  const SumMeasurement measurement(device, launcher, (*slab)->span().data, bytes);
  SumCosts costs;
  for (size_t i = 0; i < kernels::kSumElements; ++i) {
    const auto element = static_cast<kernels::SumElement>(i);
    const auto small = measurement.time(element, kSmall, tries);
    const auto large = small.ok() ? measurement.time(element, bytes, tries) : small;
    if (!large.ok()) {
      // Work that was queued before an error may still use the memory.
      measurement.wait().IgnoreError();
      return large.status();
    }
    costs.byte[i] = std::max(0.0, (*large - *small) / static_cast<double>(2 * (bytes - kSmall)));
    costs.start[i] = *small;
  }
  costs.host_copy = host_copy(bytes, tries);
  return costs;
}

}  // namespace baton::gpudirect
