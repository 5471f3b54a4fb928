// Fills a copier's table by trying every way with pieces of every size.
#include <algorithm>
#include <chrono>
#include <limits>

#include "gpudirect/copies/copier.h"

namespace baton::gpudirect {
namespace {

constexpr size_t kMostPieces = 256;
constexpr size_t kScratch = 8 << 20;          // at each end
constexpr double kNoWay = 1e18;               // nanoseconds: what a way costs that there is not
constexpr std::chrono::seconds kPatience{2};  // a copy of 4 MiB that takes longer has failed

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
      status = absl::DeadlineExceededError("a copy of at most 4 MiB has not ended in 2 s");
    }
  }
  return status;
}

// The shortest of some tries, in nanoseconds.
absl::StatusOr<double> Copier::time(CopyWay way, CopyRoute route,
                                    absl::Span<const CopyPiece> pieces) {
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i < tries_; ++i) {
    const auto begin = std::chrono::steady_clock::now();
    absl::Status status = copy_by(way, route, pieces);
    if (status.ok()) status = wait();
    if (!status.ok()) return status;
    const auto end = std::chrono::steady_clock::now();
    least = std::min(least, std::chrono::duration<double, std::nano>(end - begin).count());
  }
  return least;
}

absl::StatusOr<CopyCost> Copier::time_size(CopyWay way, CopyRoute route, size_t size,
                                           DevicePointer device, DevicePointer host) {
  // With gaps on the device, and none at the other end: so that nothing merges, and all can pack.
  std::vector<CopyPiece> pieces(std::clamp<size_t>(kScratch / 2 / size, 2, kMostPieces));
  for (size_t i = 0; i < pieces.size(); ++i) {
    const DevicePointer apart = device + 2 * i * size;
    const DevicePointer other =
        (route == CopyRoute::kOnDevice ? device + kScratch : host) + i * size;
    pieces[i] = route == CopyRoute::kToDevice ? CopyPiece{other, apart, size}
                                              : CopyPiece{apart, other, size};
  }
  const auto one = time(way, route, absl::MakeConstSpan(pieces).first(1));
  if (!one.ok()) return one.status();
  const auto all = time(way, route, pieces);
  if (!all.ok()) return all.status();
  CopyCost cost;
  cost.piece = std::max(0.0, (*all - *one) / static_cast<double>(pieces.size() - 1));
  cost.start = std::max(0.0, *one - cost.piece);
  return cost;
}

absl::Status Copier::measure(int tries) {
  tries_ = tries;
  const Device::Current current(device_);
  if (!current.status().ok()) return current.status();
  const auto slab = DeviceSlab::create(device_, 2 * kScratch, {.rdma = false, .shareable = false});
  if (!slab.ok()) return slab.status();
  const auto host = RegisteredPages::make(device_, kScratch);
  if (!host.ok()) return host.status();
  absl::Status status;
  CopyTable table;
  for (const CopyRoute route : {CopyRoute::kToHost, CopyRoute::kToDevice, CopyRoute::kOnDevice}) {
    for (size_t way = 0; way < kCopyWays; ++way) {
      for (size_t size = 0; size < CopyTable::kSizes.size() && status.ok(); ++size) {
        const auto cost = time_size(static_cast<CopyWay>(way), route, CopyTable::kSizes[size],
                                    (*slab)->span().data, (*host)->address());
        if (cost.ok()) {
          table.at(route, static_cast<CopyWay>(way), size) = *cost;
        } else if (absl::IsFailedPrecondition(cost.status())) {
          table.at(route, static_cast<CopyWay>(way), size).start = kNoWay;
        } else {
          status = cost.status();
        }
      }
    }
  }
  // What was queued before an error may still use the memory.
  if (!status.ok()) wait().IgnoreError();
  if (status.ok()) table_ = table;
  return status;
}

}  // namespace baton::gpudirect
