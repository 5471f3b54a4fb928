// Starting calls between two ranks, and all_to_all_v, which is made of them.
#include "absl/strings/str_format.h"
#include "collectives/internal/arguments.h"
#include "collectives/internal/call_table.h"

namespace baton::collectives::internal {

using executor::Call;

// `call.began`, its deadline and its end callback are set already.
void CallTable::prepare_point_to_point(Call& call, bool sends, std::byte* data, size_t count,
                                       DataType type, uint32_t other, int32_t tag,
                                       const executor::CallDescriptor* whole) {
  const size_t element = size_of(type);
  const bool from_any = other == executor::PointToPoint::kAnyPeer;
  const uint64_t number = sends ? ++sent_[other] : ++received_[from_any ? ranks_ : other];
  call.geometry = {Collective::kSendReceive, element, count, needs_.options.slot_bytes / element,
                   1};
  call.type = type;
  (sends ? call.in : call.out) = data;
  call.peer = other;
  call.sends = sends;
  call.tag = tag;
  call.pieces = call.geometry.pieces();
  call.descriptor = {.sequence = number,
                     .count = count,
                     .part_elements = call.geometry.part_elements,
                     .root = sends ? rank_ : other,
                     .node_size = whole != nullptr ? static_cast<uint32_t>(whole->sequence) : 0,
                     .collective = static_cast<uint8_t>(Collective::kSendReceive),
                     .type = static_cast<uint8_t>(type),
                     .of_v = static_cast<uint8_t>(whole != nullptr ? 1 : 0)};
  call.fingerprint = call.descriptor.fingerprint();
  needs_.recorder.record({.at = call.began,
                          .kind = executor::FlightEvent::Kind::kCallBegin,
                          .collective = Collective::kSendReceive,
                          .peer = other,
                          .sequence = number,
                          .bytes = count * element});
}

absl::StatusOr<Work> CallTable::start_point_to_point(bool sends, void* data, size_t count,
                                                     DataType type, int other,
                                                     const CallOptions& options,
                                                     DeviceCalls::StagedPtr staged) {
  if (absl::Status status = room_for(0, 1); !status.ok()) return status;
  if (absl::Status status = note(options); !status.ok()) return status;
  Slot& slot = take_slot(false);
  slot.staged = std::move(staged);
  take_options(slot, options);
  slot.fetching = slot.gated && slot.staged != nullptr;
  prepare_point_to_point(
      slot.call, sends, static_cast<std::byte*>(data), count, type,
      other == kAnyRank ? executor::PointToPoint::kAnyPeer : static_cast<uint32_t>(other),
      options.tag);
  launch_or_wait(slot);
  return Work{slot.id};
}

absl::StatusOr<Work> CallTable::start_all_to_all_v(const std::byte* in, const Blocks& send,
                                                   std::byte* out, const Blocks& receive,
                                                   DataType type, const CallOptions& options,
                                                   DeviceCalls::StagedPtr staged) {
  if (absl::Status status = room_for(1); !status.ok()) return status;
  if (absl::Status status = note(options); !status.ok()) return status;
  Slot& slot = take_slot(true);
  slot.staged = std::move(staged);
  slot.in_parts = true;
  const size_t element = size_of(type);
  // These fields are equal at all ranks; counts differ by rank.
  slot.call.descriptor = {.sequence = ++sequence_,
                          .collective = static_cast<uint8_t>(Collective::kAllToAll),
                          .type = static_cast<uint8_t>(type),
                          .of_v = 1};
  publish(slot.call.descriptor);
  slot.call.geometry.collective = Collective::kAllToAll;
  take_options(slot, options);
  slot.fetching = slot.gated && slot.staged != nullptr;
  slot.own_in = in + send.offsets[rank_] * element;
  slot.own_out = out + receive.offsets[rank_] * element;
  slot.own_bytes = send.counts[rank_] * element;
  if (ranks_ > 1 && !spare_parts_.empty()) {
    slot.parts = std::move(spare_parts_.back());
    spare_parts_.pop_back();
  }
  slot.parts.resize(2 * (ranks_ - 1));
  slot.parts_left = slot.parts.size();
  size_t next = 0;
  // Each rank begins with another peer.
  for (uint32_t distance = 1; distance < ranks_; ++distance) {
    for (bool sends : {true, false}) {
      Part& part = slot.parts[next++];
      part.whole = &slot;
      part.call = Call{};
      part.call.began = slot.call.began;
      part.call.deadline = slot.call.deadline;
      part.call.on_done = &CallTable::on_part_done;
      part.call.context = &part;
      const uint32_t other = (rank_ + (sends ? distance : ranks_ - distance)) % ranks_;
      std::byte* data = sends ? const_cast<std::byte*>(in) + send.offsets[other] * element
                              : out + receive.offsets[other] * element;
      prepare_point_to_point(part.call, sends, data,
                             sends ? send.counts[other] : receive.counts[other], type, other, 0,
                             &slot.call.descriptor);
    }
  }
  launch_or_wait(slot);
  return Work{slot.id};
}

int CallTable::source_of(Work work) const {
  const Source& source = sources_[work.sequence % sources_.size()];
  return work.sequence != 0 && source.work == work.sequence ? static_cast<int>(source.rank) : -1;
}

void CallTable::on_part_done(Call&, void* context) {
  Slot* whole = static_cast<Part*>(context)->whole;
  if (--whole->parts_left == 0) whole->owner->done_.push_back(whole);
}

}  // namespace baton::collectives::internal
