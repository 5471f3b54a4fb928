// Queues lists of pieces by each of the ways.
#include "gpudirect/copies/copier.h"

#include <algorithm>
#include <limits>

#include "absl/strings/str_format.h"

namespace baton::gpudirect {
namespace {

constexpr CopyWays kPlainWays = {CopyWay::kSingle, CopyWay::kRows, CopyWay::kBoxes,
                                 CopyWay::kBatch};  // without kernels

// Whether a plane of as many rows as the box's layers have is its next layer: as far from the last
// one as those are from each other, and so far that rows are counted whole.
bool next_layer(BoxCopy& box, DevicePointer from, DevicePointer to) {
  constexpr DevicePointer kLargest = std::numeric_limits<int32_t>::max();
  const auto layer = [&](const BoxSide& side, DevicePointer at) -> size_t {
    const DevicePointer step = at - (side.at + (box.depth - 1) * side.height * side.pitch);
    const bool fits = step <= kLargest && step % side.pitch == 0 && step / side.pitch >= box.height;
    return fits ? step / side.pitch : 0;  // unsigned: backwards is too far
  };
  const size_t from_height = layer(box.from, from), to_height = layer(box.to, to);
  if (from_height == 0 || to_height == 0) return false;
  if (box.depth > 1 && (from_height != box.from.height || to_height != box.to.height)) return false;
  box.from.height = from_height;
  box.to.height = to_height;
  ++box.depth;
  return true;
}

// Past the last byte that it writes.
DevicePointer end_of(const BoxCopy& box) {
  return box.to.at + ((box.depth - 1) * box.to.height + box.height - 1) * box.to.pitch + box.width;
}

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
  boxes_.reserve(kMostDescriptors);
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
  if (route == CopyRoute::kOnDevice || shape.largest <= kMostBytes) {
    able.add(CopyWay::kRows);
    if (why_no_boxes().empty()) able.add(CopyWay::kBoxes);
  }
  if (device_.driver().cuMemcpyBatchAsync != nullptr) able.add(CopyWay::kBatch);
  if (launcher_ != nullptr && free_list() != nullptr) {
    able.add(CopyWay::kKernel);
    if (packing_ != nullptr && shape.largest <= kPackBytes) able.add(CopyWay::kPacked);
  }
  return able & ways_for(route, shape);
}

const std::string& Copier::why_no_boxes() const {
  static const std::string kLacks = "the driver lacks cuMemcpy3DBatchAsync as of CUDA 13.0";
  const bool lacks = device_.driver().cuMemcpy3DBatchAsync == nullptr;
  return lacks ? kLacks : table_.why_left_out(CopyWay::kBoxes);
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
  return run(*way, route, shape, merged_);
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
  std::string out = gpudirect::explain(table_, route, shape, ways(route, shape));
  const std::string& why_not = why_no_boxes();
  if (!why_not.empty() && ways_for(route, shape).has(CopyWay::kBoxes)) {
    absl::StrAppendFormat(&out, "; no %s: %s", name_of(CopyWay::kBoxes), why_not);
  }
  return out;
}

absl::Status Copier::run_cheapest(CopyRoute route, const CopyShape& shape,
                                  absl::Span<const CopyPiece> pieces, CopyWays among) {
  const CopyWay way = cheapest(table_, route, shape, among);
  absl::Status status = run(way, route, shape, pieces);
  const bool refused =
      !status.ok() && way == CopyWay::kBoxes && !why_no_boxes().empty() && device_.alive().ok();
  if (!refused) return status;
  // Copies the whole list again by another way; what was copied before the refusal is copied twice.
  return run(cheapest(table_, route, shape, among & ways(route, shape)), route, shape, pieces);
}

absl::Status Copier::run(CopyWay way, CopyRoute route, const CopyShape& shape,
                         absl::Span<const CopyPiece> pieces) {
  switch (way) {
    case CopyWay::kSingle:
      return run_single(route, pieces);
    case CopyWay::kRows:
      return run_rows(route, shape.plane, pieces);
    case CopyWay::kBoxes:
      return run_boxes(route, shape.plane, pieces);
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

absl::Status Copier::run_rows(CopyRoute route, size_t plane_pieces,
                              absl::Span<const CopyPiece> pieces) {
  const size_t width = pieces[0].bytes;
  const size_t most = route == CopyRoute::kOnDevice ? plane_pieces : kMostBytes / width;
  PlaneCopy plane;
  plane.width = width;
  plane.from.pitch = pieces.size() > 1 ? pieces[1].from - pieces[0].from : width;
  plane.to.pitch = pieces.size() > 1 ? pieces[1].to - pieces[0].to : width;
  for (size_t i = 0; i < pieces.size(); i += plane.height) {
    plane.from.device = pieces[i].from;
    plane.to.device = pieces[i].to;
    plane.height = std::min(most, plane_pieces - i % plane_pieces);
    if (absl::Status status = copy_rows(plane); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status Copier::copy_rows(const PlaneCopy& plane) const {
  return device_.check(device_.driver().cuMemcpy2DAsync(&plane, stream_), "a copy of rows");
}

// Whether two of what is noted as written have a byte in common.
bool Copier::written_twice() {
  std::sort(written_.begin(), written_.end());
  for (size_t i = 1; i < written_.size(); ++i) {
    const auto& [before, bytes] = written_[i - 1];
    if (before + bytes > written_[i].first) return true;
  }
  return false;
}

// Whether two rows of the boxes write the same byte. Planes may lie in each other all the same.
bool Copier::boxes_overlap() {
  bool rising = true;
  for (size_t i = 1; i < boxes_.size() && rising; ++i) {
    rising = end_of(boxes_[i - 1]) <= boxes_[i].to.at;
  }
  if (rising) return false;
  written_.clear();
  for (const BoxCopy& box : boxes_) {
    for (size_t layer = 0; layer < box.depth; ++layer) {
      for (size_t row = 0; row < box.height; ++row) {
        const size_t at = (layer * box.to.height + row) * box.to.pitch;
        written_.emplace_back(box.to.at + at, box.width);
      }
    }
  }
  return written_twice();
}

absl::Status Copier::flush_boxes() {
  if (boxes_.empty()) return absl::OkStatus();
  absl::Status status;
  // As with a batch: no order among them, and so none may write what another does.
  if (boxes_overlap()) {
    for (const BoxCopy& box : boxes_) {
      for (size_t layer = 0; layer < box.depth && status.ok(); ++layer) {
        PlaneCopy plane{.width = box.width, .height = box.height};
        plane.from.device = box.from.at + layer * box.from.height * box.from.pitch;
        plane.from.pitch = box.from.pitch;
        plane.to.device = box.to.at + layer * box.to.height * box.to.pitch;
        plane.to.pitch = box.to.pitch;
        status = copy_rows(plane);
      }
    }
  } else {
    status = device_.check(
        device_.driver().cuMemcpy3DBatchAsync(boxes_.size(), boxes_.data(), 0, stream_),
        "a batch of copies of planes");
    if (!status.ok()) table_.leave_out(CopyWay::kBoxes, std::string(status.message()));
  }
  boxes_.clear();
  return status;
}

absl::Status Copier::run_boxes(CopyRoute route, size_t plane_pieces,
                               absl::Span<const CopyPiece> pieces) {
  const size_t width = pieces[0].bytes;
  const size_t most = route == CopyRoute::kOnDevice ? SIZE_MAX : kMostBytes;
  BoxCopy next{.width = width, .depth = 1, .flags = kPreferOverlapWithCompute};
  next.from.pitch = pieces[1].from - pieces[0].from;
  next.to.pitch = pieces[1].to - pieces[0].to;
  size_t batched = 0;  // bytes; a batch runs as a whole
  for (size_t i = 0; i < pieces.size(); i += next.height) {
    next.from.at = pieces[i].from;
    next.to.at = pieces[i].to;
    next.height = std::min(most / width, plane_pieces - i % plane_pieces);
    next.from.height = next.to.height = next.height;
    const size_t bytes = next.height * width;
    const bool room = batched == 0 || bytes <= most - batched;
    // Must have as many rows as the previous ones: a part of a plane leaves no room for another
    // part.
    if (room && !boxes_.empty() && next_layer(boxes_.back(), next.from.at, next.to.at)) {
      batched += bytes;
      continue;
    }
    if (!room || boxes_.size() == kMostDescriptors) {
      if (absl::Status status = flush_boxes(); !status.ok()) return status;
      batched = 0;
    }
    boxes_.push_back(next);
    batched += bytes;
  }
  return flush_boxes();
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
  return written_twice();
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

}  // namespace baton::gpudirect
