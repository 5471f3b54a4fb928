// Starts what kernels ask for.
#include "gpudirect/triggers/triggered_transfers.h"

#include <algorithm>
#include <array>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace baton::gpudirect {
namespace {

constexpr size_t kAtATime = 64;

size_t pieces_of(const Layout& layout) {
  return layout.dims().empty() ? 1 : layout.dims().front().count;
}

// The steps [first, first + count) of the outermost dimension.
Layout steps_of(const Layout& layout, uint32_t first, uint32_t count) {
  if (layout.dims().empty()) return layout;
  std::array<Dim, Layout::kMaxDims> dims;
  std::copy(layout.dims().begin(), layout.dims().end(), dims.begin());
  size_t offset = layout.offset();
  dims[0].count = count;
  if (dims[0].index != nullptr) {
    dims[0].index += first;
  } else {
    offset += first * dims[0].stride;
  }
  return Layout::box(offset, absl::MakeConstSpan(dims).first(layout.dims().size()),
                     layout.piece_bytes());
}

}  // namespace

TriggeredTransfers::~TriggeredTransfers() {
  for (size_t i = 0; i < prepared_.size(); ++i) {
    queue_.withdraw(first_number_ + static_cast<uint32_t>(i));
  }
  for (Peer& peer : peers_) peer.waiting.clear();
  waiting_ = 0;
  for (const TransferId id : open_) worker_.cancel(id).IgnoreError();
  worker_.wait_until([this] { return idle(); }).IgnoreError();
}

// The same layout, over copies of its lists.
Layout TriggeredTransfers::own(const Layout& layout, std::vector<std::vector<uint32_t>>& lists) {
  std::vector<Dim> dims(layout.dims().begin(), layout.dims().end());
  for (Dim& dim : dims) {
    if (dim.index == nullptr) continue;
    lists.emplace_back(dim.index, dim.index + dim.count);
    dim.index = lists.back().data();
  }
  return Layout::box(layout.offset(), dims, layout.piece_bytes());
}

absl::StatusOr<uint32_t> TriggeredTransfers::prepare(const TransferRequest& request) {
  // Said now: a copy of such a layout would not know it any more (too many dimensions, say).
  absl::Status status = request.local_layout.check(SIZE_MAX, "local");
  if (status.ok()) status = request.remote_layout.check(SIZE_MAX, "remote");
  if (!status.ok()) return status;
  const size_t pieces = pieces_of(request.local_layout);
  if (pieces != pieces_of(request.remote_layout)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%u pieces here and %u there: give both layouts the same number of steps "
                        "in their outermost dimension",
                        pieces, pieces_of(request.remote_layout)));
  }
  if (pieces > UINT32_MAX) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%u pieces: a trigger numbers pieces by 32 bits, so prepare more transfers of fewer pieces",
        pieces));
  }
  if (request.local_layout.bytes() != request.remote_layout.bytes()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the two sides differ in size: %u bytes local, %u remote",
                        request.local_layout.bytes(), request.remote_layout.bytes()));
  }
  if (request.detached || request.on_end != nullptr || request.after.device >= 0 ||
      request.after_event.device >= 0 || request.release.device >= 0) {
    return absl::InvalidArgumentError(
        "a transfer that kernels start takes neither a callback nor an order with streams: the "
        "trigger orders it, and state() reports its result");
  }
  if (queue_.prepared() != first_number_ + prepared_.size()) {
    return absl::FailedPreconditionError(
        "another object has prepared transfers in this queue: give each TriggeredTransfers its own "
        "queue");
  }
  Prepared& row = [this]() -> Prepared& {
    const std::lock_guard lock(preparing_);
    return prepared_.emplace_back();
  }();
  row.request = request;
  row.peer = peer_of(request.peer);
  row.lists.reserve(size_t{2} * Layout::kMaxDims);
  row.request.local_layout = own(request.local_layout, row.lists);
  row.request.remote_layout = own(request.remote_layout, row.lists);
  row.notify = std::string(request.notify);
  row.request.notify = row.notify;
  return queue_.prepare(static_cast<uint32_t>(pieces));
}

size_t TriggeredTransfers::peer_of(PeerId id) {
  const auto found =
      std::find_if(peers_.begin(), peers_.end(), [id](const Peer& peer) { return peer.id == id; });
  if (found != peers_.end()) return static_cast<size_t>(found - peers_.begin());
  peers_.push_back({.id = id, .waiting = {}});
  return peers_.size() - 1;
}

const TriggeredTransfers::Prepared* TriggeredTransfers::find(uint32_t transfer) const {
  const std::lock_guard lock(preparing_);
  const uint32_t number = transfer - first_number_;
  return number < prepared_.size() ? &prepared_[number] : nullptr;
}

absl::StatusOr<uint32_t> TriggeredTransfers::renew(uint32_t transfer) {
  const Prepared* const row = find(transfer);
  if (row == nullptr) {
    return absl::NotFoundError(absl::StrCat("transfer ", transfer, " was not prepared here"));
  }
  const absl::StatusOr<uint32_t> epoch = queue_.renew(transfer);
  if (!epoch.ok()) return epoch;
  waiting_ -= std::erase_if(peers_[row->peer].waiting,
                            [this](const Trigger& trigger) { return !queue_.admits(trigger); });
  return epoch;
}

void TriggeredTransfers::on_end(void* prepared, TransferId /*id*/, const absl::Status& status) {
  Prepared& row = *static_cast<Prepared*>(prepared);
  if (status.ok()) {
    row.done.fetch_add(1, std::memory_order_release);
    return;
  }
  {
    const std::lock_guard lock(row.mutex);
    row.last_failure = status;
  }
  row.failed.fetch_add(1, std::memory_order_release);
}

bool TriggeredTransfers::start(const Trigger& trigger) {
  Prepared& row = row_of(trigger);
  TransferRequest request = row.request;
  request.local_layout = steps_of(row.request.local_layout, trigger.first, trigger.count);
  request.remote_layout = steps_of(row.request.remote_layout, trigger.first, trigger.count);
  request.detached = true;
  request.on_end = on_end;
  request.context = &row;
  // Before it may end.
  row.started.fetch_add(1, std::memory_order_relaxed);
  const absl::StatusOr<TransferId> id = worker_.submit(request);
  if (id.ok()) {
    open_.push_back(*id);
    return true;
  }
  if (absl::IsResourceExhausted(id.status())) {
    row.started.fetch_sub(1, std::memory_order_relaxed);
    return false;
  }
  on_end(&row, {}, id.status());
  return true;
}

void TriggeredTransfers::forget_ended() {
  std::erase_if(open_, [this](TransferId id) { return !worker_.state(id).ok(); });
  look_at_ = std::max<size_t>(64, 2 * open_.size());
}

bool TriggeredTransfers::start_waiting(Peer& peer) {
  bool any = false;
  // Asked again: the queue may have been told of a new epoch since.
  while (!peer.waiting.empty() &&
         (!queue_.admits(peer.waiting.front()) || start(peer.waiting.front()))) {
    peer.waiting.pop_front();
    --waiting_;
    any = true;
  }
  return any;
}

bool TriggeredTransfers::progress() {
  bool any = false;
  if (waiting_ > 0) {
    first_ = (first_ + 1) % peers_.size();
    for (size_t i = 0; i < peers_.size(); ++i) {
      any |= start_waiting(peers_[(first_ + i) % peers_.size()]);
    }
  }
  const size_t most = std::min(kAtATime, kMostWaiting - waiting_);
  any |= queue_.take(most, [this](const Trigger& trigger) {
    if (trigger.transfer - first_number_ >= prepared_.size()) {  // not taken here
      queue_.withdraw(trigger.transfer);
      queue_.admits(trigger);
      return;
    }
    Peer& peer = peers_[row_of(trigger).peer];
    if (peer.waiting.empty() && start(trigger)) return;
    peer.waiting.push_back(trigger);
    ++waiting_;
  }) > 0;
  if (open_.size() >= look_at_) forget_ended();
  return any;
}

TriggeredTransfers::State TriggeredTransfers::state(uint32_t transfer) const {
  State out;
  const Prepared* const found = find(transfer);
  if (found == nullptr) {
    out.last_failure = absl::NotFoundError("no such transfer was prepared");
    return out;
  }
  const Prepared& row = *found;
  // What has ended first: it was started before.
  out.failed = row.failed.load(std::memory_order_acquire);
  out.done = row.done.load(std::memory_order_acquire);
  out.started = row.started.load(std::memory_order_relaxed);
  const std::lock_guard lock(row.mutex);
  out.last_failure = row.last_failure;
  return out;
}

bool TriggeredTransfers::idle() const {
  return waiting_ == 0 && std::all_of(prepared_.begin(), prepared_.end(), [](const Prepared& row) {
           const uint64_t ended = row.failed.load(std::memory_order_acquire) +
                                  row.done.load(std::memory_order_acquire);
           return ended == row.started.load(std::memory_order_relaxed);
         });
}

}  // namespace baton::gpudirect
