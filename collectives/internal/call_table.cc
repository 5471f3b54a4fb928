// The slots of calls; starting collective calls and ending all calls.
#include "collectives/internal/call_table.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "absl/strings/str_format.h"
#include "transport/base/durations.h"
#include "transport/base/splitmix.h"

namespace baton::collectives::internal {

using executor::Call;

namespace {

uint64_t sum_of(const std::vector<size_t>& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), uint64_t{0});
}

// Others almost surely have another.
uint32_t number_of(const std::vector<size_t>& lengths) {
  uint64_t hash = 0;
  for (const size_t length : lengths) hash = base::splitmix_hash(hash ^ length);
  return static_cast<uint32_t>(hash);
}

}  // namespace

CallTable::CallTable(const Needs& needs)
    : needs_(needs),
      rank_(needs.rank),
      ranks_(needs.ranks),
      control_(&needs.control),
      sent_(ranks_),
      received_(ranks_ + 1) {
  grow();
}

void CallTable::begin_group(uint32_t rank, uint32_t ranks, executor::ControlBlock& control) {
  rank_ = rank;
  ranks_ = ranks;
  control_ = &control;
  sequence_ = 0;
  sent_.assign(ranks, 0);
  received_.assign(ranks + 1, 0);
  for (const auto& slot : slots_) slot->staged.reset();
}

absl::Status CallTable::too_many() const {
  return absl::ResourceExhaustedError(absl::StrFormat(
      "%u calls are open: wait() for the first of them, or test() it until it has ended; those of "
      "a group end in progress()",
      slots_.size() - free_));
}

// Numbers that differ modulo the size differ modulo twice the size.
void CallTable::grow() {
  std::vector<std::unique_ptr<Slot>> slots(slots_.empty() ? 16 : 2 * slots_.size());
  for (auto& slot : slots_) slots[slot->id % slots.size()] = std::move(slot);
  for (auto& slot : slots) {
    if (slot == nullptr) slot = std::make_unique<Slot>();
  }
  free_ += slots.size() - slots_.size();
  slots_ = std::move(slots);
  std::vector<Source> sources(std::max<size_t>(1024, 4 * slots_.size()));
  for (const Source& source : sources_) {
    if (source.work != 0) sources[source.work % sources.size()] = source;
  }
  sources_ = std::move(sources);
}

CallTable::Slot& CallTable::take_slot(bool collective) {
  if (free_ == 0) grow();
  while (slot_of(next_work_).id != 0) ++next_work_;
  Slot& slot = slot_of(next_work_);
  --free_;
  collectives_ += collective ? 1 : 0;
  std::construct_at(&slot.call);  // in place: as a value it would be made, and then copied
  slot.group = 0;
  slot.own_bytes = slot.members = 0;
  slot.on_end = nullptr;
  slot.entry = UINT32_MAX;
  slot.done = slot.callback_due = slot.detached = slot.outlives = slot.in_parts = slot.grouping =
      slot.on_device = slot.streams = slot.gated = slot.fetching = slot.own_input = slot.in_place =
          slot.failed = false;
  slot.collective = collective;
  slot.result = absl::OkStatus();
  slot.owner = this;
  slot.call.on_done = &CallTable::on_done;
  slot.call.context = &slot;
  slot.call.began = needs_.clock.now();
  slot.id = next_work_++;
  in_flight_.push_back(&slot);
  if (needs_.endpoint != nullptr) needs_.endpoint->wake(*needs_.group);
  ++calls_made_;
  return slot;
}

void CallTable::free_slot(Slot& slot) {
  if (slot.streams) streams_.forget(ticket_of(slot.id));
  slot.id = 0;
  slot.staged.reset();
  ++free_;
  collectives_ -= slot.collective ? 1 : 0;
  if (slot.parts.empty()) return;
  spare_parts_.push_back(std::move(slot.parts));
  slot.parts.clear();
}

void CallTable::take_options(Slot& slot, const CallOptions& options) const {
  const Time timeout = options.timeout == Time::zero() ? needs_.options.timeout : options.timeout;
  slot.call.deadline = base::deadline_after(slot.call.began, timeout);
  slot.on_end = options.on_end;
  slot.context = options.context;
  slot.detached = options.detached;
  slot.streams = options.after.device >= 0 || options.release.device >= 0;
  slot.gated = options.after.device >= 0;
  if (options.group.sequence == 0) return;
  slot.group = options.group.sequence;
  slot.detached = true;
  ++slot_of(slot.group).members;
}

absl::StatusOr<Work> CallTable::start_plain(const CallOptions* options) {
  // A work of the communicator's own, of reconfigure() above all, finds room behind as many works
  // as a caller may have and has not waited for yet.
  if (absl::Status status = room_for(0, options != nullptr ? 1 : 0); !status.ok()) return status;
  if (options != nullptr && options->after.device >= 0) {
    return absl::InvalidArgumentError(
        "accesses to windows wait for no stream: synchronise it, and leave out `after`");
  }
  if (options != nullptr) {
    if (absl::Status status = note(*options); !status.ok()) return status;
  }
  Slot& slot = take_slot(false);
  if (options != nullptr) take_options(slot, *options);
  slot.call.deadline = kNever;
  slot.call.geometry.collective = Collective::kBarrier;
  return Work{slot.id};
}

void CallTable::end_plain(Work work, const absl::Status& result) {
  Slot& slot = slot_of(work.sequence);
  if (work.sequence != 0 && slot.id == work.sequence && !slot.done) end(slot, result);
}

void CallTable::set_outlives(Work work, bool outlives) {
  Slot& slot = slot_of(work.sequence);
  if (work.sequence != 0 && slot.id == work.sequence) slot.outlives = outlives;
}

absl::StatusOr<Work> CallTable::start(const Request& request, const Tuner::Pick& pick,
                                      DeviceCalls::StagedPtr staged, bool on_device,
                                      bool in_place) {
  if (absl::Status status = room_for(1); !status.ok()) return status;
  Slot& slot = take_slot(true);
  slot.entry = pick.entry;
  slot.candidate = pick.candidate;
  slot.staged = std::move(staged);
  Call& call = slot.call;
  const prediction::Choice& choice = *pick.choice;
  const size_t element = size_of(request.type);
  // Whole cache lines, but never more than a link's slot holds.
  size_t part = std::max<size_t>(choice.part_bytes, 1);
  if (part >= 64) part = (part + 63) & ~size_t{63};
  part = std::min(part, pick.programs->max_part_bytes);
  // Elements are powers of two: a division takes as long as ten other instructions.
  const size_t elements = (part < 64 ? part + element - 1 : part) >> std::countr_zero(element);
  call.geometry = {request.collective, element, request.count, std::max<size_t>(1, elements),
                   pick.programs->parts};
  if (request.uneven) {
    const Blocks& blocks = request.blocks;
    slot.lengths.assign(blocks.counts.begin(), blocks.counts.end());
    slot.starts.assign(blocks.offsets.begin(), blocks.offsets.end());
    call.geometry.count = *std::max_element(slot.lengths.begin(), slot.lengths.end());
    call.geometry.lengths = slot.lengths.data();
    call.geometry.starts = slot.starts.data();
  }
  call.type = request.type;
  call.op = request.op;
  // The executor writes to `out` only, or to `in` where that is the same memory.
  call.in = static_cast<std::byte*>(const_cast<void*>(request.in));
  call.out = static_cast<std::byte*>(request.out);
  call.programs = &pick.programs->programs;
  call.pieces = call.geometry.pieces();
  if (slot.staged != nullptr) needs_.devices->choose_sums(*slot.staged, call);
  take_options(slot, *request.options);
  call.descriptor = {
      .sequence = ++sequence_,
      .count = request.uneven ? sum_of(slot.lengths) : request.count,
      .part_elements = call.geometry.part_elements,
      .root = request.uneven ? number_of(slot.lengths) : static_cast<uint32_t>(request.root),
      .node_size = choice.spec.node_size,
      .channels = static_cast<uint16_t>(choice.spec.channels),
      .collective = static_cast<uint8_t>(request.collective),
      .type = static_cast<uint8_t>(request.type),
      .op = static_cast<uint8_t>(request.op),
      .algorithm = static_cast<uint8_t>(choice.spec.algorithm),
      .ordered = static_cast<uint8_t>(choice.spec.ordered ? 1 : 0),
      .of_v = static_cast<uint8_t>(request.uneven ? 1 : 0)};
  call.fingerprint = call.descriptor.fingerprint();
  publish(call.descriptor);
  if (needs_.devices != nullptr && needs_.devices->may_exchange(request)) {
    needs_.devices->say_whether(sequence_, on_device);
  }
  needs_.recorder.record({.at = call.began,
                          .kind = executor::FlightEvent::Kind::kCallBegin,
                          .collective = request.collective,
                          .sequence = sequence_,
                          .bytes = call.descriptor.count * element});
  slot.on_device = on_device;
  slot.fetching = slot.gated && slot.staged != nullptr;
  slot.own_input = slot.gated && DeviceCalls::wants_own_input(request, ranks_);
  if (on_device || slot.own_input) {
    slot.request = request;
    slot.options = *request.options;
    slot.request.options = &slot.options;
    slot.in_place = in_place;
    if (request.uneven) slot.request.blocks = {slot.lengths, slot.starts};
    if (slot.own_input && request.options->factor != nullptr) {
      std::memcpy(slot.factor.data(), request.options->factor, element);
      slot.options.factor = slot.factor.data();
    }
  }
  launch_or_wait(slot);
  return Work{slot.id};
}

// For the others to compare with what they call.
void CallTable::publish(const executor::CallDescriptor& call) {
  executor::ControlBlock& control = *control_;
  control.calls[call.sequence % executor::ControlBlock::kCalls] = call;
  control.entered.store(call.sequence, std::memory_order_release);
}

std::optional<absl::Status> CallTable::reap(Work work) {
  Slot& slot = slot_of(work.sequence);
  if (work.sequence == 0 || slot.id != work.sequence) {
    return absl::NotFoundError("there is no such call: its result was already reported");
  }
  if (slot.grouping && !slot.done) {
    return absl::FailedPreconditionError("calls may be added to this group yet: group_end() it");
  }
  if (!slot.done || slot.callback_due) return std::nullopt;
  absl::Status result = std::move(slot.result);
  free_slot(slot);
  return result;
}

void CallTable::on_done(Call&, void* context) {
  auto* slot = static_cast<Slot*>(context);
  slot->owner->done_.push_back(slot);
}

void CallTable::finish() {
  for (size_t i = 0; i < done_.size(); ++i) {
    Slot& slot = *done_[i];
    if (slot.staged == nullptr) {
      end(slot, absl::OkStatus());
      continue;
    }
    needs_.devices->begin_copy_out(*slot.staged);
    leaving_.push_back(&slot);
  }
  done_.clear();
}

absl::Status CallTable::copy_out() {
  absl::Status first;
  for (size_t i = 0; i < leaving_.size();) {
    Slot& slot = *leaving_[i];
    const std::optional<absl::Status> over = needs_.devices->copy_out(*slot.staged);
    if (!over) {
      ++i;
      continue;
    }
    leaving_.erase(leaving_.begin() + static_cast<ptrdiff_t>(i));
    first.Update(*over);
    if (over->ok()) end(slot, *over);  // any other ends with all that are in flight
  }
  return first;
}

void CallTable::fail_all(const absl::Status& why) {
  done_.clear();
  leaving_.clear();
  undecided_.clear();
  if (needs_.devices != nullptr) needs_.devices->stop();
  const std::vector<Slot*> open = in_flight_;
  for (auto slot = open.rbegin(); slot != open.rend(); ++slot) {
    if ((*slot)->outlives || (*slot)->done) continue;
    (*slot)->failed = true;
    // A group ends with its last, which may have a callback to come back from.
    if ((*slot)->members == 0) end(**slot, why);
  }
  ended_.notify_all();
}

bool CallTable::any_in_flight() const {
  return std::any_of(in_flight_.begin(), in_flight_.end(), [](const Slot* slot) {
    return !slot->grouping || slot->members > 0 || slot->streams;
  });
}

// The call has ended. Its slot is free once the caller has heard of it.
void CallTable::end(Slot& slot, const absl::Status& result) {
  const Call& call = slot.call;
  in_flight_.erase(std::find(in_flight_.begin(), in_flight_.end(), &slot));
  // The clock costs as much as a small call: look at it now and then only.
  const bool small =
      call.pieces == 1 && call.descriptor.sequence % 16 != 0 && result.ok() &&
      !needs_.tuner.measuring(slot.entry) &&
      call.geometry.count * call.geometry.element_bytes <= executor::DirectMessage::kPayload;
  const Time end_time = small ? call.began : needs_.clock.now();
  needs_.recorder.record({.at = end_time,
                          .kind = executor::FlightEvent::Kind::kCallEnd,
                          .collective = call.geometry.collective,
                          .status = static_cast<uint8_t>(result.code()),
                          .sequence = call.descriptor.sequence});
  if (result.ok() && slot.on_device) {
    needs_.devices->exchanged(call, std::chrono::duration<double>(end_time - call.began).count());
  }
  if (result.ok() && !small) {
    needs_.tuner.measured(slot.entry, slot.candidate,
                          std::chrono::duration<double>(end_time - call.began).count());
  }
  if (result.ok() && call.geometry.collective == Collective::kSendReceive && !call.sends) {
    sources_[slot.id % sources_.size()] = {slot.id, call.peer};
  }
  slot.result = result;
  slot.done = true;
  if (slot.streams) streams_.ended(ticket_of(slot.id), result.ok());
  if (slot.group != 0) slot_of(slot.group).result.Update(result);
  if (slot.on_end != nullptr && needs_.endpoint != nullptr) {
    slot.callback_due = true;
    ++callbacks_due_;
    needs_.endpoint->note_end(
        {slot.on_end, slot.context, slot.id, result, &CallTable::on_returned, this});
  } else {
    leave_group(slot);
    if (slot.detached) free_slot(slot);
  }
  ended_.notify_all();
}

void CallTable::leave_group(const Slot& slot) {
  if (slot.group == 0) return;
  Slot& group = slot_of(slot.group);
  if (--group.members > 0 || (group.grouping && !group.failed)) return;
  end(group, absl::Status(group.result));
}

void CallTable::on_returned(void* table, uint64_t work) {
  auto& self = *static_cast<CallTable*>(table);
  Slot& slot = self.slot_of(work);
  slot.callback_due = false;
  --self.callbacks_due_;
  self.leave_group(slot);
  if (slot.detached) self.free_slot(slot);
  self.ended_.notify_all();
}

}  // namespace baton::collectives::internal
