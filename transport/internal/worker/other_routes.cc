// Other routes than the one in use: better ones, and ways around one that does not reach some
// region.
//
// A peer may be up over a worse provider than both sides have: the better one was lost, or did not
// answer when the peer was met. It is called again, by the side that called first, with pauses that
// grow. When it answers, its rails join the session: slices go to them from then on, those that the
// other rails have end there, and those rails stay for when the better one is lost again.
//
// The best rails of a peer may reach most of its memory and not all: shm without CMA reaches pools
// alone. A transfer of such a region goes over the best rail that reaches it. Where none does the
// transfer stands aside, so that others pass, while the peer is called over the worse providers
// that both sides have, one by one.
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

// One that nobody here has made is as good as any.
int WorkerCore::rank_of(const Rail& rail) const {
  for (const auto& provider : providers) {
    const Capabilities& can = provider->capabilities();
    if (can.name == rail.properties().provider) return can.rank;
  }
  return INT_MAX;
}

void WorkerCore::add_rail(Peer& peer, RailState state) {
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
                  "%s: %s is reached over %s again: %s", self.name, peer.name, by, explain(peer));
}

std::vector<std::string> WorkerCore::better_routes(const Peer& peer) const {
  std::vector<std::string> better;
  if (peer.rails.empty()) return better;
  const int best = peer.rails.front().rank;
  const bool any = std::any_of(providers.begin(), providers.end(), [&](const auto& provider) {
    return provider->capabilities().rank > best;
  });
  if (!any) return better;
  std::vector<std::string> unheard;
  for (auto& [rank, name] : rank_routes(peer, peer.require, unheard)) {
    const auto& refused = peer.back.refused;
    if (rank > best && std::find(refused.begin(), refused.end(), name) == refused.end()) {
      better.push_back(std::move(name));
    }
  }
  return better;
}

// To be called when rails have come or gone.
void WorkerCore::look_for_better(Peer& peer) {
  Failback& back = peer.back;
  if (!peer.dialled || failback == Time::zero() || peer.state != PeerState::kUp) return;
  const bool wanted = !better_routes(peer).empty();
  if (!wanted) {
    if (std::exchange(back.wanted, false)) back.regained_at = clock.now();
    back.call_at = kNever;
    return;
  }
  if (!std::exchange(back.wanted, true)) {
    // One that comes and goes is called less and less.
    const bool held = clock.now() - back.regained_at >= kLongestFailbackPause;
    if (held || back.pause == Time::zero()) back.pause = failback;
    back.told = false;
  }
  if (!back.calling && back.call_at == kNever) call_better_later(peer);
}

void WorkerCore::call_better_later(Peer& peer) {
  Failback& back = peer.back;
  back.untried.clear();
  back.call_at = clock.now() + back.pause;
  back.pause = std::min(2 * back.pause, std::max(kLongestFailbackPause, failback));
  set_timer(peer);
}

void WorkerCore::call_better(Peer& peer) {
  Failback& back = peer.back;
  back.call_at = kNever;
  if (peer.around.calling) return call_better_later(peer);
  if (back.untried.empty()) back.untried = better_routes(peer);
  if (back.untried.empty()) return look_for_better(peer);
  back.route = back.untried.front();
  back.untried.erase(back.untried.begin());
  back.calling = true;
  dial(peer, back.route, Resume::kOurs);
}

void WorkerCore::better_failed(Peer& peer, const absl::Status& why) {
  Failback& back = peer.back;
  if (peer.state != PeerState::kUp) return;  // it is called over every provider now
  // What was refused will be refused again.
  if (absl::IsPermissionDenied(why) || absl::IsFailedPrecondition(why)) {
    back.refused.push_back(back.route);
  }
  base::log_event(std::exchange(back.told, true) ? base::LogLevel::kDebug : base::LogLevel::kInfo,
                  "%s: %s is reached over %s; over %s it does not answer again yet: %s", self.name,
                  peer.name, peer.rails.front().rail->properties().provider, back.route,
                  why.message());
  if (!back.untried.empty()) return call_better(peer);
  look_for_better(peer);
  call_around(peer);
}

void WorkerCore::stand_aside(Peer& peer, uint32_t index) {
  Around& around = peer.around;
  const TransferDescriptor& d = slots[index].descriptor;
  const Rail& best = *peer.rails.front().rail;
  if (around.passed != best.properties().provider) {
    around.passed = best.properties().provider;
    around.why = std::string(best.reaches(d.remote).message());
    base::log_event(base::LogLevel::kInfo, "%s: %s: another route for a region of %u bytes: %s",
                    self.name, peer.name, d.remote.size, around.why);
  }
  dispatcher.dequeue(peer, index);
  // The list keeps transfers that were stopped while they waited.
  if (around.waiting.size() >= 2 * slots.capacity()) {
    std::erase_if(around.waiting, [this](TransferId id) { return !stands_aside(id); });
  }
  around.waiting.push_back(d.id);
  call_around(peer);
}

bool WorkerCore::stands_aside(TransferId id) {
  const TransferSlot* slot = slots.find(id);
  return slot != nullptr && slot->verdict == TransferState::kActive && !slot->queued;
}

// The worker makes one extra call to a peer at a time: the end of a call names its session, not its
// provider.
void WorkerCore::call_around(Peer& peer) {
  Around& around = peer.around;
  if (around.waiting.empty() || around.calling || peer.back.calling || peer.state != PeerState::kUp)
    return;
  if (around.untried.empty()) {
    around.notes.clear();
    // The provider that a caller chose is its own choice and binds only the caller.
    const std::string& require = peer.dialled ? peer.require : options.require;
    for (auto& route : rank_routes(peer, require, around.notes)) {
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
  dial(peer, around.route, peer.dialled ? Resume::kOurs : Resume::kTheirs);
}

void WorkerCore::around_failed(Peer& peer, const absl::Status& why) {
  Around& around = peer.around;
  around.notes.push_back(absl::StrCat(around.route, ": ", why.message()));
  if (peer.state != PeerState::kUp)
    return around.untried.clear();  // the worker calls it over every provider now
  if (around.untried.empty()) return give_up_around(peer);
  call_around(peer);
}

void WorkerCore::give_up_around(Peer& peer) {
  Around& around = peer.around;
  const absl::Status why = absl::FailedPreconditionError(
      absl::StrCat(around.why, ". No other route does: ", absl::StrJoin(around.notes, "; ")));
  for (const TransferId id : std::exchange(around.waiting, {})) {
    if (stands_aside(id)) transfers.stop(id.slot, TransferState::kFailed, why);
  }
}

// A rail of the last call was lost. A peer that refuses the provider (require) closes such a rail
// at once, every time.
void WorkerCore::around_lost(Peer& peer, const Rail& rail) {
  Around& around = peer.around;
  const std::string& by = rail.properties().provider;
  if (by == around.route && around.up_at != kNever && clock.now() - around.up_at < kAtOnce) {
    around.refused.push_back(by);
  }
}

// A rail has come up. A transfer whose region it does not reach either stands aside again.
void WorkerCore::come_around(Peer& peer) {
  for (const TransferId id : std::exchange(peer.around.waiting, {})) {
    if (stands_aside(id)) dispatcher.enqueue(peer, id.slot);
  }
}

}  // namespace baton::internal
