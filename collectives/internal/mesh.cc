// What ranks tell each other, how they sleep, and how one leaves.
#include "collectives/internal/mesh.h"

#include <poll.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "transport/base/durations.h"

namespace baton::collectives::internal {

using executor::TransferLink;

namespace {

constexpr Time kLeaving = std::chrono::milliseconds(50);  // for the goodbyes of others
// For others to take what calls that have ended left for them.
constexpr Time kSettling = std::chrono::seconds(60);

}  // namespace

Mesh::~Mesh() {
  for (Member& member : members_) member.link.reset();
  for (Member& member : members_) member.view = RemoteView{};
  if (memory_ != nullptr && control_memory_.data != nullptr) memory_->free(control_memory_);
  memory_.reset();
}

std::vector<executor::Link*> Mesh::links() const {
  std::vector<executor::Link*> links;
  for (const Member& member : members_) links.push_back(member.link.get());
  return links;
}

absl::Status Mesh::publish_new_regions() {
  const auto& regions = memory_->regions();
  for (; published_regions_ < regions.size(); ++published_regions_) {
    absl::StatusOr<RemoteRegion> region = worker_->remote_region(regions[published_regions_].local);
    if (!region.ok()) return region.status();
    const std::string bytes = region->encode();
    std::memcpy(control_->regions[published_regions_].bytes, bytes.data(), bytes.size());
    control_->region_count.store(static_cast<uint32_t>(published_regions_ + 1),
                                 std::memory_order_release);
  }
  return absl::OkStatus();
}

Mesh::Member* Mesh::member_of(PeerId peer) {
  for (Member& member : members_) {
    if (member.known && member.peer == peer) return &member;
  }
  return nullptr;
}

void Mesh::tell(uint32_t rank, ControlMessage kind, std::string_view body) {
  const Member& member = members_[rank];
  if (!member.up) return;
  worker_
      ->notify_detached(member.peer,
                        absl::StrCat(std::string(1, static_cast<char>(kind)), std::string(body)))
      .IgnoreError();
}

void Mesh::tell_all(ControlMessage kind, std::string_view body) {
  for (uint32_t r = 0; r < ranks_; ++r) {
    if (members_[r].known) tell(r, kind, body);
  }
  worker_->progress();
}

void Mesh::drain() {
  while (worker_->next_notification(notification_)) {
    Member* member = member_of(notification_.peer);
    if (member == nullptr) {
      on_events();
      member = member_of(notification_.peer);
    }
    if (member != nullptr && !notification_.payload.empty()) {
      on_control_message(*member, notification_.payload);
    }
  }
  on_events();
}

void Mesh::on_control_message(Member& member, std::string_view bytes) {
  const auto kind = static_cast<ControlMessage>(bytes[0]);
  const std::string_view body = bytes.substr(1);
  switch (kind) {
    case ControlMessage::kWake:
      return;
    case ControlMessage::kView:
      member.can_view = body == "1" ? 1 : 0;
      return;
    case ControlMessage::kOffer:
      member.offer = std::string(body);
      return;
    case ControlMessage::kSlab:
      member.slab = std::string(body);
      return;
    case ControlMessage::kBye:
      member.bye = true;
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
      // What belongs to an all_to_all_v says what was called, as kCall does.
      const std::optional<executor::CallDescriptor> call = member.transfer->came(body);
      if (!call) return;
      listener_.on_control_message(rank_of(member), ControlMessage::kCall,
                                   {reinterpret_cast<const char*>(&*call), sizeof *call});
      return;
    }
    case ControlMessage::kAbort:
    case ControlMessage::kQuery:
    case ControlMessage::kStanding:
    case ControlMessage::kBallot:
      listener_.on_control_message(rank_of(member), kind, body);
      return;
  }
}

void Mesh::on_events() {
  while (std::optional<PeerEvent> event = worker_->next_peer_event()) {
    Member* member = member_of(event->peer);
    if (event->kind == PeerEvent::Kind::kUp) {
      for (uint32_t r = 0; r < ranks_ && member == nullptr; ++r) {
        if (r != rank_ && !members_[r].known && members_[r].uid == event->uid) {
          member = &members_[r];
          member->peer = event->peer;
          member->known = true;
        }
      }
      if (member != nullptr) member->up = true;
    } else if (member != nullptr && event->kind == PeerEvent::Kind::kDown) {
      member->up = false;
      // Whoever waits for one that left in order finds out when it looks at deadlines.
      if (!leaving_ && !member->bye) listener_.on_down(rank_of(*member), event->why);
    }
  }
}

void Mesh::end_transfers() {
  control_->ended.store(1, std::memory_order_seq_cst);
  // Nothing that the caller writes from now on is seen before the flag, streaming stores included.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (Member& member : members_) {
    if (member.transfer != nullptr) member.transfer->cancel();
  }
}

void Mesh::nap(Time longest) {
  if (!worker_->arm()) return;
  const Time timer = worker_->next_timer();
  if (timer != kNever) longest = std::min(longest, std::max(Time::zero(), timer - now()));
  pollfd fd{.fd = worker_->wait_fd(), .events = POLLIN, .revents = 0};
  const timespec timeout = base::to_timespec(longest);
  ppoll(&fd, 1, &timeout, nullptr);
}

bool Mesh::all_direct() const {
  return std::all_of(members_.begin(), members_.end(), [&](const Member& member) {
    return rank_of(member) == rank_ || member.direct != nullptr;
  });
}

void Mesh::wake_all() {
  // A sleeper raises its flag and then looks once more at what we have published.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (uint32_t r = 0; r < ranks_; ++r) {
    const bool direct = members_[r].direct != nullptr;
    if (direct && members_[r].block().sleeping.load(std::memory_order_relaxed) != 0) {
      tell(r, ControlMessage::kWake, "");
      worker_->progress();
    }
  }
}

bool Mesh::submitted() {
  bool any = false;
  for (Member& member : members_)
    any |= member.transfer != nullptr && member.transfer->take_submitted();
  return any;
}

// Calls may have ended whose last messages are still on their way to ranks that are busy.
bool Mesh::unsettled() const {
  return std::any_of(members_.begin(), members_.end(), [](const Member& member) {
    return member.up && !member.bye && member.transfer != nullptr &&
           member.transfer->status().ok() && member.transfer->unsettled();
  });
}

// Ranks mostly leave together: a moment's wait spares them looking into a peer that has gone.
void Mesh::leave() {
  if (worker_ == nullptr || ranks_ == 1) return;
  leaving_ = true;
  if (control_ != nullptr) control_->ended.store(1, std::memory_order_seq_cst);
  tell_all(ControlMessage::kBye, "");
  const Time begin = now();
  const Time end = begin + kLeaving;
  const Time settled_by = begin + std::min(options_.timeout, kSettling);
  while (now() < (unsettled() ? std::max(end, settled_by) : end)) {
    const bool any = worker_->progress();
    drain();
    bool alone = worker_->stats().open_transfers == 0;
    for (const Member& member : members_) alone &= !member.up || member.bye;
    if (alone) return;
    if (!any) nap(std::chrono::milliseconds(1));
  }
}

}  // namespace baton::collectives::internal
