// A chunk is converted and moved, or moved and converted; two at a time, so that one travels while
// the other one is at the processor, or the kernel.
#include "kvtransfer/internal/agent_kv/agent_requantise_transfer.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kvtransfer/internal/agent_kv/device_rows.h"

namespace baton::kvtransfer {

AgentRequantiseTransfer::AgentRequantiseTransfer(AgentConverter& converter,
                                                 AgentConverter::Room& room, RequantiseJob job,
                                                 std::string agent, uint64_t epoch,
                                                 std::string_view message)
    : AgentTransfer(std::move(agent), epoch),
      converter_(converter),
      room_(room),
      job_(std::move(job)),
      message_(message) {
  for (const KvLocalBuffer& buffer : job_.local) {
    bases_.push_back(buffer.region.base + buffer.offset);
  }
  for (const RequantiseChunk& chunk : job_.chunks) bytes_ += job_.route->bytes(chunk);
  pieces_.reserve(AgentConverter::kSlotsOfTransfer);
}

absl::Status AgentRequantiseTransfer::post(PeerId peer, const std::string_view* message) {
  const Time now = converter_.worker_.clock().now();
  // The processor would find out by a fault that memory has gone.
  for (const KvLocalBuffer& buffer : job_.local) {
    absl::Status status = converter_.worker_.remote_region(buffer.region).status();
    if (!status.ok()) return status;
  }
  {
    const std::lock_guard lock(converter_.mutex_);
    if (closed_) return is_being_released();
    if (state_ == AgentTransferState::kRunning) {
      return absl::AlreadyExistsError(absl::StrCat("the transfer with ", agent(),
                                                   " is running: wait for its end, or abort it"));
    }
    if (converter_.stop_) return absl::FailedPreconditionError("the agent is being destroyed");
    if (message != nullptr) message_ = *message;
    peer_ = peer;
    moves_at_ = {};
    state_ = AgentTransferState::kRunning;
    why_ = absl::OkStatus();
    stop_ = false;
    said_ = message_.empty();
    looked_ = false;
    next_chunk_ = 0;
    descriptors_ = 0;
    started_ = now;
    converter_.running_.push_back(shared_from_this());
    end_if_over();
    post_duration_ = converter_.worker_.clock().now() - now;
  }
  converter_.poke();
  return absl::OkStatus();
}

bool AgentRequantiseTransfer::step(std::unique_lock<std::mutex>& lock) {
  bool did_something = look_at_moves();
  did_something |= look_at_kernel();
  if (!stop_) did_something |= begin_piece();
  if (!stop_) did_something |= convert_one(lock);
  if (!stop_) did_something |= say_message();
  if (stop_) {
    for (const Piece& piece : pieces_) {
      if (piece.waits()) give_back(piece);
    }
    // Others may wait for their slots.
    did_something |= std::erase_if(pieces_, [](const Piece& piece) { return piece.waits(); }) > 0;
  }
  end_if_over();
  return did_something;
}

bool AgentRequantiseTransfer::look_at_moves() {
  bool ended = false;
  for (Piece& piece : pieces_) {
    if (piece.moving == nullptr || !has_ended(piece.moving)) continue;
    ended = true;
    piece.moving = nullptr;
    // What was read is to be converted; what was sent has no use any more.
    if (job_.route->op() == Op::kWrite) piece.chunk.layers = {};
  }
  std::erase_if(pieces_, [this](const Piece& piece) {
    if (piece.moving != nullptr || !piece.chunk.layers.empty()) return false;
    give_back(piece);
    return true;
  });
  if (saying_ != nullptr && has_ended(saying_)) {
    ended = true;
    saying_ = nullptr;
    said_ = true;
  }
  return ended;
}

bool AgentRequantiseTransfer::has_ended(const Moving& moving) {
  const AgentOutcome outcome = moving->outcome();
  if (outcome.state == AgentTransferState::kRunning) return false;
  if (const PeerId at = moving->moves_at(); at.generation != 0) moves_at_ = at;
  if (!outcome.status.ok()) stop(outcome.status);
  return true;
}

bool AgentRequantiseTransfer::begin_piece() {
  if (next_chunk_ == job_.chunks.size() || pieces_.size() == AgentConverter::kSlotsOfTransfer) {
    return false;
  }
  const uint32_t slot = room_.slot_for(agent());
  if (slot == AgentConverter::kSlots) return false;
  room_.users[slot] = agent();
  Piece& piece = pieces_.emplace_back(Piece{job_.chunks[next_chunk_++], slot, {}});
  if (job_.route->op() == Op::kRead) move(piece);
  return true;
}

bool AgentRequantiseTransfer::convert_one(std::unique_lock<std::mutex>& lock) {
  const auto at = std::find_if(pieces_.begin(), pieces_.end(),
                               [](const Piece& piece) { return piece.waits(); });
  if (at == pieces_.end()) return false;
  const bool by_kernel = room_.kernel != nullptr;
  // No other thread changes pieces_, but abort() may come.
  ++converting_;
  lock.unlock();
  const absl::Status status =
      by_kernel ? begin_kernel(*at)
                : job_.route->convert(at->chunk, job_.local_pages[at->chunk.part], bases_,
                                      room_.slot(at->slot, converter_.slot_bytes_));
  lock.lock();
  if (by_kernel && status.ok()) {
    at->at_kernel = true;
    ++converter_.at_kernels_;
    return true;
  }
  --converting_;
  converter_.converted_.notify_all();
  if (!status.ok()) stop(status);
  if (!stop_) converted(at);
  return true;
}

void AgentRequantiseTransfer::converted(std::vector<Piece>::iterator at) {
  if (job_.route->op() == Op::kWrite) return move(*at);
  give_back(*at);
  pieces_.erase(at);
}

absl::Status AgentRequantiseTransfer::begin_kernel(const Piece& piece) {
  absl::Status status;
  if (!looked_) status = still_on_device(job_.local, room_.place);
  if (!status.ok()) return status;
  looked_ = true;
  std::vector<internal::RowBox> boxes;
  status =
      job_.route->for_each_box(piece.chunk, job_.local_pages[piece.chunk.part], bases_,
                               room_.slot(piece.slot, converter_.slot_bytes_),
                               [&](const KvRowBox& box) { boxes.push_back(device_rows(box)); });
  if (status.ok()) status = room_.kernel->begin(piece.slot, boxes);
  return status;
}

bool AgentRequantiseTransfer::look_at_kernel() {
  bool ended = false;
  for (auto at = pieces_.begin(); at != pieces_.end();) {
    std::optional<absl::Status> status;
    if (at->at_kernel) status = room_.kernel->ended(at->slot);
    if (!status.has_value()) {
      ++at;
      continue;
    }
    ended = true;
    at->at_kernel = false;
    --converter_.at_kernels_;
    --converting_;
    converter_.converted_.notify_all();
    if (!status->ok()) stop(*status);
    if (stop_ || job_.route->op() == Op::kWrite) {
      if (!stop_) move(*at);
      ++at;
    } else {
      give_back(*at);
      at = pieces_.erase(at);
    }
  }
  return ended;
}

void AgentRequantiseTransfer::move(Piece& piece) {
  const bool writes = job_.route->op() == Op::kWrite;
  const KvLocalBuffer slot{room_.region, piece.slot * converter_.slot_bytes_};
  AgentPlan plan;
  const absl::Status status = job_.route->for_each_move(
      piece.chunk, job_.remote_pages[piece.chunk.part], [&](const KvMove& move) {
        AgentPart& part = plan.parts.emplace_back();
        set_sides(part, job_.route->op(), move, slot,
                  job_.remote[writes ? move.target_buffer : move.source_buffer]);
        descriptors_ += move.source.bytes() / move.source.piece_bytes();
        return absl::OkStatus();
      });
  if (!status.ok()) return stop(status);
  piece.moving = move(std::move(plan), {});
}

AgentRequantiseTransfer::Moving AgentRequantiseTransfer::move(AgentPlan plan,
                                                              std::string_view message) {
  auto moving = std::make_shared<AgentWorkerTransfer>(converter_.worker_, converter_.outbox_,
                                                      job_.route->op(), std::move(plan), agent(),
                                                      epoch(), message);
  moving->tell_end([converter = &converter_] { converter->poke(); });
  moving->post(peer_, nullptr).IgnoreError();  // its outcome says it too
  converter_.wake_ = true;                     // for threads that move bytes inside wait()
  return moving;
}

bool AgentRequantiseTransfer::say_message() {
  if (said_ || saying_ != nullptr || next_chunk_ < job_.chunks.size() || !pieces_.empty()) {
    return false;
  }
  saying_ = move(AgentPlan(), message_);
  return true;
}

void AgentRequantiseTransfer::stop(absl::Status why) {
  if (why_.ok()) why_ = std::move(why);
  stop_ = true;
  for (const Piece& piece : pieces_) {
    if (piece.moving != nullptr) piece.moving->abort();
  }
  if (saying_ != nullptr) saying_->abort();
}

void AgentRequantiseTransfer::end_if_over() {
  if (!pieces_.empty() || saying_ != nullptr) return;
  if (!stop_ && (next_chunk_ < job_.chunks.size() || !said_)) return;
  ended_ = converter_.worker_.clock().now();
  if (why_.ok()) {
    state_ = AgentTransferState::kDone;
  } else {
    state_ = absl::IsCancelled(why_) ? AgentTransferState::kCancelled : AgentTransferState::kFailed;
  }
  std::erase_if(converter_.running_, [&](const auto& other) { return other.get() == this; });
  converter_.wake_ = true;
}

bool AgentRequantiseTransfer::uses(const MemoryRegion& memory) const {
  return std::any_of(job_.local.begin(), job_.local.end(), [&](const KvLocalBuffer& buffer) {
    return buffer.region.index == memory.index && buffer.region.generation == memory.generation;
  });
}

void AgentRequantiseTransfer::feed() {
  const std::lock_guard lock(converter_.mutex_);
  for (const Piece& piece : pieces_) {
    if (piece.moving != nullptr) piece.moving->feed();
  }
  if (saying_ != nullptr) saying_->feed();
}

void AgentRequantiseTransfer::abort() {
  {
    const std::lock_guard lock(converter_.mutex_);
    if (state_ != AgentTransferState::kRunning) return;
    stop(absl::CancelledError("aborted"));
  }
  converter_.poke();
}

void AgentRequantiseTransfer::close() {
  const std::lock_guard lock(converter_.mutex_);
  closed_ = true;
}

AgentTransferState AgentRequantiseTransfer::state() const {
  const std::lock_guard lock(converter_.mutex_);
  return state_;
}

AgentOutcome AgentRequantiseTransfer::outcome() const {
  const std::lock_guard lock(converter_.mutex_);
  return {state_, status_of(state_, why_)};
}

absl::StatusOr<AgentTelemetry> AgentRequantiseTransfer::telemetry() const {
  const std::lock_guard lock(converter_.mutex_);
  return telemetry_of(state_,
                      {.start = started_,
                       .post_duration = post_duration_,
                       .transfer_duration = ended_ - started_,
                       .bytes = bytes_,
                       .descriptors = descriptors_},
                      converter_.worker_.clock().now());
}

bool AgentRequantiseTransfer::local_free() const {
  const std::lock_guard lock(converter_.mutex_);
  return state_ != AgentTransferState::kRunning || (stop_ && converting_ == 0);
}

bool AgentRequantiseTransfer::quiet() const {
  const std::lock_guard lock(converter_.mutex_);
  return state_ != AgentTransferState::kRunning;
}

PeerId AgentRequantiseTransfer::moves_at() const {
  const std::lock_guard lock(converter_.mutex_);
  return moves_at_;
}

}  // namespace baton::kvtransfer
