// Pieces of calls on their way through the slabs of all ranks.
#include "collectives/devices/device_exchange.h"

#include <sched.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

namespace baton::collectives::devices {
namespace {

using baton::internal::VectorSum;
using baton::internal::VectorSums;
using executor::Blocked;
using executor::Call;

// The slot of the first sum, after those of the executor's lanes.
constexpr size_t kFirstSum = VectorSums::kSlots - DeviceExchange::kSlots;
static_assert(kFirstSum >= executor::kLanes, "the executor's lanes have the first slots");
static_assert(2 * DeviceExchange::kSlots <= baton::internal::DeviceCopies::kSlots);

constexpr size_t kOfferBytes =
    RemoteRegion::kEncodedBytes + 3 * DeviceExchange::kSlots * RemoteCounter::kEncodedBytes;

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceExchange>> DeviceExchange::create(Group group, int device,
                                                                       VectorSums& sums) {
  std::unique_ptr<DeviceExchange> made(new DeviceExchange(std::move(group), device, sums));
  if (absl::Status status = made->open(); !status.ok()) return status;
  return made;
}

DeviceExchange::DeviceExchange(Group group, int device, VectorSums& sums)
    : group_(std::move(group)),
      worker_(group_.worker),
      device_(device),
      rank_(group_.rank),
      ranks_(group_.ranks),
      sums_(sums),
      theirs_(ranks_) {
  for (Piece& piece : pieces_) {
    piece.owner = this;
    piece.ways.resize(ranks_);
  }
}

absl::Status DeviceExchange::open() {
  const baton::internal::DeviceMemory* const devices = baton::internal::device_memory();
  auto copies = devices->copies(device_);
  if (!copies.ok()) return copies.status();
  copies_ = *std::move(copies);
  auto slab = devices->allocate(device_, slab_bytes());
  if (!slab.ok()) return slab.status();
  slab_ = *std::move(slab);
  absl::StatusOr<MemoryRegion> region = worker_.register_memory(slab_->data(), slab_->size());
  if (!region.ok()) return region.status();
  region_ = *region;
  const absl::StatusOr<RemoteRegion> remote = worker_.remote_region(region_);
  if (!remote.ok()) return remote.status();
  for (uint32_t r = 0; r < ranks_; ++r) {
    if (r == rank_) continue;
    std::string offer = remote->encode();
    for (Piece& piece : pieces_) {
      for (CounterId Ways::*counter : {&Ways::part, &Ways::sum, &Ways::room}) {
        absl::StatusOr<CounterId> made = worker_.allocate_counter();
        if (!made.ok()) return made.status();
        piece.ways[r].*counter = *made;
        absl::StrAppend(&offer, worker_.remote_counter(*made).encode());
      }
    }
    group_.tell(r, offer);
  }
  return absl::OkStatus();
}

DeviceExchange::~DeviceExchange() {
  stop();
  if (region_.generation != 0) worker_.deregister_memory(region_).IgnoreError();
  for (Piece& piece : pieces_) {
    for (Ways& way : piece.ways) {
      for (const CounterId counter : {way.part, way.sum, way.room}) {
        if (counter.generation != 0) worker_.free_counter(counter).IgnoreError();
      }
    }
  }
}

// False: it has not come, or makes no sense; then nothing is sent there.
bool DeviceExchange::read_offer(uint32_t rank) {
  if (theirs_[rank].generation != 0) return true;
  std::string_view bytes = group_.told(rank);
  if (bytes.size() != kOfferBytes) return false;
  const absl::StatusOr<RemoteRegion> region =
      RemoteRegion::decode(bytes.substr(0, RemoteRegion::kEncodedBytes));
  if (!region.ok() || region->size < slab_bytes()) return false;
  bytes.remove_prefix(RemoteRegion::kEncodedBytes);
  for (Piece& piece : pieces_) {
    for (RemoteCounter Ways::*counter : {&Ways::to_part, &Ways::to_sum, &Ways::to_room}) {
      const auto decoded = RemoteCounter::decode(bytes.substr(0, RemoteCounter::kEncodedBytes));
      if (!decoded.ok()) return false;
      piece.ways[rank].*counter = *decoded;
      bytes.remove_prefix(RemoteCounter::kEncodedBytes);
    }
  }
  theirs_[rank] = *region;
  return true;
}

namespace {

// The number of `other` among all ranks but `owner`.
size_t number_among(uint32_t owner, uint32_t other) { return other > owner ? other - 1 : other; }

}  // namespace

size_t DeviceExchange::out_place(size_t slot, uint32_t to) const {
  return first_place(slot) + number_among(rank_, to) * part_room(ranks_);
}
size_t DeviceExchange::part_place(size_t slot, uint32_t owner, uint32_t from) const {
  return first_place(slot) + (ranks_ - 1 + number_among(owner, from)) * part_room(ranks_);
}
size_t DeviceExchange::sum_place(size_t slot, uint32_t owner, uint32_t from) const {
  return first_place(slot) + (2 * (ranks_ - 1) + number_among(owner, from)) * part_room(ranks_);
}
size_t DeviceExchange::own_place(size_t slot) const {
  return first_place(slot) + 3 * (ranks_ - 1) * part_room(ranks_);
}

// As few pieces as hold it, all of one size; parts are whole lines.
DeviceExchange::Job DeviceExchange::job_of(Call& call) const {
  const size_t element = call.geometry.element_bytes;
  const size_t most = part_room(ranks_) / element * ranks_;
  Job job{.call = &call, .pieces = std::max<size_t>(1, (call.geometry.count + most - 1) / most)};
  const size_t parts = job.pieces * ranks_;
  const size_t line = 256 / element;
  job.part_elements = ((call.geometry.count + parts - 1) / parts + line - 1) / line * line;
  return job;
}

// Parts at the end of the vector are short or empty.
DeviceExchange::Range DeviceExchange::range_of(const Piece& piece, uint32_t part) const {
  const executor::Geometry& geometry = piece.job->call->geometry;
  const size_t first = (piece.index * ranks_ + part) * piece.job->part_elements;
  if (first >= geometry.count) return {};
  const size_t count = std::min(piece.job->part_elements, geometry.count - first);
  return {first * geometry.element_bytes, count * geometry.element_bytes};
}

void DeviceExchange::start(Call& call) { jobs_.push_back(job_of(call)); }

absl::StatusOr<bool> DeviceExchange::advance() {
  if (absl::Status status = transfer_failure(); !status.ok()) return status;
  bool any = false;
  for (Job& job : jobs_) {
    while (job.begun < job.pieces) {
      const size_t slot = next_ % kSlots;
      Piece& piece = pieces_[slot];
      if (piece.stage != Stage::kFree) break;
      ++next_;
      ++piece.uses;
      piece.job = &job;
      piece.index = job.begun++;
      any = true;
      if (absl::Status status = begin_copy_in(slot); !status.ok()) return status;
    }
    if (job.begun < job.pieces) break;
  }
  for (size_t age = 0; age < kSlots; ++age) {  // the oldest first
    const size_t slot = (next_ + age) % kSlots;
    while (pieces_[slot].stage != Stage::kFree) {
      const absl::StatusOr<bool> moved = step(slot);
      if (!moved.ok()) return moved;
      if (!*moved) break;
      any = true;
    }
  }
  while (!jobs_.empty() && jobs_.front().done == jobs_.front().pieces) {
    Call& call = *jobs_.front().call;
    jobs_.pop_front();
    call.on_done(call, call.context);
  }
  return any;
}

// False: the stage waits.
absl::StatusOr<bool> DeviceExchange::step(size_t slot) {
  Piece& piece = pieces_[slot];
  const auto next = [&](Stage stage) {
    piece.stage = stage;
    for (Ways& way : piece.ways) way.sent = false;
    return true;
  };
  absl::Status status;
  switch (piece.stage) {
    case Stage::kFree:
      return false;
    case Stage::kCopyIn:
    case Stage::kCopyOut: {
      const bool in = piece.stage == Stage::kCopyIn;
      const std::optional<absl::Status> ended = copies_->ended(in ? slot : kSlots + slot);
      if (!ended.has_value()) return false;
      if (!ended->ok()) return *ended;
      return next(in ? Stage::kSend : Stage::kEnd);
    }
    case Stage::kSend:
    case Stage::kAnswer: {
      const absl::StatusOr<bool> all = send_all(slot);
      if (!all.ok() || !*all) return all;
      return next(piece.stage == Stage::kSend ? Stage::kParts : Stage::kSums);
    }
    case Stage::kParts:
      if (!all_raised(piece, &Ways::part)) return false;
      status = begin_sum(slot);
      if (!status.ok()) return status;
      return next(Stage::kSum);
    case Stage::kSum: {
      const std::optional<absl::Status> ended = sums_.ended(kFirstSum + slot);
      if (!ended.has_value()) return false;
      if (!ended->ok()) return *ended;
      return next(Stage::kAnswer);
    }
    case Stage::kSums:
      if (!all_raised(piece, &Ways::sum)) return false;
      status = begin_copy_out(slot);
      if (!status.ok()) return status;
      return next(Stage::kCopyOut);
    case Stage::kEnd:
      if (piece.on_way.load(std::memory_order_acquire) != 0) return false;
      if (status = transfer_failure(); !status.ok()) return status;
      if (!give_room(slot)) return false;
      ++piece.job->done;
      piece.job = nullptr;
      return next(Stage::kFree);
  }
  return false;
}

absl::Status DeviceExchange::begin_copy_in(size_t slot) {
  Piece& piece = pieces_[slot];
  runs_.clear();
  for (uint32_t r = 0; r < ranks_; ++r) {
    const Range range = range_of(piece, r);
    if (r == rank_ || range.bytes == 0) continue;
    runs_.push_back(
        {slab_->data() + out_place(slot, r), piece.job->call->in + range.offset, range.bytes});
  }
  piece.stage = runs_.empty() ? Stage::kSend : Stage::kCopyIn;
  return runs_.empty() ? absl::OkStatus() : copies_->begin(slot, runs_);
}

absl::Status DeviceExchange::begin_sum(size_t slot) {
  Piece& piece = pieces_[slot];
  const Call& call = *piece.job->call;
  const Range range = range_of(piece, rank_);
  sources_.clear();
  for (uint32_t r = 0; r < ranks_; ++r) {
    sources_.push_back(
        {r == rank_ ? call.in + range.offset : slab_->data() + part_place(slot, rank_, r), true});
  }
  return sums_.begin(kFirstSum + slot, {.element = executor::element_of(call.type),
                                        .operation = executor::operation_of(call.op),
                                        .divide_by = call.op == ReduceOp::kAvg ? ranks_ : 1,
                                        .count = range.bytes / call.geometry.element_bytes,
                                        .sources = sources_,
                                        .target = slab_->data() + own_place(slot),
                                        .target_on_device = true});
}

absl::Status DeviceExchange::begin_copy_out(size_t slot) {
  Piece& piece = pieces_[slot];
  runs_.clear();
  for (uint32_t r = 0; r < ranks_; ++r) {
    const Range range = range_of(piece, r);
    if (range.bytes == 0) continue;
    const size_t from = r == rank_ ? own_place(slot) : sum_place(slot, rank_, r);
    runs_.push_back({piece.job->call->out + range.offset, slab_->data() + from, range.bytes});
  }
  return runs_.empty() ? absl::OkStatus() : copies_->begin(kSlots + slot, runs_);
}

absl::StatusOr<bool> DeviceExchange::send_all(size_t slot) {
  bool all = true;
  for (uint32_t distance = 1; distance < ranks_; ++distance) {  // each rank begins with another
    const uint32_t to = (rank_ + distance) % ranks_;
    Ways& way = pieces_[slot].ways[to];
    if (way.sent) continue;
    const absl::StatusOr<bool> sent = send(slot, to);
    if (!sent.ok()) return sent;
    way.sent = *sent;
    all &= *sent;
  }
  return all;
}

// False: not now.
absl::StatusOr<bool> DeviceExchange::send(size_t slot, uint32_t to) {
  Piece& piece = pieces_[slot];
  Ways& way = piece.ways[to];
  const bool part = piece.stage == Stage::kSend;
  if (!read_offer(to) || worker_.counter_value(way.room) + 1 < piece.uses) return false;
  const size_t bytes = range_of(piece, part ? to : rank_).bytes;
  TransferRequest request;
  request.op = Op::kWrite;
  request.peer = group_.peer(to);
  if (bytes > 0) {
    request.local = region_;
    request.local_layout = Layout::contiguous(part ? out_place(slot, to) : own_place(slot), bytes);
    request.remote = theirs_[to];
    request.remote_layout =
        Layout::contiguous(part ? part_place(slot, to, rank_) : sum_place(slot, to, rank_), bytes);
  }
  request.counter = part ? way.to_part : way.to_sum;
  request.on_end = &DeviceExchange::on_end;
  request.context = &piece;
  request.detached = true;
  piece.on_way.fetch_add(1, std::memory_order_relaxed);
  const absl::StatusOr<TransferId> id = worker_.submit(request);
  if (!id.ok()) {
    piece.on_way.fetch_sub(1, std::memory_order_relaxed);
    if (absl::IsResourceExhausted(id.status())) return false;
    return id.status();
  }
  (part ? way.part_on_way : way.sum_on_way) = *id;
  return true;
}

void DeviceExchange::on_end(void* context, TransferId, const absl::Status& status) {
  auto& piece = *static_cast<Piece*>(context);
  if (!status.ok()) {
    DeviceExchange& owner = *piece.owner;
    const std::lock_guard lock(owner.mutex_);
    owner.failure_.Update(status);
    owner.failed_.store(true, std::memory_order_release);
  }
  piece.on_way.fetch_sub(1, std::memory_order_release);
}

absl::Status DeviceExchange::transfer_failure() {
  if (!failed_.load(std::memory_order_acquire)) return absl::OkStatus();
  const std::lock_guard lock(mutex_);
  return failure_;
}

bool DeviceExchange::all_raised(const Piece& piece, CounterId Ways::*counter) const {
  for (uint32_t r = 0; r < ranks_; ++r) {
    if (r != rank_ && worker_.counter_value(piece.ways[r].*counter) < piece.uses) return false;
  }
  return true;
}

// The others may send to this slot again. One that has left no longer wants to.
bool DeviceExchange::give_room(size_t slot) {
  bool all = true;
  for (uint32_t r = 0; r < ranks_; ++r) {
    Ways& way = pieces_[slot].ways[r];
    if (r == rank_ || way.sent) continue;
    TransferRequest request;
    request.op = Op::kWrite;
    request.peer = group_.peer(r);
    request.counter = way.to_room;
    request.detached = true;
    way.sent = !absl::IsResourceExhausted(worker_.submit(request).status());
    all &= way.sent;
  }
  return all;
}

bool DeviceExchange::on_device() const {
  return std::any_of(pieces_.begin(), pieces_.end(), [](const Piece& piece) {
    return piece.stage == Stage::kCopyIn || piece.stage == Stage::kSum ||
           piece.stage == Stage::kCopyOut;
  });
}

Blocked DeviceExchange::blocked() const {
  Blocked found;
  for (size_t age = 0; age < kSlots && found.call == nullptr; ++age) {
    const Piece& piece = pieces_[(next_ + age) % kSlots];
    if (piece.stage == Stage::kFree) continue;
    found = {.call = piece.job->call,
             .piece = piece.index,
             .step = static_cast<uint32_t>(piece.stage),
             .peer = rank_};
    for (uint32_t r = ranks_; r-- > 0;) {
      if (r == rank_) continue;
      const Ways& way = piece.ways[r];
      const auto raised = [&](CounterId counter) {
        return worker_.counter_value(counter) >= piece.uses;
      };
      const bool to_send =
          (piece.stage == Stage::kSend || piece.stage == Stage::kAnswer) && !way.sent;
      if (to_send || (piece.stage == Stage::kParts && !raised(way.part)) ||
          (piece.stage == Stage::kSums && !raised(way.sum))) {
        found.peer = r;
        found.to_send = to_send;
      }
    }
    found.combining = found.peer == rank_;
  }
  return found;
}

void DeviceExchange::stop() {
  const auto over = [this] {
    return std::all_of(pieces_.begin(), pieces_.end(), [](const Piece& piece) {
      return piece.on_way.load(std::memory_order_acquire) == 0;
    });
  };
  if (!over()) {
    for (const Piece& piece : pieces_) {
      for (const Ways& way : piece.ways) {
        for (const TransferId id : {way.part_on_way, way.sum_on_way}) {
          if (id.generation != 0) worker_.cancel(id).IgnoreError();
        }
      }
    }
    if (!worker_.wait_until(over, std::chrono::milliseconds(100)).ok()) {
      // What is on its way lands in a slab of the peer's, which it fences before it gives it back.
      for (uint32_t r = 0; r < ranks_; ++r) {
        if (r != rank_) worker_.disconnect(group_.peer(r), Time::zero()).IgnoreError();
      }
      worker_.wait_until(over).IgnoreError();
    }
  }
  for (size_t slot = 0; slot < kSlots; ++slot) {
    Piece& piece = pieces_[slot];
    const auto wait = [](auto&& ended) {
      while (!ended().has_value()) sched_yield();
    };
    if (piece.stage == Stage::kCopyIn) wait([&] { return copies_->ended(slot); });
    if (piece.stage == Stage::kCopyOut) wait([&] { return copies_->ended(kSlots + slot); });
    if (piece.stage == Stage::kSum) wait([&] { return sums_.ended(kFirstSum + slot); });
    piece.stage = Stage::kFree;
  }
  jobs_.clear();
}

}  // namespace baton::collectives::devices
