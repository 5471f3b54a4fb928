// Connecting the rails of a session: pairs ports, calls, answers, tries again.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "verbs/session.h"

namespace baton::verbs {

// Every port of either side gets a rail. Ports on one subnet go together; among those, the ones
// that have the fewest rails yet, in order. Fewer, where so many pairs are not wanted.
void Session::pair_ports() {
  const auto& ports = shared_.hardware.ports;
  std::vector<std::vector<ibv_gid>> own;
  for (const auto& port : ports) {
    own.push_back(best_gids(port->gids, most_gids(1)));
    auto set = choose_gid(port->gids, tuning_.gid_index, 0xff);
    if (tuning_.gid_index >= 0 && set.ok()) own.back() = {set->gid};
  }
  std::vector<size_t> used(offers_.size());
  size_t pairs = std::max(ports.size(), offers_.size());
  if (tuning_.pairs > 0) pairs = std::min<size_t>(pairs, tuning_.pairs);
  for (size_t i = 0; i < pairs; ++i) {
    const size_t mine = i % ports.size();
    size_t best = 0;
    const auto better = [&](size_t a, size_t b) {
      if (used[a] != used[b]) return used[a] < used[b];
      return shared_prefix(own[mine], offers_[a].gids) > shared_prefix(own[mine], offers_[b].gids);
    };
    for (size_t j = 1; j < offers_.size(); ++j) {
      if (better(j, best)) best = j;
    }
    ++used[best];
    for (uint32_t q = 0; q < tuning_.queue_pairs; ++q) {
      Slot slot;
      slot.port = static_cast<uint8_t>(mine);
      slot.peer_port = static_cast<uint8_t>(best);
      slot.due = Time::zero();
      slots_.push_back(std::move(slot));
    }
  }
}

absl::StatusOr<std::unique_ptr<QueuePair>> Session::make_queue_pair(
    const Slot& slot, uint8_t families, absl::Span<const ibv_gid> near) const {
  const Port& port = *shared_.hardware.ports[slot.port];
  // Reads the address again: after a flap it may have another index, and the event for that may be
  // missing.
  Port now = port;
  (void)port.device->refresh(now);
  if (port.device->dead() || !now.up()) {
    return absl::UnavailableError(absl::StrCat(
        port.name(), " is down: bring its network interface up (`ip link set ... up`)"));
  }
  GidChoice gid;
  if (!port.infiniband() || tuning_.gid_index >= 0) {
    auto chosen = choose_gid(now.gids, tuning_.gid_index, families, near);
    if (!chosen.ok()) {
      return absl::UnavailableError(absl::StrCat(port.name(), ": ", chosen.status().message()));
    }
    gid = *std::move(chosen);
  }
  return QueuePair::create(port, gid, tuning_);
}

void Session::call(uint16_t index) {
  Slot& slot = slots_[index];
  slot.due = kNever;
  ++slot.incarnation;
  const PortOffer& offer = offers_[slot.peer_port];
  auto made = make_queue_pair(slot, offer.families, offer.gids);
  if (!made.ok()) return attempt_failed(index, made.status());
  slot.pending = *std::move(made);
  slot.phase = Phase::kCalling;
  slot.due = now() + tuning_.connect;
  Endpoint end = slot.pending->local();
  end.rail = index;
  end.rails = static_cast<uint16_t>(slots_.size());
  end.incarnation = slot.incarnation;
  end.port = slot.peer_port;
  end.recovery = slot.recovery;
  begin_message(scratch_, Kind::kConnect);
  encode(scratch_, end);
  say(scratch_, slot.rail);
}

void Session::on_connect(const Endpoint& peer) {
  constexpr size_t kMaxRails = 1024;
  if (slots_.empty() && peer.rails <= kMaxRails) {
    slots_.resize(peer.rails);
    if (peer.rails == 1) tuning_ = shared_.tuning.for_session(false);  // whatever ports there are
  }
  if (peer.rail >= slots_.size()) return;
  Slot& slot = slots_[peer.rail];
  if (slot.phase == Phase::kClosed || peer.incarnation <= slot.incarnation) return;
  slot.asked = peer;
}

// On the side that was called.
void Session::answer(uint16_t index, EventSink& sink) {
  Slot& slot = slots_[index];
  const Endpoint peer = *slot.asked;
  const bool recovers = peer.recovery && slot.rail != nullptr;
  // Both ends must first agree on what arrived over the broken queue pair.
  if (recovers && !slot.rail->settled() && slot.rail->state() != VerbsRail::State::kDown) return;
  if (!may_make_queue_pair()) return;
  slot.asked.reset();
  if (slot.fresh != nullptr) {
    slot.fresh->lose(absl::UnavailableError("the peer connected again"), sink);
  }
  slot.incarnation = peer.incarnation;
  slot.recovery = recovers;
  slot.port = peer.port;
  absl::Status status = absl::InvalidArgumentError("this side has no such port");
  if (peer.port < shared_.hardware.ports.size()) {
    auto made = make_queue_pair(slot, peer.family, {&peer.gid, 1});
    status = made.status();
    if (made.ok()) {
      slot.pending = *std::move(made);
      Endpoint end = slot.pending->local();
      end.rail = index;
      end.rails = static_cast<uint16_t>(slots_.size());
      end.incarnation = slot.incarnation;
      end.recovery = recovers;
      if (peer.recovery && !recovers) {
        status = absl::UnavailableError("this side has already dropped the rail to recover");
      } else if (peer.by_cm) {
        status = absl::UnimplementedError(
            "this release does not connect queue pairs by rdma_cm: start the peer without -R");
      } else {
        status = join(index, peer);
      }
      if (status.ok()) {
        begin_message(scratch_, Kind::kConnected);
        encode(scratch_, end);
        say(scratch_, slot.rail);
        return;
      }
    }
  }
  refuse(index, status);
}

void Session::refuse(uint16_t index, const absl::Status& why) {
  begin_message(scratch_, Kind::kRefused);
  encode(scratch_, RailNote{.rail = index,
                            .incarnation = slots_[index].incarnation,
                            .text = std::string_view(why.message().data(),
                                                     std::min<size_t>(why.message().size(), 400))});
  say(scratch_, slots_[index].rail);
  attempt_failed(index, why);
}

void Session::on_connected(const Endpoint& peer) {
  if (peer.rail >= slots_.size()) return;
  Slot& slot = slots_[peer.rail];
  if (slot.phase != Phase::kCalling || slot.incarnation != peer.incarnation) return;
  if (absl::Status status = join(peer.rail, peer); !status.ok()) attempt_failed(peer.rail, status);
}

absl::Status Session::join(uint16_t index, const Endpoint& peer) {
  Slot& slot = slots_[index];
  if (absl::Status status = slot.pending->connect(peer); !status.ok()) return status;
  slot.phase = Phase::kProving;
  slot.due = now() + tuning_.connect;
  VerbsRail* rail = slot.rail;
  if (!slot.recovery || rail == nullptr) {
    slot.fresh = std::make_unique<VerbsRail>(*this, *shared_.hardware.ports[slot.port], index);
    rail = slot.fresh.get();
    rails_.push_back(rail);
  }
  rail->start(std::move(slot.pending), peer, slot.incarnation, connecting_);
  return absl::OkStatus();
}

// A rail that never was, or could not be recovered.
void Session::attempt_failed(uint16_t index, const absl::Status& why) {
  Slot& slot = slots_[index];
  slot.pending.reset();
  slot.phase = Phase::kIdle;
  slot.why = why;
  if (slot.rail != nullptr) {
    slot.rail->fail(why, true);  // it goes down by itself
  } else {
    slot.due = connecting_ && established_ ? now() + tuning_.hold : kNever;
  }
}

void Session::check_timers(Time now) {
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (now < slot.due) continue;
    switch (slot.phase) {
      case Phase::kIdle:
        if (may_make_queue_pair()) call(i);
        break;
      case Phase::kCalling:
        attempt_failed(i, absl::UnavailableError("the peer did not answer the call for a rail"));
        break;
      case Phase::kProving: {
        const absl::Status why = absl::UnavailableError(
            absl::StrCat("no packet came through on ", shared_.hardware.ports[slot.port]->name()));
        slot.due = kNever;
        VerbsRail* rail = rail_of(slot);
        if (rail != nullptr) rail->fail(why, true);
        break;
      }
      case Phase::kUp:
      case Phase::kClosed:
        slot.due = kNever;
        break;
    }
  }
}

}  // namespace baton::verbs
