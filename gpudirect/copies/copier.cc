// Queues lists of pieces by each of the ways.
#include "gpudirect/copies/copier.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <limits>
#include <vector>

#include "absl/strings/str_format.h"

namespace baton::gpudirect {
namespace {

// Without kernels.
constexpr CopyWays kPlainWays = {CopyWay::kSingle, CopyWay::kRows, CopyWay::kBatch};

}  // namespace

absl::StatusOr<std::unique_ptr<Copier>> Copier::open(const Device& device, const Launcher* launcher,
                                                     Stream stream, bool packs) {
  // Kernels read their lists from the host, by the address that the host has.
  const bool reads = device.facts().has(kCanUseHostPointerForRegisteredMemory);
  std::unique_ptr<Copier> copier(new Copier(device, reads ? launcher : nullptr, stream));
  if (absl::Status status = copier->start(packs); !status.ok()) return status;
  return copier;
}

absl::Status Copier::start(bool packs) {
  const Device::Current current(device_);
  if (!current.status().ok()) return current.status();
  const Driver& driver = device_.driver();
  batch_to_.reserve(kMostDescriptors);
  batch_from_.reserve(kMostDescriptors);
  batch_bytes_.reserve(kMostDescriptors);
  const auto make_event = [&](Event& event) {
    Event made = nullptr;
    absl::Status status =
        device_.check(driver.cuEventCreate(&made, kEventDisableTiming), "making an event");
    if (status.ok()) event = made;
    return status;
  };
  absl::Status status = make_event(waited_);
  if (!status.ok() || launcher_ == nullptr) return status;
  if (packs) {
    auto slab = DeviceSlab::create(device_, kPackBytes, {.rdma = false, .shareable = false});
    if (!slab.ok()) return slab.status();
    packing_ = *std::move(slab);
  }
  auto lists = RegisteredPages::make(device_, kLists * kListPieces * sizeof(kernels::Piece));
  if (!lists.ok()) return lists.status();
  list_memory_ = *std::move(lists);
  for (size_t i = 0; i < kLists && status.ok(); ++i) {
    lists_[i].pieces = list_memory_->as<kernels::Piece>() + i * kListPieces;
    status = make_event(lists_[i].after);
  }
  return status;
}

Copier::~Copier() {
  device_.give_back([&] {
    const Driver& driver = device_.driver();
    if (waited_ != nullptr) driver.cuEventDestroy(waited_);
    for (const List& list : lists_) {
      if (list.after != nullptr) driver.cuEventDestroy(list.after);
    }
  });
}

CopyWays Copier::ways(CopyRoute route, const CopyShape& shape) {
  CopyWays able = {CopyWay::kSingle};
  if (route == CopyRoute::kOnDevice || shape.largest <= kMostBytes) able.add(CopyWay::kRows);
  if (device_.driver().cuMemcpyBatchAsync != nullptr) able.add(CopyWay::kBatch);
  if (launcher_ != nullptr && free_list() != nullptr) {
    able.add(CopyWay::kKernel);
    if (packing_ != nullptr && shape.largest <= kPackBytes) able.add(CopyWay::kPacked);
  }
  return able & ways_for(route, shape);
}

Copier::List* Copier::free_list() {
  const Driver& driver = device_.driver();
  const auto read = [&](const List& list) {
    return (list.marked ? driver.cuEventQuery(list.after) : driver.cuStreamQuery(stream_)) ==
           kSuccess;
  };
  for (List& list : lists_) {
    if (!list.used || read(list)) {
      list.used = false;
      return &list;
    }
  }
  return nullptr;
}

absl::Status Copier::copy(CopyRoute route, absl::Span<const CopyPiece> pieces, bool kernels) {
  return copy_as(std::nullopt, route, pieces, kernels);
}

absl::Status Copier::copy_by(CopyWay way, CopyRoute route, absl::Span<const CopyPiece> pieces) {
  return copy_as(way, route, pieces, true);
}

// Nothing for `way`: the cheapest one.
absl::Status Copier::copy_as(std::optional<CopyWay> way, CopyRoute route,
                             absl::Span<const CopyPiece> pieces, bool kernels) {
  if (absl::Status status = device_.alive(); !status.ok()) return status;
  const Device::Current current(device_);
  if (!current.status().ok()) return current.status();
  merged_.clear();
  merge_pieces(pieces, merged_);
  const CopyShape shape = shape_of(merged_);
  if (shape.pieces == 0) return absl::OkStatus();
  CopyWays possible = ways(route, shape);
  if (!kernels) possible = possible & kPlainWays;
  if (!way.has_value()) return run_cheapest(route, shape, merged_, possible);
  if (!possible.has(*way)) {
    return absl::FailedPreconditionError(
        absl::StrFormat("this list cannot be copied %s by '%s': the list has another shape, or the "
                        "device, its driver or this build lacks that way",
                        name_of(route), name_of(*way)));
  }
  return run(*way, route, merged_);
}

CopyWay Copier::cheapest_way(CopyRoute route, const CopyShape& shape) {
  const Device::Current current(device_);
  return cheapest(table_, route, shape, ways(route, shape));
}

std::string Copier::explain(CopyRoute route, absl::Span<const CopyPiece> pieces) {
  const Device::Current current(device_);
  merged_.clear();
  merge_pieces(pieces, merged_);
  const CopyShape shape = shape_of(merged_);
  return gpudirect::explain(table_, route, shape, ways(route, shape));
}

absl::Status Copier::run_cheapest(CopyRoute route, const CopyShape& shape,
                                  absl::Span<const CopyPiece> pieces, CopyWays among) {
  return run(cheapest(table_, route, shape, among), route, pieces);
}

absl::Status Copier::run(CopyWay way, CopyRoute route, absl::Span<const CopyPiece> pieces) {
  switch (way) {
    case CopyWay::kSingle:
      return run_single(route, pieces);
    case CopyWay::kRows:
      return run_rows(route, pieces);
    case CopyWay::kBatch:
      return run_batch(route, pieces);
    case CopyWay::kPacked:
    case CopyWay::kKernel:
      break;
  }
  const absl::StatusOr<size_t> done =
      way == CopyWay::kPacked ? run_packed(route, pieces) : run_kernel(pieces);
  if (!done.ok() || *done == pieces.size()) return done.status();
  // All lists are in use: copy the rest without a kernel.
  const absl::Span<const CopyPiece> rest = pieces.subspan(*done);
  const CopyShape left = shape_of(rest);
  return run_cheapest(route, left, rest, kPlainWays & ways(route, left));
}

absl::Status Copier::run_single(CopyRoute route, absl::Span<const CopyPiece> pieces) {
  const size_t most = route == CopyRoute::kOnDevice ? SIZE_MAX : kMostBytes;
  for (const CopyPiece& piece : pieces) {
    for (size_t at = 0; at < piece.bytes;) {
      const size_t bytes = std::min(most, piece.bytes - at);
      absl::Status status = device_.check(
          device_.driver().cuMemcpyAsync(piece.to + at, piece.from + at, bytes, stream_),
          "a copy of a piece");
      if (!status.ok()) return status;
      at += bytes;
    }
  }
  return absl::OkStatus();
}

absl::Status Copier::run_rows(CopyRoute route, absl::Span<const CopyPiece> pieces) {
  const size_t width = pieces[0].bytes;
  const size_t most = route == CopyRoute::kOnDevice ? pieces.size() : kMostBytes / width;
  PlaneCopy plane;
  plane.width = width;
  plane.from.pitch = pieces.size() > 1 ? pieces[1].from - pieces[0].from : width;
  plane.to.pitch = pieces.size() > 1 ? pieces[1].to - pieces[0].to : width;
  for (size_t i = 0; i < pieces.size(); i += plane.height) {
    plane.from.device = pieces[i].from;
    plane.to.device = pieces[i].to;
    plane.height = std::min(most, pieces.size() - i);
    absl::Status status =
        device_.check(device_.driver().cuMemcpy2DAsync(&plane, stream_), "a copy of rows");
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Whether two pieces of the batch write the same byte. Costs a twentieth of what the batch does.
bool Copier::batch_overlaps() {
  bool rising = true;
  for (size_t i = 1; i < batch_to_.size() && rising; ++i) {
    rising = batch_to_[i - 1] + batch_bytes_[i - 1] <= batch_to_[i];
  }
  if (rising) return false;
  written_.clear();
  for (size_t i = 0; i < batch_to_.size(); ++i) {
    written_.emplace_back(batch_to_[i], batch_bytes_[i]);
  }
  std::sort(written_.begin(), written_.end());
  for (size_t i = 1; i < written_.size(); ++i) {
    const auto& [before, bytes] = written_[i - 1];
    if (before + bytes > written_[i].first) return true;
  }
  return false;
}

absl::Status Copier::flush_batch() {
  if (batch_to_.empty()) return absl::OkStatus();
  absl::Status status;
  // The driver moves a batch's pieces in any order, and asks that none write what another does.
  const bool one_by_one = batch_overlaps();
  for (size_t i = 0; one_by_one && i < batch_to_.size() && status.ok(); ++i) {
    status = device_.check(
        device_.driver().cuMemcpyAsync(batch_to_[i], batch_from_[i], batch_bytes_[i], stream_),
        "a copy of a piece");
  }
  const size_t count = batch_to_.size();
  // In the stream's order: reading earlier has copied what was not yet written.
  BatchAttributes attributes{.flags = kPreferOverlapWithCompute};
  size_t first = 0;
  if (!one_by_one) {
    status = device_.check(device_.driver().cuMemcpyBatchAsync(batch_to_.data(), batch_from_.data(),
                                                               batch_bytes_.data(), count,
                                                               &attributes, &first, 1, stream_),
                           "a batch of copies");
  }
  batch_to_.clear();
  batch_from_.clear();
  batch_bytes_.clear();
  return status;
}

absl::Status Copier::run_batch(CopyRoute route, absl::Span<const CopyPiece> pieces) {
  const size_t most = route == CopyRoute::kOnDevice ? SIZE_MAX : kMostBytes;
  size_t batched = 0;  // bytes; a batch runs as a whole
  for (const CopyPiece& piece : pieces) {
    for (size_t at = 0; at < piece.bytes;) {
      const size_t bytes = std::min(most, piece.bytes - at);
      if (batch_to_.size() == kMostDescriptors || (batched > 0 && bytes > most - batched)) {
        if (absl::Status status = flush_batch(); !status.ok()) return status;
        batched = 0;
      }
      batch_to_.push_back(piece.to + at);
      batch_from_.push_back(piece.from + at);
      batch_bytes_.push_back(bytes);
      at += bytes;
      batched += bytes;
    }
  }
  return flush_batch();
}

absl::Status Copier::launch(List& list, size_t count, size_t largest) {
  const auto chunks =
      static_cast<uint32_t>((largest + kernels::kChunkBytes - 1) / kernels::kChunkBytes);
  constexpr uint64_t kWarps = 8;  // of a block
  const kernels::CopyPieces arguments{list.pieces, static_cast<uint32_t>(count), chunks};
  absl::Status status =
      launcher_->copy_pieces(arguments, (count * chunks + kWarps - 1) / kWarps, stream_);
  if (!status.ok()) return status;
  list.used = true;
  status = device_.check(device_.driver().cuEventRecord(list.after, stream_), "marking a launch");
  list.marked = status.ok();
  return status;
}

absl::StatusOr<size_t> Copier::run_kernel(absl::Span<const CopyPiece> pieces) {
  for (size_t i = 0; i < pieces.size();) {
    List* const list = free_list();
    if (list == nullptr) return i;
    const size_t count = std::min(kListPieces, pieces.size() - i);
    size_t largest = 0;
    for (size_t j = 0; j < count; ++j) {
      const CopyPiece& piece = pieces[i + j];
      list->pieces[j] = {pointer_of<const std::byte>(piece.from), pointer_of<std::byte>(piece.to),
                         piece.bytes};
      largest = std::max(largest, piece.bytes);
    }
    if (absl::Status status = launch(*list, count, largest); !status.ok()) return status;
    i += count;
  }
  return pieces.size();
}

absl::StatusOr<size_t> Copier::run_packed(CopyRoute route, absl::Span<const CopyPiece> pieces) {
  const DevicePointer packed = packing_->span().data;
  for (size_t i = 0; i < pieces.size();) {
    List* const list = free_list();
    if (list == nullptr) return i;
    size_t count = 0, bytes = 0, largest = 0;
    for (; i + count < pieces.size() && count < kListPieces; ++count) {
      const CopyPiece& piece = pieces[i + count];
      if (bytes + piece.bytes > kPackBytes) break;
      list->pieces[count] = route == CopyRoute::kToHost
                                ? kernels::Piece{pointer_of<const std::byte>(piece.from),
                                                 pointer_of<std::byte>(packed + bytes), piece.bytes}
                                : kernels::Piece{pointer_of<const std::byte>(packed + bytes),
                                                 pointer_of<std::byte>(piece.to), piece.bytes};
      bytes += piece.bytes;
      largest = std::max(largest, piece.bytes);
    }
    // The stream's order: packed before it is copied, copied before the next is packed.
    absl::Status status;
    if (route == CopyRoute::kToHost) {
      status = launch(*list, count, largest);
      const CopyPiece all{packed, pieces[i].to, bytes};
      if (status.ok()) status = run_single(route, {&all, 1});
    } else {
      const CopyPiece all{pieces[i].from, packed, bytes};
      status = run_single(route, {&all, 1});
      if (status.ok()) status = launch(*list, count, largest);
    }
    if (!status.ok()) return status;
    i += count;
  }
  return pieces.size();
}

// Fills a copier's table by trying every way with pieces of every size.

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
