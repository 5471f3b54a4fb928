// Rails whose queue pairs rdma_cm joins: calling, answering, and what becomes of the links.
#include "absl/strings/str_cat.h"
#include "transport/wire.h"
#include "verbs/session.h"

namespace baton::verbs {

absl::StatusOr<ConnectionManager*> Shared::connection_manager() {
  if (cm == nullptr) {
    if (cm_api == nullptr) {
      auto loaded = load_cm();
      if (!loaded.ok()) return loaded.status();
      cm_api = *loaded;
    }
    auto made = ConnectionManager::create(*cm_api, *poller);
    if (!made.ok()) return made.status();
    cm = *std::move(made);
  }
  return cm.get();
}

// The proofs name both workers, the session, the rail, its incarnation and both queue pairs, all
// known from the handshake and the messages after it: none fits any other connection. (Queue pairs
// are numbered by device: those of two rails may well have the same numbers.)
CmTerms Session::terms(const Slot& slot) const {
  const Endpoint own = slot.pending->local();
  const WorkerUid& here = shared_.context.self.uid;
  const auto prove = [&](const char* who) {
    std::string text = absl::StrCat("baton rdma_cm ", who);
    for (const WorkerUid* uid :
         {connecting_ ? &here : &peer_.uid, connecting_ ? &peer_.uid : &here}) {
      text.append(reinterpret_cast<const char*>(uid->bytes.data()), uid->bytes.size());
    }
    put_number(text, peer_.session);
    put_number(text, static_cast<uint16_t>(&slot - slots_.data()));
    put_number(text, slot.incarnation);
    put_number(text, connecting_ ? own.queue_pair : slot.peer.queue_pair);
    put_number(text, connecting_ ? slot.peer.queue_pair : own.queue_pair);
    const auto mac = shared_.context.key.hmac(text);
    static_assert(sizeof mac == ConnectionManager::kProofBytes);
    return std::string(mac.begin(), mac.end());
  };
  return {.queue_pair = own.queue_pair,
          .peer_queue_pair = slot.peer.queue_pair,
          .reads_answered = own.rd_atomic,
          .reads_asked = slot.pending->reads_asked(slot.peer),
          .proof = prove(connecting_ ? "call" : "answer"),
          .expected = prove(connecting_ ? "answer" : "call")};
}

// The connecting side, once it knows the other queue pair.
absl::Status Session::call_by_cm(Slot& slot) {
  auto manager = shared_.connection_manager();
  if (!manager.ok()) return manager.status();
  auto link = (*manager)->call(*shared_.hardware.ports[slot.port], slot.pending->local().gid,
                               slot.peer.gid, slot.peer.cm_port, terms(slot), shared_.tuning);
  if (!link.ok()) return link.status();
  slot.link = *std::move(link);
  return absl::OkStatus();
}

// The answering side: from here on it waits for the call.
absl::Status Session::await_cm(Slot& slot, const Endpoint& peer, Endpoint& end) {
  auto manager = shared_.connection_manager();
  if (!manager.ok()) return manager.status();
  auto port = (*manager)->listen();
  if (!port.ok()) return port.status();
  end.by_cm = true;
  end.cm_port = *port;
  slot.peer = peer;
  slot.phase = Phase::kCalling;
  slot.due = now() + shared_.tuning.connect;
  return absl::OkStatus();
}

absl::Status Session::on_cm_request(const CmRequest& request) {
  for (uint16_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (connecting_ || over_ || slot.phase != Phase::kCalling || slot.link != nullptr) continue;
    if (slot.peer.queue_pair != request.queue_pair) continue;
    const CmTerms own = terms(slot);
    if (!same_proof(own.expected, request.proof)) continue;
    auto link = shared_.cm->take(request, *shared_.hardware.ports[slot.port]);
    if (!link.ok()) {
      refuse(i, link.status());
      return link.status();
    }
    slot.link = *std::move(link);
    if (absl::Status status = join_by_cm(i); !status.ok()) {
      refuse(i, status);
    } else if (status = shared_.cm->accept(*slot.link, own); !status.ok()) {
      rail_of(slot)->fail(status, true);
    }
    return absl::OkStatus();
  }
  return absl::NotFoundError("nobody here waits for this call");
}

absl::Status Session::join_by_cm(uint16_t index) {
  auto path = slots_[index].link->path();
  if (!path.ok()) return path.status();
  const Endpoint peer = slots_[index].peer;
  return join(index, peer, &*path);
}

void Session::check_links() {
  for (uint16_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.link == nullptr) continue;
    switch (slot.link->state()) {
      case CmLink::State::kUnderway:
      case CmLink::State::kUp:
        break;
      case CmLink::State::kAnswered: {
        if (absl::Status status = join_by_cm(i); !status.ok()) {
          attempt_failed(i, status);
        } else if (status = slot.link->establish(); !status.ok()) {
          rail_of(slot)->fail(status, true);
        }
        break;
      }
      case CmLink::State::kFailed: {
        const absl::Status why = slot.link->why();
        attempt_failed(i, why);
        break;
      }
      case CmLink::State::kClosed: {
        const absl::Status why = slot.link->why();
        const bool gone = slot.link->device_gone();
        if (gone) shared_.hardware.ports[slot.port]->device->set_dead();
        slot.link.reset();
        if (VerbsRail* rail = rail_of(slot); rail != nullptr) rail->fail(why, gone);
        break;
      }
    }
  }
}

}  // namespace baton::verbs
