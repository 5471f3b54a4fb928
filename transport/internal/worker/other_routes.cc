// Calls peers over other routes than the one in use.
#include "transport/internal/worker/other_routes.h"

#include <algorithm>
#include <climits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "transport/base/log.h"
#include "transport/internal/worker/core.h"

namespace baton::internal {
namespace {

constexpr Time kLongestFailbackPause = std::chrono::minutes(1);
constexpr Time kAtOnce = std::chrono::seconds(1);

}  // namespace

// A rail that none of our providers made ranks with the best.
int OtherRoutes::rank_of(const Rail& rail) const {
  for (const auto& provider : core_.providers) {
    const Capabilities& can = provider->capabilities();
    if (can.name == rail.properties().provider) return can.rank;
  }
  return INT_MAX;
}

void OtherRoutes::add_rail(Peer& peer, RailState state) {
  state.rank = rank_of(*state.rail);
  const bool better = !peer.rails.empty() && state.rank > peer.rails.front().rank;
  // In the same order at both sides, however they came up: what one sends over its first rail the
  // other answers there.
  const auto worse =
      std::find_if(peer.rails.begin(), peer.rails.end(), [&](const RailState& other) {
        return other.rank < state.rank || (other.rank == state.rank && other.link > state.link);
      });
  const auto at = peer.rails.insert(worse, std::move(state));
  if (!better) return;
  // What was said of it is over.
  const std::string& by = at->rail->properties().provider;
  std::erase_if(peer.notes, [&](const std::string& note) {
    return absl::StartsWith(note, absl::StrCat(by, ":"));
  });
  // As loud as the loss was, if there was one.
  base::log_event(peer.rail_lost.empty() ? base::LogLevel::kInfo : base::LogLevel::kWarning,
                  "%s: %s is reached over %s again: %s", core_.self.name, peer.name, by,
                  core_.sessions.explain(peer));
}

std::vector<std::string> OtherRoutes::better_routes(const Peer& peer) const {
  std::vector<std::string> better;
  if (peer.rails.empty()) return better;
  const int best = peer.rails.front().rank;
  const bool any =
      std::any_of(core_.providers.begin(), core_.providers.end(),
                  [&](const auto& provider) { return provider->capabilities().rank > best; });
  if (!any) return better;
  std::vector<std::string> unheard;
  for (auto& [rank, name] : core_.routes.rank_routes(peer, peer.require, unheard)) {
    const auto& refused = peer.back.refused;
    if (rank > best && std::find(refused.begin(), refused.end(), name) == refused.end()) {
      better.push_back(std::move(name));
    }
  }
  return better;
}

void OtherRoutes::look_for_better(Peer& peer) {
  Failback& back = peer.back;
  if (!peer.dialled || failback_ == Time::zero() || peer.state != PeerState::kUp) return;
  const bool wanted = !better_routes(peer).empty();
  if (!wanted) {
    if (std::exchange(back.wanted, false)) back.regained_at = core_.clock.now();
    back.call_at = kNever;
    return;
  }
  if (!std::exchange(back.wanted, true)) {
    // A route that comes and goes is redialled less and less often.
    const bool held = core_.clock.now() - back.regained_at >= kLongestFailbackPause;
    if (held || back.pause == Time::zero()) back.pause = failback_;
    back.told = false;
  }
  if (!back.calling && back.call_at == kNever) call_better_later(peer);
}

void OtherRoutes::call_better_later(Peer& peer) {
  Failback& back = peer.back;
  back.untried.clear();
  back.call_at = core_.clock.now() + back.pause;
  back.pause = std::min(2 * back.pause, std::max(kLongestFailbackPause, failback_));
  core_.sessions.set_timer(peer);
}

void OtherRoutes::call_better(Peer& peer) {
  Failback& back = peer.back;
  back.call_at = kNever;
  if (peer.around.calling) return call_better_later(peer);
  if (back.untried.empty()) back.untried = better_routes(peer);
  if (back.untried.empty()) return look_for_better(peer);
  back.route = back.untried.front();
  back.untried.erase(back.untried.begin());
  back.calling = true;
  core_.routes.dial(peer, back.route, Resume::kOurs);
}

void OtherRoutes::better_failed(Peer& peer, const absl::Status& why) {
  Failback& back = peer.back;
  if (peer.state != PeerState::kUp) return;  // it is called over every provider now
  // A refused call would be refused again.
  if (absl::IsPermissionDenied(why) || absl::IsFailedPrecondition(why)) {
    back.refused.push_back(back.route);
  }
  base::log_event(std::exchange(back.told, true) ? base::LogLevel::kDebug : base::LogLevel::kInfo,
                  "%s: %s is reached over %s; over %s it does not answer again yet: %s",
                  core_.self.name, peer.name, peer.rails.front().rail->properties().provider,
                  back.route, why.message());
  if (!back.untried.empty()) return call_better(peer);
  look_for_better(peer);
  call_around(peer);
}

void OtherRoutes::stand_aside(Peer& peer, uint32_t index) {
  Around& around = peer.around;
  const TransferDescriptor& d = core_.slots[index].descriptor;
  const Rail& best = *peer.rails.front().rail;
  if (around.passed != best.properties().provider) {
    around.passed = best.properties().provider;
    around.why = std::string(best.reaches(d.remote).message());
    base::log_event(base::LogLevel::kInfo, "%s: %s: another route for a region of %u bytes: %s",
                    core_.self.name, peer.name, d.remote.size, around.why);
  }
  core_.dispatcher.dequeue(peer, index);
  // The list keeps transfers that were stopped while they waited.
  if (around.waiting.size() >= 2 * core_.slots.capacity()) {
    std::erase_if(around.waiting, [this](TransferId id) { return !stands_aside(id); });
  }
  around.waiting.push_back(d.id);
  call_around(peer);
}

bool OtherRoutes::stands_aside(TransferId id) {
  const TransferSlot* slot = core_.slots.find(id);
  return slot != nullptr && slot->verdict == TransferState::kActive && !slot->queued;
}

// The worker makes one extra call to a peer at a time: the end of a call names its session, not its
// provider.
void OtherRoutes::call_around(Peer& peer) {
  Around& around = peer.around;
  if (around.waiting.empty() || around.calling || peer.back.calling || peer.state != PeerState::kUp)
    return;
  if (around.untried.empty()) {
    around.notes.clear();
    // The provider that a caller chose is its own choice and binds only the caller.
    const std::string& require = peer.dialled ? peer.require : core_.options.require;
    for (auto& route : core_.routes.rank_routes(peer, require, around.notes)) {
      std::string& name = route.second;
      const bool there = std::any_of(
          peer.rails.begin(), peer.rails.end(),
          [&](const RailState& state) { return state.rail->properties().provider == name; });
      if (there) continue;
      if (std::find(around.refused.begin(), around.refused.end(), name) == around.refused.end()) {
        around.untried.push_back(std::move(name));
      } else {
        around.notes.push_back(absl::StrCat(name, ": the peer closes it"));
      }
    }
  }
  if (around.untried.empty()) return give_up_around(peer);
  around.route = around.untried.front();
  around.untried.erase(around.untried.begin());
  around.calling = true;
  core_.routes.dial(peer, around.route, peer.dialled ? Resume::kOurs : Resume::kTheirs);
}

void OtherRoutes::around_failed(Peer& peer, const absl::Status& why) {
  Around& around = peer.around;
  around.notes.push_back(absl::StrCat(around.route, ": ", why.message()));
  if (peer.state != PeerState::kUp)
    return around.untried.clear();  // the worker calls it over every provider now
  if (around.untried.empty()) return give_up_around(peer);
  call_around(peer);
}

void OtherRoutes::give_up_around(Peer& peer) {
  Around& around = peer.around;
  const absl::Status why = absl::FailedPreconditionError(
      absl::StrCat(around.why, ". No other route does: ", absl::StrJoin(around.notes, "; ")));
  stop_waiting(peer, why);
}

void OtherRoutes::stop_waiting(Peer& peer, const absl::Status& why) {
  for (const TransferId id : std::exchange(peer.around.waiting, {})) {
    if (stands_aside(id)) core_.transfers.stop(id.slot, TransferState::kFailed, why);
  }
}

OtherRoutes::Answer OtherRoutes::answered(Peer& peer, const Rail& rail) {
  const bool better = peer.rails.empty() || rank_of(rail) > peer.rails.front().rank;
  const Answer answer{
      better && std::exchange(peer.back.calling, false),
      rail.properties().provider == peer.around.route && std::exchange(peer.around.calling, false)};
  if (answer.around) peer.around.up_at = core_.clock.now();
  return answer;
}

void OtherRoutes::lost_again(Peer& peer, Answer answer, const absl::Status& why) {
  if (answer.better && peer.state == PeerState::kUp) call_better_later(peer);
  if (answer.around) around_failed(peer, why);
}

// Whether the call that failed was one of these.
bool OtherRoutes::failed(Peer& peer, const absl::Status& why) {
  if (std::exchange(peer.back.calling, false)) {
    better_failed(peer, why);
  } else if (std::exchange(peer.around.calling, false)) {
    around_failed(peer, why);
  } else {
    return false;
  }
  return true;
}

// A rail of the last call was lost. A peer that refuses the provider (require) closes such a rail
// at once, every time.
void OtherRoutes::around_lost(Peer& peer, const Rail& rail) {
  Around& around = peer.around;
  const std::string& by = rail.properties().provider;
  if (by == around.route && around.up_at != kNever && core_.clock.now() - around.up_at < kAtOnce) {
    around.refused.push_back(by);
  }
}

// A rail has come up. A transfer whose region it does not reach either stands aside again.
void OtherRoutes::come_around(Peer& peer) {
  for (const TransferId id : std::exchange(peer.around.waiting, {})) {
    if (stands_aside(id)) core_.dispatcher.enqueue(peer, id.slot);
  }
}

}  // namespace baton::internal
