// Peers inside a worker: what happens when connections to one come, and when they go.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "transport/base/log.h"
#include "transport/internal/worker/core.h"
#include "transport/internal/worker/staging.h"

namespace baton::internal {
namespace {
constexpr const char* kFenced = "the peer has lost its end of this rail";

}  // namespace

// Gives a region to all providers that take it. Of the host's memory that is all of them.
absl::Status WorkerCore::add_region(RegionEntry& row, std::initializer_list<absl::Status> missing) {
  std::vector<Provider*> have;
  std::vector<Provider*> sharing;  // what their peers cannot map is staged
  const auto take_back = [&] {
    // No peer has heard of it yet, so nobody can be in the middle of anything.
    for (const auto* list : {&have, &sharing}) {
      for (Provider* other : *list) other->remove_region(row, *this).IgnoreError();
    }
  };
  std::vector<std::string> reasons;
  for (const auto& provider : providers) {
    absl::Status status = provider->takes(row);
    if (!status.ok()) {
      reasons.emplace_back(status.message());
      if (!provider->shares(row)) continue;
      if (status = provider->add_region(row); status.ok()) {
        sharing.push_back(provider.get());
      } else {
        reasons.emplace_back(status.message());
      }
      continue;
    }
    status = provider->add_region(row);
    if (!status.ok() && staging != nullptr && staging->has_ring(row.place.device)) {
      reasons.emplace_back(status.message());
      continue;
    }
    if (!status.ok()) {
      take_back();
      return status;
    }
    have.push_back(provider.get());
  }
  row.direct = row.place.kind != MemoryKind::kHost && !have.empty();
  if (reasons.empty()) return absl::OkStatus();
  for (const absl::Status& why : missing) {
    if (!why.ok() && !why.message().empty()) reasons.emplace_back(why.message());
  }
  if (staging != nullptr && staging->has_ring(row.place.device)) {
    staging->note(row.place.device, absl::StrJoin(reasons, "; "));
    return absl::OkStatus();
  }
  if (!have.empty()) return absl::OkStatus();
  take_back();
  return absl::FailedPreconditionError(absl::StrFormat(
      "registering %u bytes of %s: %s", row.size, row.place.name(), absl::StrJoin(reasons, "; ")));
}

void WorkerCore::arrived(Rail& rail, const Arrival& arrival) {
  Peer* peer = peers.of(rail);
  if (peer == nullptr) return;
  peer->redial.give_up_at = kNever;  // it is there, and knows us
  auto complete = peer->arrivals.add(arrival);
  if (!complete.ok()) {
    closing.close_later(peer->id(), &rail, complete.status());
    return;
  }
  if (!complete->now) return;
  if (arrival.counter_index == CounterTable::kCredits)
    return dispatcher.take_credit(*peer, arrival.increment);
  if (arrival.counter_index == CounterTable::kControl) {
    return hear(*peer, rail, complete->notify);
  }
  if (arrival.counter_index == CounterTable::kStaging) {
    return staging_for_device_memory().hear(*peer, rail, complete->notify);
  }
  if (arrival.counter_generation != 0) {
    counters.add(arrival.counter_index, arrival.counter_generation, arrival.increment);
    wakeups.signal();
  }
  if (!complete->notify.empty()) inbox.push(*peer, complete->notify);
}

void WorkerCore::connected(uint64_t session, const HelloInfo& info, std::unique_ptr<Rail> rail) {
  auto it = sessions.find(session);
  Peer* peer = it == sessions.end() ? nullptr : find_peer(it->second);
  if (peer == nullptr || peer->state == PeerState::kDown || peer->session != session) {
    return closing.close_now(std::move(rail),
                             absl::CancelledError("this connection is no longer wanted"));
  }
  const bool better = peer->rails.empty() || rank_of(*rail) > peer->rails.front().rank;
  const bool answered = better && std::exchange(peer->back.calling, false);
  const bool around = rail->properties().provider == peer->around.route &&
                      std::exchange(peer->around.calling, false);
  if (around) peer->around.up_at = clock.now();
  if (!fenced(*peer, info.link)) return peer_up(*peer, info, std::move(rail));
  if (answered && peer->state == PeerState::kUp) call_better_later(*peer);
  if (around) around_failed(*peer, absl::UnavailableError(kFenced));
  closing.close_now(std::move(rail), absl::UnavailableError(kFenced));
  // It answers; it has lost this rail only. If that was the only one of this call, there is
  // another.
  if (peer->state != PeerState::kReconnecting) return;
  peer->redial.hopeless.clear();
  round_over(*peer);
}

// The other side has lost this rail before it was heard of here.
bool WorkerCore::fenced(const Peer& peer, uint64_t link) {
  return std::find(peer.fenced.begin(), peer.fenced.end(), link) != peer.fenced.end();
}

void WorkerCore::refuse(const HelloInfo& info, std::unique_ptr<Rail> rail,
                        const absl::Status& why) {
  closing.close_now(std::move(rail), why);
  handshake_refused(info.name, why);
}

void WorkerCore::accepted(const HelloInfo& info, std::unique_ptr<Rail> rail) {
  // Called again, the other way round: a session that we had chosen.
  const bool dialled = info.resume == Resume::kTheirs;
  Peer* peer = peers.of_session(info.uid, info.session, dialled);
  if (peer != nullptr) {
    if (peer->state == PeerState::kDown) {
      return refuse(info, std::move(rail), absl::AbortedError("this session is over here"));
    }
    if (fenced(*peer, info.link))
      return closing.close_now(std::move(rail), absl::UnavailableError(kFenced));
    const std::string& by = rail->properties().provider;
    if (peer->dialled && !peer->require.empty() && by != peer->require) {
      return closing.close_now(std::move(rail),
                               absl::UnavailableError(absl::StrFormat(
                                   "%s is not wanted here (require=%s)", by, peer->require)));
    }
    return peer_up(*peer, info, std::move(rail));
  }
  // It resumes what was never begun here: its first call was lost after its last word, before we
  // had heard that. Not if the session may have been here: what had landed in it would land twice.
  const bool never_begun = info.resume == Resume::kOurs && peers.size() <= peers.kRemembered;
  if (info.resume != Resume::kNew && !never_begun) {
    return refuse(info, std::move(rail), absl::AbortedError("this session is over here"));
  }
  if (inbox.left_behind() > kMostLeftBehind) {
    return refuse(info, std::move(rail),
                  absl::ResourceExhaustedError("this worker's program does not read its "
                                               "notifications, and holds too many already"));
  }
  peer = add_peer();
  if (peer == nullptr) {
    return refuse(
        info, std::move(rail),
        absl::ResourceExhaustedError(
            inbox.left_behind() == 0 ? "this worker has no room for more peers"
                                     : "this worker has no room for more peers while its program "
                                       "does not read the notifications of those that have gone"));
  }
  peer->uid = info.uid;
  peers.set_session(*peer, info.session);
  // Where it may be called again; by the provider that it chose.
  absl::StatusOr<Address> home = Address::decode(info.address);
  if (home.ok() && home->uid == info.uid) peer->address = *std::move(home);
  peer->require = rail->properties().provider;
  peer_up(*peer, info, std::move(rail));
}

void WorkerCore::peer_up(Peer& peer, const HelloInfo& info, std::unique_ptr<Rail> rail) {
  peer.uid = info.uid;
  peers.set_name(peer, info.name);
  peer.protocol = info.protocol;
  rail->worker_tag = PeerTable::tag_of(peer.id());
  auto* const prompt = dynamic_cast<PromptRail*>(rail.get());
  if (prompt != nullptr) transfers.note_prompt_rail();
  add_rail(peer, {.rail = std::move(rail), .link = info.link, .prompt = prompt});
  come_around(peer);
  if (peer.state == PeerState::kUp) return look_for_better(peer);
  const bool again = peer.state == PeerState::kReconnecting;
  peers.set_state(peer, PeerState::kUp);
  dispatcher.make_ready(peer);
  if (staging != nullptr) staging->peer_up();
  ++stats.peers_up;
  look_for_better(peer);
  if (again) return peer_resumed(peer);
  for (const std::string& name : peer.untried) {
    peer.notes.push_back(absl::StrCat(name, ": ranks below the route taken"));
  }
  peer.untried.clear();
  base::log_event(base::LogLevel::kInfo, "%s: peer up: %s", self.name, explain(peer));
  inbox.push_event({PeerEvent::Kind::kUp, peer.id(), peer.name, absl::OkStatus(), peer.uid});
}

void WorkerCore::handshake_refused(std::string_view who, const absl::Status& why) {
  ++stats.handshakes_refused;
  // Somebody who hangs up is a port scanner or a health check; a wrong key is for people to fix.
  // Who calls again and again must not fill the disk.
  // Who calls for a session that is over here has not heard a goodbye that was lost with its rail.
  const bool gave_up = absl::IsUnavailable(why) || absl::IsAborted(why);
  const Time now = clock.now();
  const bool quiet = gave_up || now < refusals_quiet_until;
  if (!quiet) refusals_quiet_until = now + std::chrono::seconds(1);
  base::log_event(quiet ? base::LogLevel::kDebug : base::LogLevel::kWarning,
                  "%s: refused %s: %s (%u refused so far)", self.name, who, why.message(),
                  stats.handshakes_refused);
}

void WorkerCore::rail_down(Rail& rail, absl::Status why) {
  Peer* peer = peers.of(rail);
  if (peer == nullptr) return;
  for (size_t i = 0; i < peer->rails.size(); ++i) {
    if (peer->rails[i].rail.get() != &rail) continue;
    const uint32_t moved = peer->rails[i].moved;
    note_counted(*peer, peer->rails[i].link, rail);
    if (peer->state != PeerState::kDown) lost_rail(*peer, peer->rails[i].link).gone = true;
    const bool closed = absl::IsAborted(why);
    if (closed) peer->goodbye = std::string(why.message());
    closing.free_later(std::move(peer->rails[i].rail));
    peer->rails.erase(peer->rails.begin() + static_cast<ptrdiff_t>(i));
    if (peer->state == PeerState::kDown) return;  // we are closing all of them
    if (peer->lost_rails.size() > kMostLostRails) {
      why = absl::AbortedError("the peer does not say what had come over rails that were lost");
      for (const RailState& state : peer->rails) {
        closing.close_later(peer->id(), state.rail.get(), why);
      }
    }
    if (peer->rails.empty()) {
      if (absl::IsUnavailable(why) && peer->goodbye.empty()) return peer_lost(*peer, why);
      return peer_down(*peer, peer->goodbye.empty() ? why : absl::AbortedError(peer->goodbye));
    }
    if (closed) {
      // The others will follow. Where word of that is lost with one, who waits for the peer's word
      // finds out by asking.
      const bool waits =
          std::any_of(peer->lost_rails.begin(), peer->lost_rails.end(),
                      [](const LostRail& lost) { return lost.gone && !lost.unsettled.empty(); });
      if (waits && !answering) ask_about_lost_rails(*peer);
      return;
    }
    ++stats.rails_lost;
    around_lost(*peer, rail);
    peer->rail_lost = std::string(why.message());
    base::log_event(base::LogLevel::kWarning,
                    "%s: lost a rail to %s: %s (%s); %u slices go on over the %u that are left",
                    self.name, peer->name, why.message(), rail.properties().route, moved,
                    peer->rails.size());
    ask_again(*peer);
    if (!answering) ask_about_lost_rails(*peer);
    look_for_better(*peer);
    return;
  }
}

void WorkerCore::peer_down(Peer& peer, const absl::Status& why) {
  if (peer.state == PeerState::kDown) return;
  const bool was_up = peer.state == PeerState::kUp || peer.state == PeerState::kReconnecting;
  if (peer.state == PeerState::kUp) --stats.peers_up;
  note_parted(peer, why);
  peers.set_state(peer, PeerState::kDown);
  peer.why = why.ok() ? absl::UnavailableError("the connection was closed") : why;
  // Why a rail went is for the worker; to its callers, the peer is gone.
  if (absl::IsAborted(why) || absl::IsDataLoss(why) || absl::IsNotFound(why)) {
    peer.why = absl::UnavailableError(why.message());
  }
  if (peer.parting) peer.why = peer.parting->why;
  sessions.erase(peer.session);
  base::log_event(base::LogLevel::kInfo, "%s: peer %s: %s: %s", self.name,
                  was_up ? "down" : "not reached", peer.name, peer.why.message());
  transfers.stop_waiting(peer, peer.why);
  for (const TransferId id : std::exchange(peer.around.waiting, {})) {
    if (stands_aside(id)) transfers.stop(id.slot, TransferState::kFailed, peer.why);
  }
  settle_all(peer, peer.why);
  outbox.drop_messages(peer);
  inbox.peer_down(peer);
  if (staging != nullptr) staging->peer_down(peer.id());
  peer.arrivals = {};
  peer.fenced = {};
  peer.back = {};
  peer.around = {};
  peer.counted = {};
  inbox.push_event({PeerEvent::Kind::kDown, peer.id(), peer.name, peer.why, peer.uid});
}

void WorkerCore::close_rails(Peer& peer, const absl::Status& why) {
  while (!peer.rails.empty()) {
    const size_t before = peer.rails.size();
    peer.rails.back().rail->close(why, *this);
    if (peer.rails.size() == before) {  // it will report later: do not wait for it
      closing.free_later(std::move(peer.rails.back().rail));
      peer.rails.pop_back();
    }
  }
}

void WorkerCore::disconnect(Peer& peer, const absl::Status& why) {
  if (peer.state == PeerState::kDown) return;
  // Slices that come back must not be posted to the next rail, so the peer goes down first.
  peer_down(peer, why);
  // Not lost: the peer is told not to call again.
  close_rails(peer, absl::IsUnavailable(why) ? absl::CancelledError(why.message()) : why);
}

// It may take the row of one that is down, which is forgotten.
Peer* WorkerCore::add_peer() {
  Peer* peer = peers.add();
  if (peer != nullptr && peer->generation > 1) {
    inbox.forget_events(*peer);
  }
  return peer;
}

std::string WorkerCore::explain(const Peer& peer) const {
  if (peer.state == PeerState::kConnecting) {
    return absl::StrCat(peer.name, ": connecting by ", peer.route);
  }
  if (peer.state == PeerState::kReconnecting) {
    return absl::StrCat(peer.name, ": lost, and being called again: ", peer.why.message());
  }
  if (peer.state == PeerState::kDown) {
    return absl::StrCat(peer.name, ": down: ", peer.why.message());
  }
  std::vector<std::string> routes;
  std::vector<std::string> notes = peer.notes;
  for (const RailState& state : peer.rails) {
    std::string route = state.rail->properties().route;
    if (const std::string more = state.rail->about_devices(); !more.empty()) {
      absl::StrAppend(&route, ", ", more);
    }
    const bool used = state.rank == peer.rails.front().rank;
    const bool around = !used && !peer.around.passed.empty();
    if (around) {
      absl::StrAppend(&route, ": for memory that ", peer.around.passed,
                      " does not reach: ", peer.around.why);
    } else if (!used) {
      route += ": kept for when that is lost";
    }
    std::vector<std::string>& list = used ? routes : notes;
    if (std::find(list.begin(), list.end(), route) == list.end()) list.push_back(std::move(route));
  }
  if (!peer.rail_lost.empty()) {
    notes.push_back(absl::StrCat("the last rail that was lost: ", peer.rail_lost));
  }
  if (staging != nullptr) {
    if (std::string staged = staging->explain(peer.id()); !staged.empty())
      notes.push_back(std::move(staged));
  }
  std::string out = absl::StrCat(peer.name, ": ", absl::StrJoin(routes, " + "));
  if (!notes.empty()) absl::StrAppend(&out, " [", absl::StrJoin(notes, "; "), "]");
  return out;
}

}  // namespace baton::internal
