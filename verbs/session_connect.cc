// Making the rails of a session: which ports belong together, calling, answering, trying again.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "verbs/session.h"

namespace baton::verbs {

// Every port of either side gets a rail. Ports on one subnet go together; among those, the ones
// that have the fewest rails yet, in order.
void Session::pair_ports() {
  const auto& ports = shared_.hardware.ports;
  std::vector<ibv_gid> own;
  for (const auto& port : ports) {
    auto gid = choose_gid(port->gids, shared_.tuning.gid_index, 0xff);
    own.push_back(gid.ok() ? gid->gid : ibv_gid{});
  }
  std::vector<size_t> used(offers_.size());
  const size_t pairs = std::max(ports.size(), offers_.size());
  for (size_t i = 0; i < pairs; ++i) {
    const size_t mine = i % ports.size();
    size_t best = 0;
    const auto better = [&](size_t a, size_t b) {
      if (used[a] != used[b]) return used[a] < used[b];
      return shared_prefix(own[mine], offers_[a].gid) > shared_prefix(own[mine], offers_[b].gid);
    };
    for (size_t j = 1; j < offers_.size(); ++j) {
      if (better(j, best)) best = j;
    }
    ++used[best];
    for (uint32_t q = 0; q < shared_.tuning.queue_pairs; ++q) {
      Slot slot;
      slot.port = static_cast<uint8_t>(mine);
      slot.peer_port = static_cast<uint8_t>(best);
      slot.due = Time::zero();
      slots_.push_back(std::move(slot));
    }
  }
}

absl::StatusOr<std::unique_ptr<QueuePair>> Session::make_queue_pair(const Slot& slot,
                                                                    uint8_t families) const {
  const Port& port = *shared_.hardware.ports[slot.port];
  // Read anew: after a flap an address may be under another index, whatever events came of it.
  Port now = port;
  (void)port.device->refresh(now);
  if (port.device->dead() || !now.up()) {
    return absl::UnavailableError(absl::StrCat(
        port.name(), " is down: bring its network interface up (`ip link set ... up`)"));
  }
  GidChoice gid;
  if (port.routable() || shared_.tuning.gid_index >= 0) {
    auto chosen = choose_gid(now.gids, shared_.tuning.gid_index, families);
    if (!chosen.ok()) {
      return absl::UnavailableError(absl::StrCat(port.name(), ": ", chosen.status().message()));
    }
    gid = *std::move(chosen);
  }
  return QueuePair::create(port, gid, shared_.tuning);
}

void Session::call(uint16_t index) {
  Slot& slot = slots_[index];
  slot.due = kNever;
  slot.link.reset();
  ++slot.incarnation;
  auto made = make_queue_pair(slot, offers_[slot.peer_port].families);
  if (!made.ok()) return attempt_failed(index, made.status());
  slot.pending = *std::move(made);
  slot.phase = Phase::kCalling;
  slot.due = now() + shared_.tuning.connect;
  Endpoint end = slot.pending->local();
  end.rail = index;
  end.rails = static_cast<uint16_t>(slots_.size());
  end.incarnation = slot.incarnation;
  end.port = slot.peer_port;
  end.recovery = slot.recovery;
  end.by_cm = shared_.tuning.rdma_cm;
  begin_message(scratch_, Kind::kConnect);
  encode(scratch_, end);
  say(scratch_, slot.rail);
}

void Session::on_connect(const Endpoint& peer) {
  constexpr size_t kMaxRails = 1024;
  if (slots_.empty() && peer.rails <= kMaxRails) slots_.resize(peer.rails);
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
  // What came over the broken queue pair has to be settled first.
  if (recovers && !slot.rail->settled() && slot.rail->state() != VerbsRail::State::kDown) return;
  slot.asked.reset();
  slot.link.reset();
  if (slot.fresh != nullptr) {
    slot.fresh->lose(absl::UnavailableError("the peer called again"), sink);
  }
  slot.incarnation = peer.incarnation;
  slot.recovery = recovers;
  slot.port = peer.port;
  absl::Status status = absl::InvalidArgumentError("there is no such port here");
  if (peer.port < shared_.hardware.ports.size()) {
    auto made = make_queue_pair(slot, peer.family);
    status = made.status();
    if (made.ok()) {
      slot.pending = *std::move(made);
      Endpoint end = slot.pending->local();
      end.rail = index;
      end.rails = static_cast<uint16_t>(slots_.size());
      end.incarnation = slot.incarnation;
      end.recovery = recovers;
      if (peer.recovery && !recovers) {
        status = absl::UnavailableError("the rail to recover is gone here");
      } else if (peer.by_cm) {
        status = await_cm(slot, peer, end);
      } else {
        status = join(index, peer, nullptr);
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
  if (slot.link != nullptr) return;  // heard before
  slot.peer = peer;
  absl::Status status = shared_.tuning.rdma_cm ? call_by_cm(slot) : join(peer.rail, peer, nullptr);
  if (!status.ok()) attempt_failed(peer.rail, status);
}

absl::Status Session::join(uint16_t index, const Endpoint& peer, const Path* path) {
  Slot& slot = slots_[index];
  if (absl::Status status = slot.pending->connect(peer, path); !status.ok()) return status;
  slot.phase = Phase::kProving;
  slot.due = now() + shared_.tuning.connect;
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
  slot.link.reset();
  slot.phase = Phase::kIdle;
  slot.why = why;
  if (slot.rail != nullptr) {
    slot.rail->fail(why, true);  // it goes down by itself
  } else {
    slot.due = connecting_ && established_ ? now() + shared_.tuning.hold : kNever;
  }
}

void Session::check_timers(Time now) {
  for (uint16_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (now < slot.due) continue;
    switch (slot.phase) {
      case Phase::kIdle:
        call(i);
        break;
      case Phase::kCalling:
        attempt_failed(
            i, absl::UnavailableError(slot.link == nullptr && connecting_
                                          ? "the peer did not answer the call for a rail"
                                          : "rdma_cm did not join the two queue pairs in time"));
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
