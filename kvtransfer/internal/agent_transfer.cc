// An agent's transfer: parts, then its message, then its end.
#include "kvtransfer/internal/agent_transfer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "kvtransfer/internal/agent_messages.h"
#include "kvtransfer/internal/agent_outbox.h"

namespace baton::kvtransfer {
namespace {

absl::Status not_posted(const char* text) {
  absl::Status status = absl::FailedPreconditionError(text);
  status.SetPayload(kNotPosted, absl::Cord());
  return status;
}

}  // namespace

AgentTransferState AgentTransfer::state() const {
  const std::lock_guard lock(state_mutex_);
  return state_;
}

AgentOutcome AgentTransfer::outcome() const {
  const std::lock_guard lock(state_mutex_);
  switch (state_) {
    case AgentTransferState::kIdle:
      return {state_, not_posted("the transfer was not posted yet: post it first")};
    case AgentTransferState::kRunning:
      return {state_, absl::UnavailableError("the transfer is running: it has not ended yet")};
    default:
      return {state_, why_};
  }
}

absl::StatusOr<AgentTelemetry> AgentTransfer::telemetry() const {
  const std::lock_guard lock(state_mutex_);
  if (state_ == AgentTransferState::kIdle) {
    return not_posted("the transfer was not posted: there is no result");
  }
  AgentTelemetry out = telemetry_;
  if (state_ == AgentTransferState::kRunning) out.transfer_duration = clock_.now() - out.start;
  return out;
}

void AgentTransfer::close() {
  const std::lock_guard lock(state_mutex_);
  closed_ = true;
}

absl::Status AgentTransfer::may_post() const {
  if (closed_) {
    return absl::FailedPreconditionError("the transfer is being released: make another one");
  }
  if (state_ != AgentTransferState::kRunning) return absl::OkStatus();
  return absl::AlreadyExistsError(
      absl::StrCat("the transfer with ", agent(), " is running: wait for its end, or abort it"));
}

void AgentTransfer::begin(Time now) {
  state_ = AgentTransferState::kRunning;
  why_ = absl::OkStatus();
  telemetry_.start = now;
}

void AgentTransfer::end() {
  telemetry_.transfer_duration = clock_.now() - telemetry_.start;
  state_ = why_.ok()                 ? AgentTransferState::kDone
           : absl::IsCancelled(why_) ? AgentTransferState::kCancelled
                                     : AgentTransferState::kFailed;
}

AgentWorkerTransfer::After::~After() {
  if (room.generation != 0) outbox.room_came(room);
}

AgentWorkerTransfer::AgentWorkerTransfer(Worker& worker, AgentOutbox& outbox, Op op, AgentPlan plan,
                                         std::string agent, uint64_t epoch,
                                         std::string_view message)
    : AgentTransfer(std::move(agent), epoch, mutex_, worker.clock(),
                    {.bytes = plan.bytes, .descriptors = plan.descriptors}),
      worker_(worker),
      outbox_(outbox),
      op_(op),
      plan_(std::move(plan)) {
  set_message(message);
  submitted_.reserve(plan_.parts.size() + frames_.size());
}

void AgentWorkerTransfer::set_message(std::string_view message) {
  frames_.clear();
  if (!message.empty()) frames_ = agent_frames(AgentFrameKind::kMessage, message);
  parts_bytes_ = frames_.size() > 1 ? message.size() : 0;
}

absl::Status AgentWorkerTransfer::post(PeerId peer, const std::string_view* message) {
  const Time now = worker_.clock().now();
  After after{.freed = nullptr, .outbox = outbox_, .room = {}};
  std::lock_guard lock(mutex_);
  if (absl::Status good = may_post(); !good.ok()) return good;
  if (message != nullptr) {
    set_message(*message);
  } else {
    number_anew(frames_);  // some of the last time may be there
  }
  peer_ = peer;
  begin(now);
  stop_ = unanswered_ = false;
  next_part_ = next_frame_ = 0;
  submitted_.clear();
  self_ = shared_from_this();
  submit_parts();
  const bool all_ended = open_ == 0;
  settle(after);
  telemetry_.post_duration = worker_.clock().now() - now;
  return all_ended ? why_ : absl::OkStatus();
}

void AgentWorkerTransfer::submit_parts() {
  TransferRequest request;
  request.peer = peer_;
  request.on_end = &AgentWorkerTransfer::on_end;
  request.context = this;
  request.detached = true;
  // A message within one frame travels with the bytes, where they are one write.
  const bool together = op_ == Op::kWrite && plan_.parts.size() == 1 && frames_.size() == 1;
  while (!stop_ && next_part_ < plan_.parts.size() && open_ < kWindow) {
    const AgentPart& part = plan_.parts[next_part_];
    request.op = op_;
    request.local = part.local;
    request.local_layout = part.local_layout;
    request.remote = part.remote;
    request.remote_layout = part.remote_layout;
    request.notify = together ? std::string_view(frames_[0]) : std::string_view();
    if (!submit(request).ok()) break;  // of no room: fed again when one has ended, or by state()
    ++next_part_;
    if (together) next_frame_ = 1;
  }
  // After all bytes are there.
  if (next_part_ == plan_.parts.size() && (open_ == 0 || next_frame_ > 0)) {
    request.op = Op::kWrite;
    request.local_layout = request.remote_layout = Layout();
    request.local = {};
    request.remote = {};
    while (!stop_ && next_frame_ < frames_.size() && open_ < kWindow) {
      if (parts_bytes_ > 0 && !has_room()) return;  // fed when there is
      request.notify = frames_[next_frame_];
      if (!submit(request).ok()) break;
      ++next_frame_;
    }
  }
  end_if_over();
}

// The other agent keeps so many bytes of messages that are not complete, and no more.
bool AgentWorkerTransfer::has_room() {
  if (room_ == Room::kTaken) return true;
  const bool got = outbox_.reserve(peer_, parts_bytes_, shared_from_this());
  room_ = got ? Room::kTaken : Room::kAwaited;
  return got;
}

// All that was submitted has ended, so no part is on its way any more.
void AgentWorkerTransfer::leave_room() {
  const Room room = std::exchange(room_, Room::kNone);
  if (room == Room::kNone) return;
  room_came_ = true;
  if (room == Room::kAwaited) {
    outbox_.leave_line(peer_, *this);
  } else if (why_.ok() || next_frame_ == 0) {
    outbox_.give_back(peer_, parts_bytes_);
  } else {
    outbox_.abandon(peer_, frames_[0], parts_bytes_);
  }
}

void AgentWorkerTransfer::settle(After& after) {
  if (open_ == 0) after.freed = std::move(self_);
  if (std::exchange(room_came_, false)) after.room = peer_;
}

absl::Status AgentWorkerTransfer::submit(const TransferRequest& request) {
  absl::StatusOr<TransferId> id = worker_.submit(request);
  if (id.ok()) {
    ++open_;
    submitted_.push_back(*id);
  } else if (!absl::IsResourceExhausted(id.status())) {
    stop_ = true;
    if (why_.ok()) why_ = id.status();
    for (const TransferId& other : submitted_) worker_.cancel(other).IgnoreError();
  }
  return id.status();
}

void AgentWorkerTransfer::end_if_over() {
  if (open_ > 0) return;
  if (!stop_ && (next_part_ < plan_.parts.size() || next_frame_ < frames_.size())) return;
  leave_room();
  end();
}

void AgentWorkerTransfer::on_end(void* context, TransferId /*id*/, const absl::Status& status) {
  auto& transfer = *static_cast<AgentWorkerTransfer*>(context);
  After after{.freed = nullptr, .outbox = transfer.outbox_, .room = {}};
  transfer.outbox_.flush_control_messages();  // a slot is free
  std::lock_guard lock(transfer.mutex_);
  --transfer.open_;
  if (!status.ok()) {
    if (transfer.why_.ok()) transfer.why_ = status;
    // While the peer is up, the worker waits for its word before it ends what may move there.
    transfer.unanswered_ |= transfer.worker_.peer_state(transfer.peer_) == PeerState::kDown;
    // The others have no use any more.
    if (!std::exchange(transfer.stop_, true)) {
      for (const TransferId& id : transfer.submitted_) transfer.worker_.cancel(id).IgnoreError();
    }
  }
  transfer.submit_parts();
  transfer.settle(after);
}

void AgentWorkerTransfer::feed() {
  After after{.freed = nullptr, .outbox = outbox_, .room = {}};
  std::lock_guard lock(mutex_);
  if (state_ != AgentTransferState::kRunning || open_ > 0) return;
  self_ = shared_from_this();
  submit_parts();
  settle(after);
}

bool AgentWorkerTransfer::local_free() const {
  std::lock_guard lock(mutex_);
  if (state_ != AgentTransferState::kRunning) return true;
  return stop_ && std::all_of(submitted_.begin(), submitted_.end(), [this](TransferId id) {
           const absl::StatusOr<bool> free = worker_.local_free(id);
           return !free.ok() || *free;  // one that has ended is gone
         });
}

void AgentWorkerTransfer::abort() {
  After after{.freed = nullptr, .outbox = outbox_, .room = {}};
  std::lock_guard lock(mutex_);
  if (state_ != AgentTransferState::kRunning) return;
  stop_ = true;
  // What had ended already stays so: a transfer whose last part is done is not cancelled.
  const bool all = next_part_ == plan_.parts.size() && next_frame_ == frames_.size();
  if (!all && why_.ok()) why_ = absl::CancelledError("aborted");
  for (const TransferId& id : submitted_) worker_.cancel(id).IgnoreError();
  end_if_over();
  settle(after);
}

bool AgentWorkerTransfer::awaits(const MemoryRegion& region) const {
  std::lock_guard lock(mutex_);
  if (state_ != AgentTransferState::kRunning || stop_) return false;
  return std::any_of(plan_.parts.begin() + static_cast<ptrdiff_t>(next_part_), plan_.parts.end(),
                     [&](const AgentPart& part) {
                       return part.local.index == region.index &&
                              part.local.generation == region.generation;
                     });
}

bool AgentWorkerTransfer::quiet() const {
  std::lock_guard lock(mutex_);
  return open_ == 0;
}

PeerId AgentWorkerTransfer::moves_at() const {
  std::lock_guard lock(mutex_);
  return op_ == Op::kWrite && unanswered_ ? peer_ : PeerId();
}

}  // namespace baton::kvtransfer
