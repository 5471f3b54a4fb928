// StreamGates, as the transport knows them.
#include "gpudirect/contract/transfer_gates.h"

#include <utility>

#include "absl/strings/str_format.h"

namespace baton::gpudirect {
namespace {

internal::TransferGates::Gate number_of(GateId id) {
  return uint64_t{id.generation} << 32 | uint64_t{id.slot};
}
GateId id_of(internal::TransferGates::Gate gate) {
  return {static_cast<uint32_t>(gate), static_cast<uint32_t>(gate >> 32)};
}
// Rewords an error for callers who submit transfers and do not know gates.
absl::Status for_transfers(const absl::Status& status) {
  if (!absl::IsResourceExhausted(status)) return status;
  return absl::ResourceExhaustedError(
      "all waits between this worker's transfers and the streams of the device are in use: submit "
      "again after some transfers have begun or ended, and release() those that a stream waited "
      "for");
}
absl::StatusOr<internal::TransferGates::Gate> number_of(absl::StatusOr<GateId> id) {
  if (!id.ok()) return for_transfers(id.status());
  return number_of(*id);
}

}  // namespace

absl::StatusOr<std::unique_ptr<CudaGates>> CudaGates::open(const Device& device, size_t gates) {
  absl::StatusOr<std::unique_ptr<StreamGates>> made = StreamGates::open(device, gates);
  if (!made.ok()) return made.status();
  return std::unique_ptr<CudaGates>(new CudaGates(device, *std::move(made)));
}

absl::StatusOr<internal::TransferGates::Gate> CudaGates::after_stream(void* stream, Time deadline) {
  return number_of(gates_->after(static_cast<Stream>(stream), deadline));
}

absl::StatusOr<internal::TransferGates::Gate> CudaGates::after_event(void* event, Time deadline) {
  if (event == nullptr) {
    return absl::InvalidArgumentError("TransferRequest::after_event names no event");
  }
  return number_of(gates_->after(static_cast<Event>(event), deadline));
}

absl::StatusOr<internal::TransferGates::Hold> CudaGates::hold(void* stream, Time deadline) {
  const absl::StatusOr<gpudirect::Hold> held = gates_->hold(static_cast<Stream>(stream), deadline);
  if (!held.ok()) return for_transfers(held.status());
  return Hold{number_of(held->id), {held->outcome, held->delivered}};
}

std::optional<absl::Status> CudaGates::passed(Gate gate, Time now) {
  const absl::StatusOr<GateState> state = gates_->poll(id_of(gate), now);
  if (!state.ok()) return state.status();
  switch (*state) {
    case GateState::kWaiting:
      return std::nullopt;
    case GateState::kOpen:
      return absl::OkStatus();
    case GateState::kDeadline:
      return std::nullopt;  // the transfer's own deadline says so
    case GateState::kAborted:
      break;
  }
  if (absl::Status alive = device_.alive(); !alive.ok()) return alive;
  if (absl::Status failure = gates_->failure(id_of(gate)); !failure.ok()) return failure;
  return absl::AbortedError(absl::StrFormat(
      "the stream of CUDA device %d that the transfer waits for has failed", device_.ordinal()));
}

void CudaGates::end(Gate gate, bool delivered) {
  // A stream that has already continued needs no further word.
  if (delivered) {
    gates_->release(id_of(gate)).IgnoreError();
  } else {
    gates_->abort(id_of(gate)).IgnoreError();
  }
}

void CudaGates::close(Gate gate) { gates_->close(id_of(gate)).IgnoreError(); }

}  // namespace baton::gpudirect
