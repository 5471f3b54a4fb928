// The messages between ranks of a group, and how a rank leaves.
#include "collectives/internal/mesh.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace baton::collectives::internal {

using executor::TransferLink;

namespace {

// For others to take what calls that have ended left for them.
constexpr Time kSettling = std::chrono::seconds(60);
// A simulated clock that does not move for so long is moved by the thread that waits here.
constexpr Time kStandsStill = std::chrono::seconds(1);

}  // namespace

std::string encode_verdict(const absl::Status& why, uint32_t culprit) {
  std::string out(1, static_cast<char>(why.code()));
  out.append(reinterpret_cast<const char*>(&culprit), sizeof culprit);
  out.append(std::string(why.message()).substr(0, 1024));
  return out;
}

Mesh::State::~State() {
  for (Member& member : members) member.link.reset();
  for (Member& member : members) {
    member.view = RemoteView{};
    if (member.our_outbox.data != nullptr) endpoint.memory().free(member.our_outbox);
  }
  if (control_memory.data != nullptr) endpoint.memory().free(control_memory);
}

Mesh::Member* Mesh::State::find(const Process& process) {
  const auto found = ranks.find(&process);
  return found == ranks.end() ? nullptr : &members[found->second];
}

void Mesh::State::activate(Member& member) {
  if (std::exchange(member.active, true)) return;
  active.push_back(static_cast<uint32_t>(&member - members.data()));
}

void Mesh::State::on_control_message(Process& from, ControlMessage kind) {
  Member* member = find(from);
  if (member != nullptr && kind == ControlMessage::kEnded) member->ended = true;
}

void Mesh::State::tell_ended() {
  for (const uint32_t rank : active) {
    Member& member = members[rank];
    if (member.told_ended || !(member.asked || member.met)) continue;
    if (member.transfer != nullptr && member.transfer->unsettled()) continue;
    endpoint.tell(*member.process, id, ControlMessage::kEnded, "");
    member.told_ended = true;
  }
}

bool Mesh::State::over() {
  tell_ended();
  return std::all_of(active.begin(), active.end(), [this](uint32_t rank) {
    const Member& member = members[rank];
    if (!member.asked) return true;  // it knows of no memory of ours
    if (member.transfer != nullptr && member.transfer->unsettled()) return false;
    return member.ended || !member.process->up;
  });
}

std::vector<executor::Link*> Mesh::links() {
  std::vector<executor::Link*> links(ranks_);
  for (uint32_t r = 0; r < ranks_; ++r) {
    if (r != rank_) links[r] = state_->pending[r].get();
  }
  return links;
}

void Mesh::tell(uint32_t rank, ControlMessage kind, std::string_view body) {
  const Member& member = state_->members[rank];
  if (member.up()) endpoint_.tell(*member.process, id_, kind, body);
}

void Mesh::tell_all(ControlMessage kind, std::string_view body) {
  for (uint32_t r = 0; r < ranks_; ++r) tell(r, kind, body);
  worker().progress();
}

void Mesh::on_control_message(Process& from, ControlMessage kind, std::string_view body) {
  Member* const found = state_->find(from);
  if (found == nullptr) {
    if (kind != ControlMessage::kJoin) return;
    const absl::Status why = absl::InvalidArgumentError(absl::StrFormat(
        "this process is not among the %u ranks of the group \"%s\" at rank %u: all need the same "
        "handles in the same order, and no other group the same uuid",
        ranks_, options_.name, rank_));
    return endpoint_.tell(from, id_, ControlMessage::kAbort, encode_verdict(why, UINT32_MAX));
  }
  Member& member = *found;
  state_->activate(member);
  switch (kind) {
    case ControlMessage::kJoin:
      if (absl::Status status = on_join(member, body); !status.ok()) {
        listener_.on_wrong(status, rank_of(member));
      }
      return;
    case ControlMessage::kLinked:
      if (std::exchange(member.linked, true)) return;
      return count_linked(member);
    case ControlMessage::kSlab:
      member.slab = std::string(body);
      return;
    case ControlMessage::kBye:
      member.bye = true;
      return;
    case ControlMessage::kEnded:
      member.ended = true;
      return;
    case ControlMessage::kCall: {
      TransferLink::Announcement theirs;
      if (body.size() != sizeof theirs || member.transfer == nullptr) return;
      std::memcpy(&theirs, body.data(), sizeof theirs);
      member.transfer->announced(theirs);
      listener_.on_control_message(rank_of(member), kind, body.substr(0, sizeof theirs.call));
      return;
    }
    case ControlMessage::kPacket: {
      if (member.transfer == nullptr) return;
      // A message of an all_to_all_v names its call, as kCall does.
      const std::optional<executor::CallDescriptor> call = member.transfer->came(body);
      if (!call) return;
      listener_.on_control_message(rank_of(member), ControlMessage::kCall,
                                   {reinterpret_cast<const char*>(&*call), sizeof *call});
      return;
    }
    case ControlMessage::kAdd:
    case ControlMessage::kAbort:
    case ControlMessage::kQuery:
    case ControlMessage::kStanding:
    case ControlMessage::kBallot:
      listener_.on_control_message(rank_of(member), kind, body);
      return;
    default:
      return;
  }
}

void Mesh::on_ready(Process& process) {
  Member* const member = state_->find(process);
  if (member != nullptr && (member->wanted || member->met)) advance(*member);
}

void Mesh::on_goodbye(Process& process) {
  if (Member* const member = state_->find(process); member != nullptr) {
    member->bye = member->ended = true;
  }
}

void Mesh::on_down(Process& process, const absl::Status& why) {
  Member* const member = state_->find(process);
  // A rank that left in order is noticed when its deadline is checked.
  if (member == nullptr || member->bye) return;
  if (!process.parted) return listener_.on_down(rank_of(*member), why);
  // The peer is not at fault and is not lost, neither here nor for ranks that are told of this.
  listener_.on_wrong(
      absl::UnavailableError(absl::StrFormat(
          "rank %u has closed its connection to %s, since another group of the two ended with "
          "bytes on their way; reconfigure() or shrink() connects them again",
          rank_, member->label)),
      rank_);
}

void Mesh::look(Time now) {
  if (state_->ending) state_->tell_ended();
  if (connecting_ > 0) make_links();
  if (starting_ == 0) return;
  const bool late = now >= start_by_;
  if (late) start_by_ = kNever;
  std::vector<std::string> missing;
  uint32_t culprit = rank_;
  for (const uint32_t r : active()) {
    const Member& member = state_->members[r];
    if (!first_[r] || (member.ready && member.linked)) continue;
    if (member.bye) {
      return listener_.on_wrong(
          absl::UnavailableError(absl::StrFormat(
              "%s has left the group \"%s\" before rank %u had a link to it: start it again at all "
              "ranks, under another uuid",
              member.label, options_.name, rank_)),
          r);
    }
    missing.push_back(member.label);
    culprit = r;
  }
  if (!late) return;
  listener_.on_wrong(
      absl::DeadlineExceededError(absl::StrFormat(
          "rank %u could not connect to %s in %.3g s", rank_, absl::StrJoin(missing, ", "),
          std::chrono::duration<double>(start_timeout_).count())),
      culprit);
}

void Mesh::end_transfers() {
  state_->control->ended.store(1, std::memory_order_seq_cst);
  // Nothing that the caller writes from now on is seen before the flag, streaming stores included.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  state_->ending = true;
  for (Member& member : state_->members) {
    if (member.transfer == nullptr) continue;
    member.transfer->begin_cancel();
    if (member.process->first_link == id_) member.process->first_link = 0;
  }
  listener_.cancel_accesses();
}

bool Mesh::lets_go(const Member& member) const {
  return (member.transfer == nullptr || member.transfer->sources_free()) &&
         listener_.accesses_free(rank_of(member));
}

bool Mesh::quiet() const {
  return std::all_of(state_->members.begin(), state_->members.end(),
                     [this](const Member& member) { return lets_go(member); });
}

// Without a fence: what still lands at the peer lands in memory that it keeps for this link, or
// that it grants no more.
void Mesh::force_quiet() {
  for (Member& member : state_->members) {
    if (lets_go(member)) continue;
    if (member.transfer != nullptr) member.transfer->withdraw();
    listener_.withdraw_accesses(rank_of(member));
    if (lets_go(member)) continue;  // else a device still copies
    member.process->parted = true;
    worker().disconnect(member.peer(), Time::zero()).IgnoreError();
  }
}

bool Mesh::all_direct() const {
  return std::all_of(state_->members.begin(), state_->members.end(), [&](const Member& member) {
    return rank_of(member) == rank_ || member.direct != nullptr;
  });
}

void Mesh::wake_all() {
  // A sleeper raises its flag and then checks again what this rank has published.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (const uint32_t rank : active()) {
    const Member& member = state_->members[rank];
    if (member.direct != nullptr && member.block().sleeping.load(std::memory_order_relaxed) != 0) {
      worker().notify_detached(member.peer(), "w").IgnoreError();
      worker().progress();
    }
  }
}

bool Mesh::submitted() {
  bool any = false;
  for (const uint32_t rank : active()) {
    const Member& member = state_->members[rank];
    any |= member.transfer != nullptr && member.transfer->take_submitted();
  }
  return any;
}

bool Mesh::unsettled() const {
  return std::any_of(active().begin(), active().end(), [this](uint32_t rank) {
    const Member& member = state_->members[rank];
    return member.up() && !member.bye && member.transfer != nullptr &&
           member.transfer->status().ok() && member.transfer->unsettled();
  });
}

void Mesh::leave(EndpointImpl::Lock* lock) {
  if (state_ == nullptr || state_->control == nullptr) return;
  state_->control->ended.store(1, std::memory_order_seq_cst);
  for (Member& member : state_->members) {
    if (member.asked || member.met) {
      endpoint_.tell(*member.process, id_, ControlMessage::kBye, "");
    }
  }
  worker().progress();
  const Time end = now() + std::min(options_.timeout, kSettling);
  Time seen = now(), moved = Clock::steady().now();
  while (lock != nullptr && unsettled() && now() < end) {
    const uint64_t ticket = endpoint_.nap_ticket();
    if (endpoint_.tick()) continue;
    lock->unlock();
    endpoint_.nap(std::chrono::milliseconds(1), ticket);
    lock->lock();
    const Time machine = Clock::steady().now();
    if (const Time at = now(); at != seen) seen = at, moved = machine;
    if (machine - moved > kStandsStill) break;
  }
  starting_ = connecting_ = transfers_ = 0;
  state_->ending = true;
  for (Member& member : state_->members) {
    if (member.transfer != nullptr) member.transfer->begin_cancel();
  }
  auto nothing = std::make_unique<State>(endpoint_);  // until the next group is entered
  nothing->handles = state_->handles;
  nothing->members = std::vector<Member>(ranks_);
  nothing->ending = true;
  any_wanted_ = false;
  endpoint_.remove_group(id_, std::exchange(state_, std::move(nothing)));
  worker().progress();
}

}  // namespace baton::collectives::internal
