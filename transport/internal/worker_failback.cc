// Better routes than those in use.
//
// A peer may be up over a worse provider than both sides have: the better one was lost, or did not
// answer when the peer was met. It is called again, by the side that called first, with pauses that
// grow. When it answers, its rails join the session: slices go to them from then on, those that the
// other rails have end there, and those rails stay for when the better one is lost again.
#include <algorithm>
#include <climits>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "transport/base/log.h"
#include "transport/internal/worker_impl.h"

namespace baton {
namespace {

constexpr Time kLongestFailbackPause = std::chrono::minutes(1);

}  // namespace

// One that nobody here has made is as good as any.
int Worker::Impl::rank_of(const Rail& rail) const {
  for (const auto& provider : providers) {
    const Capabilities& can = provider->capabilities();
    if (can.name == rail.properties().provider) return can.rank;
  }
  return INT_MAX;
}

void Worker::Impl::add_rail(internal::Peer& peer, internal::RailState state) {
  state.rank = rank_of(*state.rail);
  const bool better = !peer.rails.empty() && state.rank > peer.rails.front().rank;
  // In the same order at both sides, however they came up: what one sends over its first rail the
  // other answers there.
  const auto worse =
      std::find_if(peer.rails.begin(), peer.rails.end(), [&](const internal::RailState& other) {
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

std::vector<std::string> Worker::Impl::better_routes(const internal::Peer& peer) const {
  std::vector<std::string> better;
  if (peer.rails.empty()) return better;
  const int best = peer.rails.front().rank;
  const bool any = std::any_of(providers.begin(), providers.end(), [&](const auto& provider) {
    return provider->capabilities().rank > best;
  });
  if (!any) return better;
  std::vector<std::string> unheard;
  for (auto& [rank, name] : rank_routes(peer, unheard)) {
    const auto& refused = peer.back.refused;
    if (rank > best && std::find(refused.begin(), refused.end(), name) == refused.end()) {
      better.push_back(std::move(name));
    }
  }
  return better;
}

// To be called when rails have come or gone.
void Worker::Impl::look_for_better(internal::Peer& peer) {
  internal::Failback& back = peer.back;
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

void Worker::Impl::call_better_later(internal::Peer& peer) {
  internal::Failback& back = peer.back;
  back.untried.clear();
  back.call_at = clock.now() + back.pause;
  back.pause = std::min(2 * back.pause, std::max(kLongestFailbackPause, failback));
  set_timer(peer);
}

void Worker::Impl::call_better(internal::Peer& peer) {
  internal::Failback& back = peer.back;
  back.call_at = kNever;
  if (back.untried.empty()) back.untried = better_routes(peer);
  if (back.untried.empty()) return look_for_better(peer);
  back.route = back.untried.front();
  back.untried.erase(back.untried.begin());
  back.calling = true;
  dial(peer, back.route, Resume::kOurs);
}

void Worker::Impl::better_failed(internal::Peer& peer, const absl::Status& why) {
  internal::Failback& back = peer.back;
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
}

}  // namespace baton
