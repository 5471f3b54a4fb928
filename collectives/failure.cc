// What goes wrong, how it is found out, and who is told.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "collectives/communicator_impl.h"
#include "collectives/flight_dump.h"

namespace baton {

using collectives::Blocked;
using collectives::CallDescriptor;
using collectives::ControlBlock;
using collectives::FlightEvent;
using collectives::Mail;
using collectives::Standing;

namespace {

// How long answers to a query are awaited once a call is past its deadline: a rank that has a core
// answers at once, one that has to share it may need longer.
constexpr Time kPatience = std::chrono::milliseconds(150);
constexpr Time kMostPatience = std::chrono::seconds(1);
Time patience(Time timeout) { return std::clamp(timeout / 4, kPatience, kMostPatience); }

// An abort on the wire: code, culprit, text.
std::string encode_verdict(const absl::Status& why, uint32_t culprit) {
  std::string out(1, static_cast<char>(why.code()));
  out.append(reinterpret_cast<const char*>(&culprit), sizeof culprit);
  out.append(std::string(why.message()).substr(0, 1024));
  return out;
}

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

void Communicator::Impl::tell(Member& member, Mail kind, std::string_view body) {
  if (!member.up) return;
  worker
      ->notify_detached(member.peer,
                        absl::StrCat(std::string(1, static_cast<char>(kind)), std::string(body)))
      .IgnoreError();
}

void Communicator::Impl::tell_all(Mail kind, std::string_view body) {
  for (Member& member : members) {
    if (member.known) tell(member, kind, body);
  }
  worker->progress();
}

// Mail before news of who went down: whoever leaves or gives up says so first.
void Communicator::Impl::drain() {
  while (worker->next_notification(notification)) {
    Member* member = member_of(notification.peer);
    if (member == nullptr) {
      on_events();
      member = member_of(notification.peer);
    }
    if (member != nullptr && !notification.payload.empty()) {
      on_mail(*member, notification.payload);
    }
  }
  on_events();
}

void Communicator::Impl::on_events() {
  while (std::optional<PeerEvent> event = worker->next_peer_event()) {
    Member* member = member_of(event->peer);
    if (event->kind == PeerEvent::Kind::kUp) {
      for (uint32_t r = 0; r < ranks && member == nullptr; ++r) {
        if (r != rank && !members[r].known && members[r].uid == event->uid) {
          member = &members[r];
          member->peer = event->peer;
          member->known = true;
        }
      }
      if (member != nullptr) member->up = true;
    } else if (member != nullptr) {
      on_down(*member, event->why);
    }
  }
}

void Communicator::Impl::on_mail(Member& member, std::string_view mail) {
  const std::string_view body = mail.substr(1);
  switch (static_cast<Mail>(mail[0])) {
    case Mail::kWake:
      return;
    case Mail::kCall: {
      CallDescriptor theirs;
      if (read(body, theirs)) check_announcement(member, theirs);
      return;
    }
    case Mail::kView:
      member.can_view = body == "1" ? 1 : 0;
      return;
    case Mail::kOffer:
      member.offer = std::string(body);
      return;
    case Mail::kBye:
      member.bye = true;
      return;
    case Mail::kAbort: {
      uint32_t culprit = 0;
      if (body.size() < 1 + sizeof culprit) return;
      std::memcpy(&culprit, body.data() + 1, sizeof culprit);
      if (culprit < ranks && culprit != rank && culprit != rank_of(member)) {
        members[culprit].lost = true;
      }
      fail(absl::Status(static_cast<absl::StatusCode>(body[0]),
                        absl::StrCat(member.label,
                                     " reports: ", std::string(body.substr(1 + sizeof culprit)))),
           culprit, false);
      return;
    }
    case Mail::kQuery:
    case Mail::kStanding:
      if (!read(body, member.standing)) return;
      member.standing_fresh = true;
      if (static_cast<Mail>(mail[0]) == Mail::kQuery) {
        tell(member, Mail::kStanding, bytes_of(standing()));
      }
      return;
    case Mail::kShrink:
      on_ballot(member, body);
      return;
  }
}

void Communicator::Impl::on_down(Member& member, const absl::Status& why) {
  if (!member.up && member.known && member.peer.generation != 0 && leaving) return;
  member.up = false;
  if (leaving || member.bye) return;  // whoever waits for it finds out in check_deadlines()
  member.lost = true;
  recorder->record({.at = now(), .kind = FlightEvent::Kind::kPeerLost, .peer = rank_of(member)});
  const Blocked blocked = executor != nullptr ? executor->blocked() : Blocked{};
  fail(absl::UnavailableError(absl::StrFormat(
           "%s is gone: %s%s", member.label, std::string(why.message()),
           blocked.call != nullptr ? absl::StrCat("; ", where(blocked)) : std::string())),
       rank_of(member), true);
}

// "all_reduce #17 of 8 f32 (sum), ring: rank 0 waits for rank 1 (host, pid 7) at chunk 3 of 64,
// step 2, over shm, direct"
std::string Communicator::Impl::where(const Blocked& blocked) const {
  const Member& peer = members[blocked.peer];
  return absl::StrFormat("%s: rank %u waits for %s%s at chunk %u of %u, step %u, over %s",
                         blocked.call->descriptor.to_string(), rank,
                         blocked.peer == rank ? std::string("itself") : peer.label,
                         blocked.to_send ? " to take what was sent" : "", blocked.piece + 1,
                         blocked.call->pieces, blocked.step,
                         peer.link != nullptr ? peer.link->route() : std::string("no link"));
}

void Communicator::Impl::fail(absl::Status why, uint32_t culprit, bool tell_others) {
  if (!broken.ok()) return;
  broken = why;
  is_broken.store(true, std::memory_order_release);
  recorder->record({.at = now(),
                    .kind = FlightEvent::Kind::kAbort,
                    .status = static_cast<uint8_t>(why.code()),
                    .peer = culprit});
  if (tell_others) tell_all(Mail::kAbort, encode_verdict(why, culprit));
  // No byte of a call moves once its end is reported.
  for (Member& member : members) {
    if (member.transfer != nullptr) member.transfer->cancel();
  }
  finished.clear();
  if (!in_flight.empty()) {
    const std::string where =
        collectives::dump_flight_record(*recorder, collectives::flight_path(options.name, rank));
    why = absl::Status(why.code(), absl::StrCat(why.message(), where));
  }
  while (!in_flight.empty()) finish(*in_flight.back(), why);
  call_ended.notify_all();
}

void Communicator::Impl::on_executor_error(const absl::Status& error) {
  const Blocked blocked = executor->blocked();
  if (absl::IsFailedPrecondition(error) && blocked.call != nullptr) compare_calls();
  if (!broken.ok()) return;
  fail(absl::Status(error.code(), blocked.call == nullptr
                                      ? std::string(error.message())
                                      : absl::StrCat(where(blocked), ": ", error.message())),
       blocked.call == nullptr ? rank : blocked.peer, true);
}

// What a peer called must be what we called, or will call, under this number.
void Communicator::Impl::check_announcement(const Member& member, const CallDescriptor& theirs) {
  if (theirs.collective == static_cast<uint8_t>(Collective::kSendReceive)) return;
  members[rank_of(member)].announced[theirs.sequence % ControlBlock::kCalls] = theirs;
  compare_calls();
}

void Communicator::Impl::compare_calls() {
  if (sequence == 0 || !broken.ok()) return;
  // Every call still open, and the last one.
  const uint64_t oldest =
      sequence > ControlBlock::kCalls / 2 ? sequence - ControlBlock::kCalls / 2 : 1;
  for (uint32_t r = 0; r < ranks; ++r) {
    const Member& member = members[r];
    if (r == rank || (member.direct == nullptr && member.transfer == nullptr)) continue;
    for (uint64_t s = in_flight.empty() ? sequence : oldest; s <= sequence; ++s) {
      const CallDescriptor& ours = control->calls[s % ControlBlock::kCalls];
      CallDescriptor theirs = member.announced[s % ControlBlock::kCalls];
      if (member.direct != nullptr) {
        const auto& block = *reinterpret_cast<const ControlBlock*>(member.view.data);
        if (block.entered.load(std::memory_order_acquire) < s) break;
        theirs = block.calls[s % ControlBlock::kCalls];
        // Its place may be another call's by now, or while we read.
        std::atomic_thread_fence(std::memory_order_acquire);
        if (block.entered.load(std::memory_order_relaxed) + 1 >= s + ControlBlock::kCalls) continue;
      }
      if (theirs.sequence != s || ours.sequence != s || theirs == ours) continue;
      fail(
          absl::InvalidArgumentError(absl::StrFormat(
              "ranks disagree about call #%u: rank %u called %s, %s called %s. All ranks must make "
              "the same calls in the same order",
              s, rank, ours.to_string(), member.label, theirs.to_string())),
          r, true);
      return;
    }
  }
}

Standing Communicator::Impl::standing() const {
  Standing out;
  out.entered = sequence;
  if (executor == nullptr) return out;
  const Blocked blocked = executor->blocked();
  if (blocked.call == nullptr) return out;
  out.call = blocked.call->descriptor;
  out.waits_for = blocked.peer;
  return out;
}

void Communicator::Impl::check_deadlines() {
  if (!broken.ok() || executor == nullptr || executor->idle()) {
    diagnosing = Time::zero();
    return;
  }
  compare_calls();
  if (!broken.ok()) return;
  const Blocked blocked = executor->blocked();
  if (blocked.call == nullptr) return;
  const Member& peer = members[blocked.peer];
  if (peer.bye && !peer.up) {
    fail(absl::UnavailableError(
             absl::StrCat(where(blocked), ", which has left the group without making this call")),
         blocked.peer, true);
    return;
  }
  if (peer.link != nullptr && !peer.link->status().ok()) {
    fail(absl::Status(peer.link->status().code(),
                      absl::StrCat(where(blocked), ": ", peer.link->status().message())),
         blocked.peer, true);
    return;
  }
  const Time time = now();
  for (const WorkSlot* slot : in_flight) {
    if (slot->call.deadline > time) continue;
    diagnose(blocked);
    return;
  }
}

// The deadline is over. Asks everybody where they stand, and follows who waits for whom to the rank
// that all wait for.
void Communicator::Impl::diagnose(const Blocked& blocked) {
  const Time time = now();
  if (diagnosing == Time::zero()) {
    diagnosing = time;
    for (Member& member : members) member.standing_fresh = false;
    tell_all(Mail::kQuery, bytes_of(standing()));
    return;
  }
  bool all = true;
  for (const Member& member : members) all &= !member.known || member.standing_fresh;
  if (!all && time - diagnosing < patience(blocked.call->deadline - blocked.call->began)) return;

  const uint64_t wanted = blocked.call->descriptor.sequence;
  const bool collective = blocked.call->programs != nullptr;
  uint32_t culprit = blocked.peer;
  std::string why;
  for (uint32_t hop = 0; hop < ranks && why.empty(); ++hop) {
    Member& member = members[culprit];
    if (culprit == rank) {
      why = "all ranks wait for each other";
    } else if (!member.standing_fresh) {
      uint64_t entered = UINT64_MAX;
      if (member.direct != nullptr) {
        entered = reinterpret_cast<const ControlBlock*>(member.view.data)
                      ->entered.load(std::memory_order_acquire);
      }
      const bool late = collective && entered < wanted;
      why = absl::StrFormat(
          "%s does not answer: it is stopped, busy with something else, or cut off%s", member.label,
          late ? absl::StrFormat("; it has not made this call (its last is #%u)", entered)
               : std::string());
      member.lost = true;
    } else if (collective && member.standing.entered < wanted) {
      why = absl::StrFormat("%s is alive and has not made this call: its last is #%u", member.label,
                            member.standing.entered);
    } else if (member.standing.waits_for >= ranks || member.standing.waits_for == culprit) {
      why = absl::StrFormat("%s is alive, has made this call and does not go on", member.label);
    } else {
      culprit = member.standing.waits_for;
    }
  }
  if (why.empty()) why = "ranks wait for each other in a circle";
  fail(absl::DeadlineExceededError(
           absl::StrFormat("%s: the deadline has passed. %s", where(blocked), why)),
       culprit, true);
}

}  // namespace baton
