// Holds calls back until the executor may run them: a call waits for streams, for its input to
// leave a device, for other ranks' answers, and for earlier calls. Also ends groups of calls.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_format.h"
#include "collectives/internal/call_table.h"
#include "transport/base/durations.h"

namespace baton::collectives::internal {

using executor::Call;

absl::StatusOr<Work> CallTable::group_begin() {
  absl::StatusOr<Work> group = start_plain();
  if (group.ok()) slot_of(group->sequence).grouping = true;
  return group;
}

absl::Status CallTable::group_end(Work group) {
  Slot& slot = slot_of(group.sequence);
  if (group.sequence == 0 || slot.id != group.sequence || !slot.grouping) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "work %u is no open group: pass what group_begin() gave, once", group.sequence));
  }
  slot.grouping = false;
  if (slot.members == 0 && !slot.done) end(slot, absl::Status(slot.result));
  return absl::OkStatus();
}

absl::Status CallTable::hold(Work work, DeviceStream stream) {
  Slot& slot = slot_of(work.sequence);
  if (work.sequence == 0 || slot.id != work.sequence) {
    return absl::NotFoundError("there is no such call: its result was already reported");
  }
  if (slot.done) return slot.result;
  // A group has no deadline of its own.
  const Time deadline = slot.call.deadline != kNever || slot.collective
                            ? slot.call.deadline
                            : base::deadline_after(needs_.clock.now(), needs_.options.timeout);
  slot.streams = true;
  return streams_.hold(ticket_of(slot.id), stream, deadline);
}

absl::Status CallTable::note_order(const CallOptions& options) {
  if (options.group.sequence != 0) {
    const Slot& group = slot_of(options.group.sequence);
    if (group.id != options.group.sequence || !group.grouping || group.done) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "work %u is no open group: pass what group_begin() gave, and that before group_end()",
          options.group.sequence));
    }
  }
  if (options.after.device < 0 && options.release.device < 0) return absl::OkStatus();
  if (free_ == 0) grow();
  while (slot_of(next_work_).id != 0) ++next_work_;  // the one that the call will have
  const Time timeout = options.timeout == Time::zero() ? needs_.options.timeout : options.timeout;
  TransferRequest streams;
  streams.after = options.after;
  streams.release = options.release;
  return streams_.begin(ticket_of(next_work_), streams,
                        base::deadline_after(needs_.clock.now(), timeout));
}

bool CallTable::in_order(const Slot& first, const Slot& second) {
  if (first.collective || second.collective) return first.collective && second.collective;
  constexpr uint32_t kAny = executor::PointToPoint::kAnyPeer;
  const Call &a = first.call, &b = second.call;
  return a.sends == b.sends && (a.peer == b.peer || a.peer == kAny || b.peer == kAny);
}

bool CallTable::waits_for_others(const Slot& slot) const {
  for (const Slot* earlier : undecided_) {
    if (earlier == &slot) return false;
    if (in_order(*earlier, slot)) return true;
  }
  return false;
}

void CallTable::launch(Slot& slot) {
  if (!slot.in_parts) return needs_.executor.start(slot.call);
  if (slot.own_bytes > 0) std::memmove(slot.own_out, slot.own_in, slot.own_bytes);
  if (slot.parts.empty()) done_.push_back(&slot);
  for (Part& part : slot.parts) needs_.executor.start(part.call);
}

bool CallTable::any_under_way_on_devices() const {
  if (!any_on_devices()) return false;
  const auto* const exchange = needs_.devices == nullptr ? nullptr : needs_.devices->exchange();
  return (exchange != nullptr && exchange->on_device()) ||
         std::any_of(undecided_.begin(), undecided_.end(),
                     [](const Slot* slot) { return slot->gated || slot->fetching; });
}

absl::StatusOr<bool> CallTable::advance_devices() {
  bool any = false;
  for (size_t i = 0; i < undecided_.size();) {
    Slot& slot = *undecided_[i];
    absl::StatusOr<bool> decided = waits_for_others(slot) ? false : decide(slot);
    if (!decided.ok()) return decided;
    if (!*decided) {
      ++i;
      continue;
    }
    undecided_.erase(undecided_.begin() + static_cast<ptrdiff_t>(i));
    if (!slot.on_device) launch(slot);
    any = true;
  }
  if (needs_.devices == nullptr || needs_.devices->exchange() == nullptr) return any;
  const absl::StatusOr<bool> moved = needs_.devices->exchange()->advance();
  if (!moved.ok()) return moved;
  return any || *moved;
}

absl::StatusOr<bool> CallTable::decide(Slot& slot) {
  Call& call = slot.call;
  if (slot.gated) {
    const Time now = needs_.clock.now();
    const std::optional<absl::Status> passed = streams_.may_begin(ticket_of(slot.id), now);
    if (!passed.has_value()) return false;
    if (!passed->ok()) return *passed;
    slot.gated = false;
    call.began = now;  // what the stream took says nothing of a schedule
  }
  if (slot.on_device) {
    const std::optional<bool> exchange = needs_.devices->all_can(call.descriptor.sequence);
    if (!exchange.has_value()) return false;
    if (*exchange) {
      slot.entry = UINT32_MAX;  // nor does what it takes
      needs_.devices->exchange()->start(call);
      return true;
    }
    slot.on_device = false;
    auto staged = needs_.devices->stage(slot.request, slot.in_place);
    if (!staged.ok()) return staged.status();
    slot.staged = *std::move(staged);
    needs_.devices->begin_copy_in(*slot.staged);
    slot.fetching = true;
    call.in = static_cast<std::byte*>(const_cast<void*>(slot.request.in));
    call.out = static_cast<std::byte*>(slot.request.out);
    needs_.devices->choose_sums(*slot.staged, call);
  }
  if (slot.fetching) {
    const std::optional<absl::Status> fetched = needs_.devices->copied_in(*slot.staged);
    if (!fetched.has_value()) return false;
    if (!fetched->ok()) return *fetched;
    slot.fetching = false;
    if (slot.own_input) {
      absl::Status status = needs_.devices->own_input(slot.request, slot.staged, slot.in_place);
      if (!status.ok()) return status;
    }
  }
  return true;
}

executor::Blocked CallTable::blocked_on_devices() const {
  if (!any_on_devices()) return {};
  executor::Blocked blocked;
  if (needs_.devices != nullptr && needs_.devices->exchange() != nullptr) {
    blocked = needs_.devices->exchange()->blocked();
  }
  if (blocked.call != nullptr || undecided_.empty()) return blocked;
  const Slot& first = *undecided_.front();
  const Call& call = first.call;
  if (first.gated || first.fetching) return {.call = &call, .peer = rank_, .on_stream = true};
  uint32_t waits_for = rank_;
  needs_.devices->all_can(call.descriptor.sequence, &waits_for);
  return {.call = &call, .peer = waits_for};
}

}  // namespace baton::collectives::internal
