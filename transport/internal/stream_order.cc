// The waits of transfers for streams, and of streams for transfers.
#include "transport/internal/stream_order.h"

#include <utility>

namespace baton::internal {

TransferGates* StreamOrder::gates_of(int device) {
  const std::lock_guard lock(mutex_);
  const auto found = devices_.find(device);
  return found == devices_.end() ? nullptr : found->second.get();
}

absl::Status StreamOrder::prepare(int device) {
  if (device < 0 || gates_of(device) != nullptr) return absl::OkStatus();
  const std::lock_guard making(making_);
  if (gates_of(device) != nullptr) return absl::OkStatus();
  const DeviceMemory* const memory = device_memory();
  if (memory == nullptr) {
    return absl::UnimplementedError(
        "this program does not drive CUDA devices (link baton_gpudirect), so no transfer can "
        "keep order with their streams: synchronise before submit(), and wait()");
  }
  absl::StatusOr<std::unique_ptr<TransferGates>> made = memory->gates(device, kGates);
  if (!made.ok()) return made.status();
  const std::lock_guard lock(mutex_);
  devices_.insert_or_assign(device, *std::move(made));
  return absl::OkStatus();
}

absl::Status StreamOrder::note(Entry& entry, const TransferRequest& request, Time deadline) {
  if (request.after.device >= 0) {
    TransferGates* const gates = devices_.at(request.after.device).get();
    const auto gate = gates->after_stream(request.after.handle, deadline);
    if (!gate.ok()) return gate.status();
    entry.before[0] = {gates, *gate};
  }
  if (request.after_event.device >= 0) {
    TransferGates* const gates = devices_.at(request.after_event.device).get();
    const auto gate = gates->after_event(request.after_event.handle, deadline);
    if (!gate.ok()) return gate.status();
    entry.before[1] = {gates, *gate};
  }
  // Last: on the stream of `after`, that must not wait for itself.
  if (request.release.device >= 0) return hold(entry, request.release, deadline);
  return absl::OkStatus();
}

absl::Status StreamOrder::hold(Entry& entry, const DeviceStream& stream, Time deadline) {
  TransferGates* const gates = devices_.at(stream.device).get();
  const auto hold = gates->hold(stream.handle, deadline);
  if (!hold.ok()) return hold.status();
  if (entry.held.empty()) entry.outcome = hold->outcome;
  entry.held.push_back({gates, hold->gate});
  return absl::OkStatus();
}

absl::Status StreamOrder::hold(TransferId id, const DeviceStream& stream, Time deadline) {
  if (stream.device < 0) return absl::InvalidArgumentError("the stream names no device");
  if (absl::Status status = prepare(stream.device); !status.ok()) return status;
  const std::lock_guard lock(mutex_);
  if (entries_.empty()) entries_.resize(slots_);
  entries_[id.slot].generation = id.generation;
  return hold(entries_[id.slot], stream, deadline);
}

void StreamOrder::close(Wait& wait) {
  if (wait.of != nullptr) wait.of->close(wait.gate);
  wait = {};
}

void StreamOrder::close(Entry& entry) {
  for (Wait& wait : entry.before) close(wait);
  for (Wait& wait : entry.held) close(wait);
  entry.held.clear();
  entry.generation = 0;
}

StreamOrder::Entry* StreamOrder::find(TransferId id) {
  if (id.slot >= entries_.size() || entries_[id.slot].generation != id.generation) return nullptr;
  return &entries_[id.slot];
}

absl::Status StreamOrder::begin(TransferId id, const TransferRequest& request, Time deadline) {
  for (const int device :
       {request.after.device, request.after_event.device, request.release.device}) {
    if (absl::Status status = prepare(device); !status.ok()) return status;
  }
  const std::lock_guard lock(mutex_);
  if (entries_.empty()) entries_.resize(slots_);
  Entry& entry = entries_[id.slot];
  absl::Status status = note(entry, request, deadline);
  if (!status.ok()) {
    close(entry);
  } else {
    entry.generation = id.generation;
  }
  return status;
}

std::optional<absl::Status> StreamOrder::may_begin(TransferId id, Time now) {
  const std::lock_guard lock(mutex_);
  Entry* const entry = find(id);
  if (entry == nullptr) return absl::OkStatus();
  for (Wait& wait : entry->before) {
    if (wait.of == nullptr) continue;
    std::optional<absl::Status> passed = wait.of->passed(wait.gate, now);
    if (!passed.has_value() || !passed->ok()) return passed;
    close(wait);
  }
  return absl::OkStatus();
}

void StreamOrder::ended(TransferId id, bool delivered) {
  const std::lock_guard lock(mutex_);
  Entry* const entry = find(id);
  if (entry == nullptr) return;
  for (Wait& wait : entry->before) close(wait);
  for (const Wait& wait : entry->held) wait.of->end(wait.gate, delivered);
}

void StreamOrder::forget(TransferId id) {
  const std::lock_guard lock(mutex_);
  if (Entry* const entry = find(id); entry != nullptr) close(*entry);
}

absl::StatusOr<StreamOutcome> StreamOrder::outcome(TransferId id) {
  const std::lock_guard lock(mutex_);
  const Entry* const entry = find(id);
  if (entry == nullptr || entry->held.empty()) {
    return absl::FailedPreconditionError(
        "no stream waits for this transfer: name one in TransferRequest::release");
  }
  return entry->outcome;
}

}  // namespace baton::internal
