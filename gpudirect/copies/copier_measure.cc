// Fills a copier's table by trying every way with pieces of every size.
#include <algorithm>
#include <array>
#include <chrono>
#include <limits>
#include <vector>

#include "gpudirect/copies/copier.h"

namespace baton::gpudirect {
namespace {

constexpr size_t kMostMoved = 16 << 20;  // at a time
constexpr size_t kGap = 1 << 10;
constexpr size_t kApart = kMostMoved + CopyTable::kCounts.back() * kGap;  // of pieces with gaps
constexpr double kLong = 500e3;   // nanoseconds: longer copies are not tried
constexpr double kShort = 100e3;  // nanoseconds: longer ones are tried once
constexpr double kNoWay = 1e18;   // nanoseconds: what a way costs that there is not
constexpr double kUntried = std::numeric_limits<double>::infinity();
constexpr std::chrono::seconds kPatience{2};  // a copy that takes longer has failed

// What the times before say of the one at `i`: each piece costs what it did there.
double expected(const CopyTimes& times, size_t i) {
  if (i < 2) return 0;
  const auto count = [](size_t of) { return static_cast<double>(CopyTable::kCounts[of]); };
  const double piece = (times[i - 1] - times[i - 2]) / (count(i - 1) - count(i - 2));
  return times[i - 1] + std::max(0.0, piece) * (count(i) - count(i - 1));
}

// With gaps on the device, and none at the other end: so that nothing merges, and all can pack.
std::vector<CopyPiece> pieces_of(CopyRoute route, size_t size, DevicePointer device,
                                 DevicePointer host) {
  std::vector<CopyPiece> pieces(std::min(CopyTable::kCounts.back(), kMostMoved / size));
  for (size_t i = 0; i < pieces.size(); ++i) {
    const DevicePointer apart = device + i * (size + kGap);
    const DevicePointer other = (route == CopyRoute::kOnDevice ? device + kApart : host) + i * size;
    pieces[i] = route == CopyRoute::kToDevice ? CopyPiece{other, apart, size}
                                              : CopyPiece{apart, other, size};
  }
  return pieces;
}

}  // namespace

absl::Status Copier::wait() {
  const Driver& driver = device_.driver();
  absl::Status status = device_.check(driver.cuEventRecord(waited_, stream_), "marking copies");
  const auto begin = std::chrono::steady_clock::now();
  Result result = kNotReady;
  while (status.ok() && result == kNotReady) {
    result = driver.cuEventQuery(waited_);
    if (result != kNotReady) status = device_.check(result, "waiting for copies");
    if (result == kNotReady && std::chrono::steady_clock::now() - begin > kPatience) {
      status = absl::DeadlineExceededError("a copy of at most 16 MiB has not ended in 2 s");
    }
  }
  return status;
}

// In nanoseconds.
absl::StatusOr<double> Copier::time(CopyWay way, CopyRoute route,
                                    absl::Span<const CopyPiece> pieces) {
  const auto begin = std::chrono::steady_clock::now();
  absl::Status status = copy_by(way, route, pieces);
  if (status.ok()) status = wait();
  if (!status.ok()) return status;
  const auto end = std::chrono::steady_clock::now();
  return std::chrono::duration<double, std::nano>(end - begin).count();
}

// Once, those that take no longer than they may. No way: none.
absl::Status Copier::try_counts(CopyWay way, CopyRoute route, absl::Span<const CopyPiece> pieces,
                                CopyTimes& times) {
  for (size_t i = 0; i < times.size(); ++i) {
    if (CopyTable::kCounts[i] > pieces.size() || expected(times, i) > kLong) break;
    if (times[i] != kUntried && times[i] > kShort) continue;
    const auto took = time(way, route, pieces.first(CopyTable::kCounts[i]));
    if (absl::IsFailedPrecondition(took.status())) break;
    if (!took.ok()) return took.status();
    times[i] = std::min(times[i], *took);
  }
  return absl::OkStatus();
}

absl::Status Copier::measure(int tries) {
  const Device::Current current(device_);
  if (!current.status().ok()) return current.status();
  const auto slab =
      DeviceSlab::create(device_, kApart + kMostMoved, {.rdma = false, .shareable = false});
  if (!slab.ok()) return slab.status();
  const auto host = RegisteredPages::make(device_, kMostMoved);
  if (!host.ok()) return host.status();
  constexpr size_t kSizes = CopyTable::kSizes.size();
  std::vector<CopyTimes> times(kCopyRoutes * kSizes * kCopyWays);
  for (CopyTimes& row : times) row.fill(kUntried);
  absl::Status status;
  // What is busy for a while costs each a try, and none all of them.
  for (int i = 0; i < tries; ++i) {
    for (size_t row = 0; row < times.size() && status.ok(); ++row) {
      const auto route = static_cast<CopyRoute>(row / kCopyWays / kSizes);
      const auto way = static_cast<CopyWay>(row % kCopyWays);
      status = try_counts(way, route,
                          pieces_of(route, CopyTable::kSizes[row / kCopyWays % kSizes],
                                    (*slab)->span().data, (*host)->address()),
                          times[row]);
    }
  }
  // What was queued before an error may still use the memory.
  if (!status.ok()) wait().IgnoreError();
  if (!status.ok()) return status;
  for (size_t row = 0; row < times.size(); ++row) {
    const auto way = static_cast<CopyWay>(row % kCopyWays);
    for (size_t i = 0; i < CopyTable::kCounts.size(); ++i) {
      double& took = times[row][i];
      if (took == kUntried) took = i < 2 ? kNoWay : expected(times[row], i);
      table_.set(static_cast<CopyRoute>(row / kCopyWays / kSizes), way, row / kCopyWays % kSizes, i,
                 took);
    }
  }
  return status;
}

}  // namespace baton::gpudirect
