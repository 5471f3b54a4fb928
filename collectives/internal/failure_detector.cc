// Finding failures: executor errors, aborts, ranks that are gone, calls that differ, deadlines.
#include "collectives/internal/failure_detector.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace baton::collectives::internal {

using executor::Blocked;
using executor::CallDescriptor;
using executor::ControlBlock;

namespace {

constexpr Time kLook = std::chrono::milliseconds(1);
// A call that waits for so long tells the rank that it waits for what it is.
constexpr Time kTellCallAfter = std::chrono::milliseconds(20);
// How long before a call's deadline ranks are asked where they stand: a rank that has a core
// answers at once, one that has to share it may need longer.
constexpr Time kMostPatience = std::chrono::seconds(1);
Time patience(Time timeout) { return std::min(timeout / 4, kMostPatience); }
// And for how long after it answers are awaited.
constexpr Time kLastPatience = std::chrono::milliseconds(150);
// How long calls that fail wait for others to let go of what was sent.
constexpr Time kMostEnding = std::chrono::milliseconds(30);

template <typename T>
std::string_view bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

template <typename T>
bool read(std::string_view body, T& value) {
  if (body.size() != sizeof value) return false;
  std::memcpy(&value, body.data(), sizeof value);
  return true;
}

}  // namespace

void FailureDetector::watch(executor::Executor& executor, CallTable& calls) {
  executor_ = &executor;
  calls_ = &calls;
  broken_ = absl::OkStatus();
  is_broken_.store(false, std::memory_order_release);
  lost_.assign(mesh_.ranks(), false);
  known_.assign(mesh_.ranks(), Known{});
  diagnosing_ = Time::zero();
  told_call_ = 0;
  ending_ = false;
}

void FailureDetector::on_control_message(uint32_t from, ControlMessage kind,
                                         std::string_view body) {
  Known& known = known_[from];
  if (kind == ControlMessage::kAbort) {
    on_abort(from, body);
  } else if (kind == ControlMessage::kCall) {
    CallDescriptor theirs;
    if (!read(body, theirs)) return;
    if (theirs.collective == static_cast<uint8_t>(Collective::kSendReceive)) {
      theirs = whole_of(theirs);
    }
    on_call(from, theirs);
  } else if (kind == ControlMessage::kQuery || kind == ControlMessage::kStanding) {
    if (!read(body, known.standing)) return;
    known.answered = known.fresh = true;
    if (kind == ControlMessage::kQuery)
      mesh_.tell(from, ControlMessage::kStanding, bytes_of(standing()));
    const CallDescriptor stands_in = known.standing.call;
    if (stands_in.collective != static_cast<uint8_t>(Collective::kSendReceive)) {
      on_call(from, stands_in);
    }
  }
}

// Handles another rank's own report of its call.
void FailureDetector::on_call(uint32_t from, const CallDescriptor& theirs) {
  if (theirs.sequence == 0) return;
  known_[from].announced.resize(ControlBlock::kCalls);
  known_[from].announced[theirs.sequence % ControlBlock::kCalls] = theirs;
  if (calls_ != nullptr && theirs.sequence <= calls_->sequence()) {
    compare_calls(theirs.sequence, theirs.sequence);
  }
}

// The all_to_all_v that a message belongs to.
CallDescriptor FailureDetector::whole_of(const CallDescriptor& part) const {
  const uint64_t near = calls_ != nullptr ? calls_->sequence() : 0;
  const auto ahead = static_cast<int32_t>(part.whole() - static_cast<uint32_t>(near));
  return {.sequence = near + static_cast<uint64_t>(int64_t{ahead}),
          .collective = static_cast<uint8_t>(Collective::kAllToAll),
          .type = part.type,
          .of_v = 1};
}

// The stalled collective; sequence 0 if a send or receive stalled instead.
CallDescriptor FailureDetector::collective_of(const executor::Call& call) const {
  if (call.programs != nullptr) return call.descriptor;
  return call.descriptor.of_v != 0 ? whole_of(call.descriptor) : CallDescriptor{};
}

void FailureDetector::on_abort(uint32_t from, std::string_view body) {
  uint32_t culprit = 0;
  if (body.size() < 1 + sizeof culprit || body[0] <= 0 || body[0] > 16) return;
  std::memcpy(&culprit, body.data() + 1, sizeof culprit);
  if (!broken_.ok()) return;
  // Messages that it sent before count: they may complete a call that is over for it.
  while (broken_.ok() && !executor_->idle() && settled()) {
  }
  if (!broken_.ok()) return;  // it was in another call
  if (calls_->any_done()) calls_->finish();
  if (culprit < mesh_.ranks() && culprit != mesh_.rank() && culprit != from) mark_lost(culprit);
  const absl::Status said(static_cast<absl::StatusCode>(body[0]),
                          std::string(body.substr(1 + sizeof culprit)));
  fail(absl::Status(said.code(),
                    absl::StrCat(mesh_.member(from).label, " reports: ", said.message())),
       culprit, said);
}

void FailureDetector::on_down(uint32_t rank, const absl::Status& why) {
  mark_lost(rank);
  recorder_.record(
      {.at = mesh_.now(), .kind = executor::FlightEvent::Kind::kPeerLost, .peer = rank});
  if (masks_lost_ && executor_ != nullptr && executor_->idle() && !calls_->any_on_devices()) return;
  const Blocked blocked = this->blocked();
  fail(absl::UnavailableError(absl::StrFormat(
           "%s is gone: %s%s", mesh_.member(rank).label, std::string(why.message()),
           blocked.call != nullptr ? absl::StrCat("; ", where(blocked)) : std::string())),
       rank);
}

const absl::Status& FailureDetector::begin_call_masking() {
  const auto lost = std::find(lost_.begin(), lost_.end(), true);
  if (broken_.ok() && lost != lost_.end()) {
    const auto rank = static_cast<uint32_t>(lost - lost_.begin());
    fail(absl::UnavailableError(absl::StrCat(mesh_.member(rank).label, " is gone")), rank);
  }
  return broken_;
}

Blocked FailureDetector::blocked() const {
  const Blocked blocked = executor_ != nullptr ? executor_->blocked() : Blocked{};
  return blocked.call == nullptr && calls_ != nullptr ? calls_->blocked_on_devices() : blocked;
}

// "all_reduce #17 of 8 f32 (sum), ring: rank 0 waits for rank 1 (host, pid 7) at chunk 3 of 64,
// step 2, over shm, direct"
std::string FailureDetector::where(const Blocked& blocked) const {
  const Mesh::Member& peer = mesh_.member(blocked.peer);
  if (blocked.combining) {
    return absl::StrFormat(
        "%s: rank %u waits for its CUDA device to sum at chunk %u of %u, step %u",
        blocked.call->descriptor.to_string(), mesh_.rank(), blocked.piece + 1, blocked.call->pieces,
        blocked.step);
  }
  if (blocked.on_stream) {
    return absl::StrFormat("%s: rank %u waits for the stream or the device that its input is on",
                           blocked.call->descriptor.to_string(), mesh_.rank());
  }
  return absl::StrFormat("%s: rank %u waits for %s%s at chunk %u of %u, step %u, over %s",
                         blocked.call->descriptor.to_string(), mesh_.rank(),
                         blocked.from_any               ? "any rank"
                         : blocked.peer == mesh_.rank() ? "itself"
                                                        : peer.label,
                         blocked.to_send ? " to take what was sent" : "", blocked.piece + 1,
                         blocked.call->pieces, blocked.step,
                         blocked.from_any       ? "any link"
                         : peer.link != nullptr ? peer.link->route()
                                                : "no link");
}

void FailureDetector::fail(const absl::Status& why, uint32_t culprit, const absl::Status& said) {
  if (!broken_.ok()) return;
  broken_ = why;
  is_broken_.store(true, std::memory_order_release);
  recorder_.record({.at = mesh_.now(),
                    .kind = executor::FlightEvent::Kind::kAbort,
                    .status = static_cast<uint8_t>(why.code()),
                    .peer = culprit});
  mesh_.tell_all(ControlMessage::kAbort, encode_verdict(said.ok() ? why : said, culprit));
  mesh_.end_transfers();
  ending_ = true;
  end_by_ = mesh_.now() + kMostEnding;
  end_calls();
}

// No byte of a call moves once its end is reported.
void FailureDetector::end_calls(bool at_once) {
  if (!ending_) return;
  if (!mesh_.quiet()) {
    if (mesh_.now() < end_by_ && !at_once) return;
    mesh_.force_quiet();
  }
  ending_ = false;
  absl::Status why = broken_;
  if (!calls_->in_flight().empty()) {
    const std::string where =
        executor::dump_flight_record(recorder_, executor::flight_path(group_, mesh_.rank()));
    why = absl::Status(why.code(), absl::StrCat(why.message(), where));
  }
  calls_->fail_all(why);
}

void FailureDetector::on_executor_error(const absl::Status& error) {
  if (const absl::Status& ours = executor_->device_error(); !ours.ok()) {
    return fail(ours, mesh_.rank());
  }
  const Blocked blocked = executor_->blocked();
  const bool calls_differ = absl::IsFailedPrecondition(error);
  if (calls_differ) compare_calls();
  if (!broken_.ok()) return;
  fail(absl::Status(calls_differ ? absl::StatusCode::kInvalidArgument : error.code(),
                    blocked.call == nullptr ? std::string(error.message())
                                            : absl::StrCat(where(blocked), ": ", error.message())),
       blocked.call == nullptr ? mesh_.rank() : blocked.peer);
}

// Every call still open, and the last one.
void FailureDetector::compare_calls() {
  if (calls_ == nullptr || calls_->sequence() == 0) return;
  const uint64_t sequence = calls_->sequence();
  const uint64_t oldest =
      sequence > ControlBlock::kCalls / 2 ? sequence - ControlBlock::kCalls / 2 : 1;
  compare_calls(calls_->in_flight().empty() ? sequence : oldest, sequence);
}

void FailureDetector::compare_last_call() {
  if (calls_ != nullptr) compare_calls(calls_->sequence(), calls_->sequence());
}

void FailureDetector::compare_calls(uint64_t first, uint64_t last) {
  if (!broken_.ok()) return;
  const uint32_t rank = mesh_.rank();
  for (const uint32_t r : mesh_.active()) {
    const Mesh::Member& member = mesh_.member(r);
    if (r == rank || (member.direct == nullptr && known_[r].announced.empty())) continue;
    for (uint64_t s = first; s <= last; ++s) {
      const CallDescriptor& ours = mesh_.control().calls[s % ControlBlock::kCalls];
      CallDescriptor theirs;
      if (member.direct == nullptr) {
        theirs = known_[r].announced[s % ControlBlock::kCalls];
      } else {
        const ControlBlock& block = member.block();
        if (block.entered.load(std::memory_order_acquire) < s) break;
        theirs = block.calls[s % ControlBlock::kCalls];
        // Its place may be another call's by now, or while we read.
        std::atomic_thread_fence(std::memory_order_acquire);
        if (block.entered.load(std::memory_order_relaxed) + 1 >= s + ControlBlock::kCalls) continue;
      }
      if (theirs.sequence != s || ours.sequence != s || theirs == ours) continue;
      // The options are named only if nothing else distinguishes the two calls.
      const bool alike = ours.to_string() == theirs.to_string();
      const auto said = [alike](const CallDescriptor& call) {
        if (!alike) return call.to_string();
        return absl::StrFormat("%s, %u channels, parts of %u elements, nodes of %u ranks",
                               call.to_string(), call.channels, call.part_elements, call.node_size);
      };
      fail(
          absl::InvalidArgumentError(absl::StrFormat(
              "ranks disagree about call #%u: rank %u called %s, %s called %s. All ranks must make "
              "the same calls in the same order",
              s, rank, said(ours), member.label, said(theirs))),
          r);
      return;
    }
  }
}

FailureDetector::Standing FailureDetector::standing() const {
  Standing out;
  out.entered = calls_ != nullptr ? calls_->sequence() : 0;
  const Blocked blocked = this->blocked();
  if (blocked.call == nullptr) return out;
  out.call = blocked.call->descriptor;
  out.waits_for = blocked.peer;
  return out;
}

void FailureDetector::look(Time now) {
  if (now < next_look_) return;
  next_look_ = now + kLook;
  check_deadlines(now);
}

// Lets calls go on with what has come; true if they did.
bool FailureDetector::settled() {
  const absl::StatusOr<bool> moved = executor_->advance();
  if (!moved.ok()) on_executor_error(moved.status());
  if (!moved.ok() || *moved || !calls_->any_on_devices()) return !moved.ok() || *moved;
  const absl::StatusOr<bool> on_devices = calls_->advance_devices();
  if (!on_devices.ok()) fail(on_devices.status(), mesh_.rank());
  return !on_devices.ok() || *on_devices;
}

void FailureDetector::check_deadlines(Time now) {
  if (!broken_.ok() || executor_ == nullptr || (executor_->idle() && !calls_->any_on_devices())) {
    diagnosing_ = Time::zero();
    return;
  }
  compare_calls();
  if (!broken_.ok()) return;
  const Blocked blocked = this->blocked();
  if (blocked.call == nullptr) return;
  const Mesh::Member& peer = mesh_.member(blocked.peer);
  const auto has_left = [](const Mesh::Member& member) {
    return member.bye && (member.ended || !member.up());
  };
  // It may have left with what we sent, and say so before the acknowledgement comes.
  const bool on_its_way =
      blocked.to_send && peer.transfer != nullptr && peer.transfer->unsettled() && peer.up();
  bool left = blocked.from_any || (has_left(peer) && !on_its_way);
  for (uint32_t r = 0; blocked.from_any && r < mesh_.ranks(); ++r) {
    left &= r == mesh_.rank() || has_left(mesh_.member(r));
  }
  const bool failed = peer.link != nullptr && !peer.link->status().ok();
  // Its last words may have come in the same round as its end, and be all that we wait for.
  if ((left || failed) && (settled() || executor_->combining())) return;
  if (left) {
    fail(absl::UnavailableError(absl::StrCat(
             where(blocked), blocked.from_any
                                 ? ", and all of them have left the group"
                                 : ", which has left the group without making this call")),
         blocked.peer);
    return;
  }
  if (failed) {
    fail(absl::Status(peer.link->status().code(),
                      absl::StrCat(where(blocked), ": ", peer.link->status().message())),
         blocked.peer);
    return;
  }
  // If all ranks wait for another root, no message shows what they called: send this rank's call.
  if (blocked.call->programs != nullptr && peer.transfer != nullptr &&
      now - blocked.call->began >= kTellCallAfter &&
      std::exchange(told_call_, blocked.call->descriptor.sequence) !=
          blocked.call->descriptor.sequence) {
    mesh_.tell(blocked.peer, ControlMessage::kStanding, bytes_of(standing()));
  }
  for (const CallTable::Slot* slot : calls_->in_flight()) {
    const executor::Call& call = slot->call;
    if (call.deadline - patience(call.deadline - call.began) <= now) {
      return diagnose(blocked, call, now);
    }
  }
  diagnosing_ = Time::zero();
}

// Asks all ranks where they stand, and follows who waits for whom to the rank that all wait for.
// They are asked before the deadline of the late call, so that whoever does not answer is known at
// it, and then once more: what counts is where they stand then.
void FailureDetector::diagnose(const Blocked& blocked, const executor::Call& late, Time now) {
  const bool first = diagnosing_ == Time::zero();
  const Time patient = std::max(kLastPatience, patience(late.deadline - late.began));
  if (first) answers_by_ = std::max(late.deadline + kLastPatience, now + patient);
  if (first || (diagnosing_ < late.deadline && now >= late.deadline)) {
    diagnosing_ = now;
    for (Known& known : known_) {
      known.fresh = known.asked = false;
      known.answered &= !first;
    }
  }
  bool all = true;
  for (uint32_t r = 0; r < mesh_.ranks(); ++r) {
    Known& known = known_[r];
    if (r == mesh_.rank() || known.fresh) continue;
    if (!known.asked && mesh_.member(r).up()) {
      known.asked = true;
      mesh_.tell(r, ControlMessage::kQuery, bytes_of(standing()));
    }
    // A rank without a link to us is asked once another rank says that it waits for it.
    all &= !known.asked && !mesh_.member(r).wanted;
  }

  const uint64_t wanted = collective_of(*blocked.call).sequence;
  const bool collective = wanted != 0;
  uint32_t culprit = blocked.peer;
  bool lost = false;
  std::string why;
  for (uint32_t hop = 0; hop < mesh_.ranks() && why.empty(); ++hop) {
    const Mesh::Member& member = mesh_.member(culprit);
    const Known& known = known_[culprit];
    if (culprit != mesh_.rank() && !known.answered && !member.wanted) {
      mesh_.want(culprit);
      answers_by_ = std::max(answers_by_, now + patient);  // it gets as long to answer
      return;
    }
    if (culprit == mesh_.rank()) {
      why = blocked.combining || blocked.on_stream ? "The device makes no progress"
            : blocked.from_any                     ? "No rank has sent a message with this tag"
                                                   : "all ranks wait for each other";
    } else if (!known.answered) {
      uint64_t entered = UINT64_MAX;
      if (member.direct != nullptr) {
        entered = member.block().entered.load(std::memory_order_acquire);
      }
      const bool behind = collective && entered < wanted;
      why = absl::StrFormat(
          "%s does not answer: it is stopped, busy outside this call, or cut off from the "
          "network%s",
          member.label,
          behind ? absl::StrFormat("; it has not made this call (its last is #%u)", entered)
                 : std::string());
      lost = true;
    } else if (const uint32_t next = known.standing.waits_for;
               next < mesh_.ranks() && next != culprit &&
               (next != mesh_.rank() || !collective || known.standing.entered >= wanted)) {
      culprit = next;  // in this call, or in one before it
    } else if (collective && known.standing.entered < wanted) {
      why = absl::StrFormat("%s is alive but has not made this call: its last is #%u", member.label,
                            known.standing.entered);
      // One that does not answer may hold it up in another group.
      for (uint32_t r = 0; r < mesh_.ranks() && !lost; ++r) {
        if (r == mesh_.rank() || !known_[r].asked || known_[r].answered) continue;
        absl::StrAppend(&why, "; ", mesh_.member(r).label, " does not answer");
        culprit = r;
        lost = true;
      }
    } else {
      why = absl::StrFormat("%s is alive and has made this call, but makes no progress",
                            member.label);
    }
  }
  if (now < late.deadline || (!all && now < answers_by_)) return;
  if (lost) mark_lost(culprit);
  if (why.empty()) why = "ranks wait for each other in a circle";
  fail(absl::DeadlineExceededError(
           absl::StrFormat("%s: the deadline has passed. %s", where(blocked), why)),
       culprit);
}

}  // namespace baton::collectives::internal
