// Peers come up, lose rails and go down.
#include "transport/internal/worker/sessions.h"

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

void Sessions::connected(uint64_t session, const HelloInfo& info, std::unique_ptr<Rail> rail) {
  Peer* peer = core_.routes.peer_of_session(session);
  if (peer == nullptr || peer->state == PeerState::kDown || peer->session != session) {
    return core_.closing.close_now(std::move(rail),
                                   absl::CancelledError("this connection is no longer wanted"));
  }
  const OtherRoutes::Answer answer = core_.other_routes.answered(*peer, *rail);
  if (!LostRails::fenced(*peer, info.link)) return peer_up(*peer, info, std::move(rail));
  core_.other_routes.lost_again(*peer, answer, absl::UnavailableError(kFenced));
  core_.closing.close_now(std::move(rail), absl::UnavailableError(kFenced));
  // It answers; it has lost this rail only. If that was the only one of this call, there is
  // another.
  if (peer->state != PeerState::kReconnecting) return;
  peer->redial.hopeless.clear();
  round_over(*peer);
}

void Sessions::refuse(const HelloInfo& info, std::unique_ptr<Rail> rail, const absl::Status& why) {
  core_.closing.close_now(std::move(rail), why);
  handshake_refused(info.name, why);
}

void Sessions::accepted(const HelloInfo& info, std::unique_ptr<Rail> rail) {
  // Called again, the other way round: a session that we had chosen.
  const bool dialled = info.resume == Resume::kTheirs;
  Peer* peer = core_.peers.of_session(info.uid, info.session, dialled);
  if (peer != nullptr) {
    if (peer->state == PeerState::kDown) {
      return refuse(info, std::move(rail), absl::AbortedError("this session is over here"));
    }
    if (LostRails::fenced(*peer, info.link))
      return core_.closing.close_now(std::move(rail), absl::UnavailableError(kFenced));
    const std::string& by = rail->properties().provider;
    if (peer->dialled && !peer->require.empty() && by != peer->require) {
      return core_.closing.close_now(std::move(rail),
                                     absl::UnavailableError(absl::StrFormat(
                                         "%s is not wanted here (require=%s)", by, peer->require)));
    }
    return peer_up(*peer, info, std::move(rail));
  }
  // It resumes what was never begun here: its first call was lost after its last word, before we
  // had heard that. Not if the session may have been here: what had landed in it would land twice.
  const bool never_begun =
      info.resume == Resume::kOurs && core_.peers.size() <= core_.peers.kRemembered;
  if (info.resume != Resume::kNew && !never_begun) {
    return refuse(info, std::move(rail), absl::AbortedError("this session is over here"));
  }
  if (core_.inbox.left_behind() > kMostLeftBehind) {
    return refuse(info, std::move(rail),
                  absl::ResourceExhaustedError("this worker's program does not read its "
                                               "notifications, and holds too many already"));
  }
  peer = add_peer();
  if (peer == nullptr) {
    return refuse(info, std::move(rail),
                  absl::ResourceExhaustedError(
                      core_.inbox.left_behind() == 0
                          ? "this worker has no room for more peers"
                          : "this worker has no room for more peers while its program "
                            "does not read the notifications of those that have gone"));
  }
  peer->uid = info.uid;
  core_.peers.set_session(*peer, info.session);
  // The address to redial, for the provider that the peer chose.
  absl::StatusOr<Address> home = Address::decode(info.address);
  if (home.ok() && home->uid == info.uid) peer->address = *std::move(home);
  peer->require = rail->properties().provider;
  peer_up(*peer, info, std::move(rail));
}

void Sessions::peer_up(Peer& peer, const HelloInfo& info, std::unique_ptr<Rail> rail) {
  peer.uid = info.uid;
  core_.peers.set_name(peer, info.name);
  peer.protocol = info.protocol;
  rail->worker_tag = PeerTable::tag_of(peer.id());
  auto* const prompt = dynamic_cast<PromptRail*>(rail.get());
  if (prompt != nullptr) core_.transfers.note_prompt_rail();
  core_.other_routes.add_rail(peer, {.rail = std::move(rail), .link = info.link, .prompt = prompt});
  core_.other_routes.come_around(peer);
  if (peer.state == PeerState::kUp) return core_.other_routes.look_for_better(peer);
  const bool again = peer.state == PeerState::kReconnecting;
  core_.peers.set_state(peer, PeerState::kUp);
  core_.dispatcher.make_ready(peer);
  if (core_.staging != nullptr) core_.staging->peer_up();
  ++core_.stats.peers_up;
  core_.other_routes.look_for_better(peer);
  if (again) return peer_resumed(peer);
  for (const std::string& name : peer.untried) {
    peer.notes.push_back(absl::StrCat(name, ": available; ", peer.route, " preferred"));
  }
  peer.untried.clear();
  base::log_event(base::LogLevel::kInfo, "%s: peer up: %s", core_.self.name, explain(peer));
  core_.inbox.push_event({PeerEvent::Kind::kUp, peer.id(), peer.name, absl::OkStatus(), peer.uid});
}

void Sessions::handshake_refused(std::string_view caller, const absl::Status& why) {
  ++core_.stats.handshakes_refused;
  // A caller that hangs up is a port scanner or a health check; a wrong key is for people to fix.
  // A caller that asks for a session that is over here missed a goodbye that was lost with its
  // rail. Repeated calls must not fill the disk.
  const bool gave_up = absl::IsUnavailable(why) || absl::IsAborted(why);
  const Time now = core_.clock.now();
  const bool quiet = gave_up || now < refusals_quiet_until_;
  if (!quiet) refusals_quiet_until_ = now + std::chrono::seconds(1);
  base::log_event(quiet ? base::LogLevel::kDebug : base::LogLevel::kWarning,
                  "%s: refused %s: %s (%u refused so far)", core_.self.name, caller, why.message(),
                  core_.stats.handshakes_refused);
}

void Sessions::rail_down(Rail& rail, absl::Status why) {
  Peer* peer = core_.peers.of(rail);
  if (peer == nullptr) return;
  for (size_t i = 0; i < peer->rails.size(); ++i) {
    if (peer->rails[i].rail.get() != &rail) continue;
    const uint32_t moved = peer->rails[i].moved;
    LostRails::note_counted(*peer, peer->rails[i].link, rail);
    if (peer->state != PeerState::kDown)
      LostRails::lost_rail(*peer, peer->rails[i].link).gone = true;
    const bool closed = absl::IsAborted(why);
    if (closed) peer->goodbye = std::string(why.message());
    core_.closing.free_later(std::move(peer->rails[i].rail));
    peer->rails.erase(peer->rails.begin() + static_cast<ptrdiff_t>(i));
    if (peer->state == PeerState::kDown) return;  // we are closing all of them
    if (peer->lost_rails.size() > kMostLostRails) {
      why = absl::AbortedError("the peer does not say what had come over rails that were lost");
      for (const RailState& state : peer->rails) {
        core_.closing.close_later(peer->id(), state.rail.get(), why);
      }
    }
    if (peer->rails.empty()) {
      if (absl::IsUnavailable(why) && peer->goodbye.empty()) return peer_lost(*peer, why);
      return peer_down(*peer, peer->goodbye.empty() ? why : absl::AbortedError(peer->goodbye));
    }
    if (closed) {
      // The others will follow. A transfer that waits for the peer's answer asks, should the
      // goodbye be lost with a rail.
      const bool waits =
          std::any_of(peer->lost_rails.begin(), peer->lost_rails.end(),
                      [](const LostRail& lost) { return lost.gone && !lost.unsettled.empty(); });
      if (waits && !core_.lost_rails.answering()) core_.lost_rails.ask_about_lost_rails(*peer);
      return;
    }
    ++core_.stats.rails_lost;
    core_.other_routes.around_lost(*peer, rail);
    peer->rail_lost = std::string(why.message());
    const size_t left = peer->rails.size();
    const char* const plural = left == 1 ? "" : "s";
    base::log_event(base::LogLevel::kWarning, "%s: lost a rail to %s: %s (%s); %s", core_.self.name,
                    peer->name, why.message(), rail.properties().route,
                    moved == 0 ? absl::StrFormat("no work to move; %u connection%s remain%s", left,
                                                 plural, left == 1 ? "s" : "")
                               : absl::StrFormat("moves %u slices to the %u remaining connection%s",
                                                 moved, left, plural));
    core_.lost_rails.ask_again(*peer);
    if (!core_.lost_rails.answering()) core_.lost_rails.ask_about_lost_rails(*peer);
    core_.other_routes.look_for_better(*peer);
    return;
  }
}

void Sessions::peer_down(Peer& peer, const absl::Status& why) {
  if (peer.state == PeerState::kDown) return;
  const bool was_up = peer.state == PeerState::kUp || peer.state == PeerState::kReconnecting;
  if (peer.state == PeerState::kUp) --core_.stats.peers_up;
  note_parted(peer, why);
  core_.peers.set_state(peer, PeerState::kDown);
  peer.why = why.ok() ? absl::UnavailableError("the connection was closed") : why;
  // Why a rail went is for the worker; to its callers, the peer is gone.
  if (absl::IsAborted(why) || absl::IsDataLoss(why) || absl::IsNotFound(why)) {
    peer.why = absl::UnavailableError(why.message());
  }
  if (peer.parting) peer.why = peer.parting->why;
  core_.routes.forget_session(peer.session);
  base::log_event(base::LogLevel::kInfo, "%s: peer %s: %s: %s", core_.self.name,
                  was_up ? "down" : "not reached", peer.name, peer.why.message());
  core_.transfers.stop_waiting(peer, peer.why);
  core_.other_routes.stop_waiting(peer, peer.why);
  core_.lost_rails.settle_all(peer, peer.why);
  core_.outbox.drop_messages(peer);
  core_.inbox.peer_down(peer);
  if (core_.staging != nullptr) core_.staging->peer_down(peer.id());
  peer.arrivals = {};
  peer.fenced = {};
  peer.back = {};
  peer.around = {};
  peer.counted = {};
  core_.inbox.push_event({PeerEvent::Kind::kDown, peer.id(), peer.name, peer.why, peer.uid});
}

void Sessions::close_rails(Peer& peer, const absl::Status& why) {
  while (!peer.rails.empty()) {
    const size_t before = peer.rails.size();
    peer.rails.back().rail->close(why, core_);
    if (peer.rails.size() == before) {  // it will report later: do not wait for it
      core_.closing.free_later(std::move(peer.rails.back().rail));
      peer.rails.pop_back();
    }
  }
}

void Sessions::disconnect(Peer& peer, const absl::Status& why) {
  if (peer.state == PeerState::kDown) return;
  // Slices that come back must not be posted to the next rail, so the peer goes down first.
  peer_down(peer, why);
  // Not lost: the peer is told not to call again.
  close_rails(peer, absl::IsUnavailable(why) ? absl::CancelledError(why.message()) : why);
}

// May reuse the row of a peer that is down; that peer is then forgotten.
Peer* Sessions::add_peer() {
  Peer* peer = core_.peers.add();
  if (peer != nullptr && peer->generation > 1) core_.inbox.forget_events(*peer);
  return peer;
}

std::string Sessions::explain(const Peer& peer) const {
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
  if (core_.staging != nullptr) {
    if (std::string staged = core_.staging->explain(peer.id()); !staged.empty())
      notes.push_back(std::move(staged));
  }
  std::string out = absl::StrCat(peer.name, ": ", absl::StrJoin(routes, " + "));
  if (!notes.empty()) absl::StrAppend(&out, " [", absl::StrJoin(notes, "; "), "]");
  return out;
}

}  // namespace baton::internal
