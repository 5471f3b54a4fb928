// How a worker reaches a peer: what was asked for, which routes there are, in what order they are
// tried, and what became of each.
#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "transport/base/log.h"
#include "transport/internal/worker/core.h"

namespace baton::internal {
namespace {
constexpr std::string_view kAddressPrefix = "baton1:";
constexpr size_t kMostCalled = 1 << 16;  // workers of which is kept where they answered
}  // namespace

bool WorkerCore::is_address(std::string_view target) {
  return target.substr(0, kAddressPrefix.size()) == kAddressPrefix;
}

absl::StatusOr<std::string> WorkerCore::look_up(const std::string& host_port) const {
  absl::StatusOr<std::string> found =
      absl::UnavailableError("no provider here can look up host:port");
  for (const auto& provider : providers) {
    found = provider->look_up(host_port);
    if (!absl::IsUnimplemented(found.status())) break;
  }
  return found;
}

absl::StatusOr<PeerId> WorkerCore::connect(std::string_view target, const std::string& found,
                                           std::string_view need) {
  Peer* peer = add_peer();
  if (peer == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("all %u peers are in use: disconnect some", PeerTable::kMost));
  }
  peer->dialled = true;
  peer->require = need.empty() ? options.require : std::string(need);
  peers.set_name(*peer, target.substr(0, 64));
  if (is_address(target)) {
    auto decoded = Address::decode(target);
    if (!decoded.ok()) {
      peer_down(*peer, decoded.status());
      return decoded.status();
    }
    peer->address = *std::move(decoded);
    plan_routes(*peer);
    return peer->id();
  }
  // host:port: the worker behind it tells its whole address, and so which better routes there are.
  absl::Status status = absl::UnavailableError("no provider here can look up host:port");
  for (auto& provider : providers) {
    const uint64_t session = next_session++;
    status = provider->query(session, found);
    if (absl::IsUnimplemented(status)) continue;
    if (!status.ok()) break;
    sessions[session] = peer->id();
    peer->route = provider->capabilities().name;
    return peer->id();
  }
  peer_down(*peer, status);
  return status;
}

void WorkerCore::resolved(uint64_t session, absl::StatusOr<std::string> encoded,
                          std::string_view at) {
  auto it = sessions.find(session);
  Peer* peer = it == sessions.end() ? nullptr : find_peer(it->second);
  sessions.erase(session);
  if (peer == nullptr || peer->state != PeerState::kConnecting) return;
  absl::StatusOr<Address> decoded =
      encoded.ok() ? Address::decode(*encoded) : absl::StatusOr<Address>(encoded.status());
  if (!decoded.ok()) {
    peer_down(*peer, decoded.status());
    return;
  }
  peer->address = *std::move(decoded);
  note_called(*peer, std::string(at));
  plan_routes(*peer);
}

void WorkerCore::note_called(const Peer& peer, const std::string& at) {
  const size_t colon = at.rfind(':');
  if (colon == std::string::npos) return;
  // The listener that has the port that was called. Behind a published port its own is another:
  // that of the provider by which it was asked, then.
  const std::string end = at.substr(colon) + ",";
  const auto& theirs = peer.address.providers;
  auto by = std::find_if(theirs.begin(), theirs.end(), [&](const auto& entry) {
    return absl::StrContains(entry.second + ",", end);
  });
  if (by == theirs.end()) {
    by = std::find_if(theirs.begin(), theirs.end(),
                      [&](const auto& entry) { return entry.first == peer.route; });
  }
  if (by == theirs.end()) return;
  if (called.size() >= kMostCalled) called.clear();
  called[peer.address.uid.bytes] = {by->first, at};
}

// Where the peer answered when it was asked for its address by `provider`; "": it was not.
std::string WorkerCore::called_at(const Peer& peer, std::string_view provider) const {
  const auto found = called.find(peer.address.uid.bytes);
  return found != called.end() && found->second.provider == provider ? found->second.at : "";
}

// The providers that both sides have, the best first, with their ranks; and why the others are out.
std::vector<std::pair<int, std::string>> WorkerCore::rank_routes(
    const Peer& peer, const std::string& require, std::vector<std::string>& notes) const {
  std::vector<std::pair<int, std::string>> ranked;
  for (auto& provider : providers) {
    const Capabilities& can = provider->capabilities();
    std::string note;
    const auto theirs = std::find_if(peer.address.providers.begin(), peer.address.providers.end(),
                                     [&](const auto& entry) { return entry.first == can.name; });
    if (!require.empty() && can.name != require) {
      note = absl::StrCat("not wanted (require=", require, ")");
    } else if (!can.available) {
      note = can.detail;
    } else if (theirs == peer.address.providers.end()) {
      note = "the peer does not have it";
      if (!why_on_request(can.name).empty()) note += ", unless it is asked for there too";
    } else if (absl::Status status = provider->reachable(
                   theirs->second, called_at(peer, can.name).empty() ? peer.address.host_id : "");
               !status.ok()) {
      note = std::string(status.message());
    } else {
      ranked.emplace_back(can.rank, can.name);
      continue;
    }
    notes.push_back(absl::StrCat(can.name, ": ", note));
  }
  for (const std::string& note : provider_notes) notes.push_back(note);
  std::sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  });
  return ranked;
}

void WorkerCore::plan_routes(Peer& peer) {
  peers.set_name(peer, peer.address.name);
  peer.uid = peer.address.uid;
  for (auto& [rank, name] : rank_routes(peer, peer.require, peer.notes)) {
    peer.untried.push_back(name);
  }
  try_next_route(peer);
}

void WorkerCore::try_next_route(Peer& peer) {
  const bool again = peer.state == PeerState::kReconnecting;
  if (peer.untried.empty()) {
    if (again) return round_over(peer);
    peer_down(peer,
              absl::UnavailableError(absl::StrFormat(
                  "no route to %s%s. %s", peer.name,
                  peer.require.empty() ? std::string()
                                       : absl::StrFormat(" (only %s is allowed)", peer.require),
                  absl::StrJoin(peer.notes, "; "))));
    return;
  }
  peer.route = peer.untried.front();
  peer.untried.erase(peer.untried.begin());
  if (!again) peers.set_session(peer, next_session++);
  dial(peer, peer.route, !again ? Resume::kNew : peer.dialled ? Resume::kOurs : Resume::kTheirs);
}

void WorkerCore::dial(Peer& peer, const std::string& by, Resume resume) {
  ConnectRequest request{.session = peer.session, .resume = resume};
  for (const auto& [theirs, where] : peer.address.providers) {
    if (theirs == by) request.address = where;
  }
  request.expected.uid = peer.address.uid;
  request.expected.name = peer.address.name;
  request.called = called_at(peer, by);
  sessions[request.session] = peer.id();
  for (auto& provider : providers) {
    if (provider->capabilities().name == by) return provider->connect(request);
  }
}

void WorkerCore::connect_failed(uint64_t session, absl::Status why) {
  auto it = sessions.find(session);
  Peer* peer = it == sessions.end() ? nullptr : find_peer(it->second);
  // A session that was up keeps its number: another call for it may still be under way.
  if (peer == nullptr || peer->state == PeerState::kConnecting) sessions.erase(session);
  if (peer == nullptr || peer->session != session) return;
  if (std::exchange(peer->back.calling, false)) return better_failed(*peer, why);
  if (std::exchange(peer->around.calling, false)) return around_failed(*peer, why);
  if (!peer->rails.empty()) return;
  const bool again = peer->state == PeerState::kReconnecting;
  if (peer->state != PeerState::kConnecting && !again) return;
  peer->notes.push_back(absl::StrCat(peer->route, ": ", why.message()));
  base::log_event(base::LogLevel::kInfo, "%s: no route to %s by %s: %s", self.name, peer->name,
                  peer->route, why.message());
  // A wrong key or version will not get better on another route; nor by calling again.
  const bool refused = absl::IsPermissionDenied(why) || absl::IsFailedPrecondition(why);
  if (refused) peer->untried.clear();
  if (again) {
    if (refused) {
      peer->redial.hopeless = absl::StrCat("called again, it refused: ", why.message());
    } else if (absl::IsNotFound(why)) {
      peer->redial.hopeless = "nobody lives at its address any more";
      peer->redial.gone = true;
    }
    return try_next_route(*peer);
  }
  if (peer->untried.empty() && peer->notes.size() == 1) {
    peer_down(*peer, why);
  } else {
    try_next_route(*peer);
  }
}

}  // namespace baton::internal
