// Starting calls between two ranks, and all_to_all_v, which is made of them.
#include <cstring>

#include "absl/strings/str_format.h"
#include "collectives/arguments.h"
#include "collectives/communicator_impl.h"

namespace baton {

using collectives::Call;
using collectives::check_pointer;
using collectives::refuse;

Work Communicator::Impl::start_point_to_point(WorkSlot& slot, bool sends, std::byte* data,
                                              size_t count, DataType type, uint32_t other,
                                              const CallOptions& call_options) {
  Call& call = slot.call;
  Member& member = members[other];
  const size_t element = size_of(type);
  const uint64_t number = sends ? ++member.sent : ++member.received;
  call.geometry = {Collective::kSendReceive, element, count, options.slot_bytes / element, 1};
  call.type = type;
  (sends ? call.in : call.out) = data;
  call.peer = other;
  call.sends = sends;
  call.pieces = call.geometry.pieces();
  const Time timeout =
      call_options.timeout == Time::zero() ? options.timeout : call_options.timeout;
  call.deadline = timeout == kNever ? kNever : call.began + timeout;
  call.descriptor = {.sequence = number,
                     .count = count,
                     .part_elements = call.geometry.part_elements,
                     .root = sends ? rank : other,
                     .collective = static_cast<uint8_t>(Collective::kSendReceive),
                     .type = static_cast<uint8_t>(type)};
  call.fingerprint = call.descriptor.fingerprint();
  recorder->record({.at = call.began,
                    .kind = collectives::FlightEvent::Kind::kCallBegin,
                    .collective = Collective::kSendReceive,
                    .peer = other,
                    .sequence = number,
                    .bytes = count * element});
  const Work work{slot.id.load(std::memory_order_relaxed)};
  executor->start(call);
  return work;
}

absl::StatusOr<Work> Communicator::Impl::begin_point_to_point(bool sends, void* data, size_t count,
                                                              DataType type, int other,
                                                              const CallOptions& call_options) {
  const Collective what = Collective::kSendReceive;
  if (static_cast<int>(type) >= kDataTypes) return refuse(what, "unknown element type");
  if (other < 0 || other >= options.ranks || other == options.rank) {
    return refuse(what, absl::StrFormat("rank %d is not another rank: there are %d, this is %d",
                                        other, options.ranks, options.rank));
  }
  if (absl::Status s = check_pointer(what, sends ? "in" : "out", data, count, size_of(type));
      !s.ok()) {
    return s;
  }
  std::lock_guard lock(mutex);
  if (!broken.ok()) return broken;
  absl::StatusOr<WorkSlot*> slot = take_slot();
  if (!slot.ok()) return slot.status();
  const Work work = start_point_to_point(**slot, sends, static_cast<std::byte*>(data), count, type,
                                         static_cast<uint32_t>(other), call_options);
  advance();
  if (background.joinable()) background_wakes.notify_one();
  return work;
}

absl::StatusOr<Work> Communicator::Impl::begin_all_to_all_v(
    const std::byte* in, absl::Span<const size_t> send_counts,
    absl::Span<const size_t> send_offsets, std::byte* out, absl::Span<const size_t> receive_counts,
    absl::Span<const size_t> receive_offsets, DataType type, const CallOptions& call_options) {
  const Collective what = Collective::kAllToAll;
  if (static_cast<int>(type) >= kDataTypes) return refuse(what, "unknown element type");
  for (const auto& list : {send_counts, send_offsets, receive_counts, receive_offsets}) {
    if (list.size() == ranks) continue;
    return refuse(what, absl::StrFormat("counts and offsets must have one entry for each of %u "
                                        "ranks, one has %u",
                                        ranks, list.size()));
  }
  const size_t element = size_of(type);
  if (send_counts[rank] != receive_counts[rank]) {
    return refuse(what, absl::StrFormat("rank %u sends %u elements to itself and receives %u", rank,
                                        send_counts[rank], receive_counts[rank]));
  }
  for (uint32_t r = 0; r < ranks; ++r) {
    if (absl::Status s = check_pointer(what, "in", in, send_counts[r], element); !s.ok()) return s;
    if (absl::Status s = check_pointer(what, "out", out, receive_counts[r], element); !s.ok()) {
      return s;
    }
  }
  std::lock_guard lock(mutex);
  if (!broken.ok()) return broken;
  if (2 * ranks > kSlots - in_flight.size()) {
    return absl::ResourceExhaustedError("too many calls are open for an all_to_all_v: wait()");
  }
  absl::StatusOr<WorkSlot*> whole = take_slot();
  if (!whole.ok()) return whole.status();
  (*whole)->call.descriptor.collective = static_cast<uint8_t>(what);
  (*whole)->call.geometry.collective = what;
  (*whole)->parts_left = 2 * (ranks - 1);
  if (send_counts[rank] > 0) {
    std::memmove(out + receive_offsets[rank] * element, in + send_offsets[rank] * element,
                 send_counts[rank] * element);
  }
  const Work work{(*whole)->id.load(std::memory_order_relaxed)};
  // Everybody begins with another peer.
  for (uint32_t distance = 1; distance < ranks; ++distance) {
    for (bool sends : {true, false}) {
      absl::StatusOr<WorkSlot*> part = take_slot();
      if (!part.ok()) return part.status();
      (*part)->parent = *whole;
      const uint32_t other = (rank + (sends ? distance : ranks - distance)) % ranks;
      std::byte* data = sends ? const_cast<std::byte*>(in) + send_offsets[other] * element
                              : out + receive_offsets[other] * element;
      start_point_to_point(**part, sends, data, sends ? send_counts[other] : receive_counts[other],
                           type, other, call_options);
    }
  }
  if (ranks == 1) finish(**whole, absl::OkStatus());
  advance();
  if (background.joinable()) background_wakes.notify_one();
  return work;
}

}  // namespace baton
