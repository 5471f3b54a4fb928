// Calls peers.
#include "transport/internal/worker/routes.h"

#include <algorithm>
#include <cstring>

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

bool Routes::is_address(std::string_view target) {
  return target.substr(0, kAddressPrefix.size()) == kAddressPrefix;
}

// A number that no other worker is likely to begin with.
void Routes::start(const WorkerUid& uid) {
  std::memcpy(&next_session_, uid.bytes.data(), sizeof next_session_);
}

absl::StatusOr<std::string> Routes::look_up(const std::string& host_port) const {
  absl::StatusOr<std::string> found =
      absl::UnavailableError("no provider of this worker can look up host:port");
  for (const auto& provider : core_.providers) {
    found = provider->look_up(host_port);
    if (!absl::IsUnimplemented(found.status())) break;
  }
  return found;
}

absl::StatusOr<PeerId> Routes::connect(std::string_view target, const std::string& found,
                                       std::string_view need) {
  Peer* peer = core_.sessions.add_peer();
  if (peer == nullptr) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("all %u peers are in use: disconnect some", PeerTable::kMost));
  }
  peer->dialled = true;
  peer->require = need.empty() ? core_.options.require : std::string(need);
  core_.peers.set_name(*peer, target.substr(0, 64));
  if (is_address(target)) {
    auto decoded = Address::decode(target);
    if (!decoded.ok()) {
      core_.sessions.peer_down(*peer, decoded.status());
      return decoded.status();
    }
    peer->address = *std::move(decoded);
    plan_routes(*peer);
    return peer->id();
  }
  // host:port: the worker behind it tells its whole address, and so which better routes there are.
  absl::Status status = absl::UnavailableError("no provider of this worker can look up host:port");
  for (auto& provider : core_.providers) {
    const uint64_t session = next_session_++;
    status = provider->query(session, found);
    if (absl::IsUnimplemented(status)) continue;
    if (!status.ok()) break;
    sessions_[session] = peer->id();
    peer->route = provider->capabilities().name;
    return peer->id();
  }
  core_.sessions.peer_down(*peer, status);
  return status;
}

Peer* Routes::peer_of_session(uint64_t session) {
  const auto found = sessions_.find(session);
  return found == sessions_.end() ? nullptr : core_.peers.find(found->second);
}

void Routes::resolved(uint64_t session, absl::StatusOr<std::string> encoded, std::string_view at) {
  Peer* peer = peer_of_session(session);
  sessions_.erase(session);
  if (peer == nullptr || peer->state != PeerState::kConnecting) return;
  absl::StatusOr<Address> decoded =
      encoded.ok() ? Address::decode(*encoded) : absl::StatusOr<Address>(encoded.status());
  if (!decoded.ok()) {
    core_.sessions.peer_down(*peer, decoded.status());
    return;
  }
  peer->address = *std::move(decoded);
  note_called(*peer, std::string(at));
  plan_routes(*peer);
}

void Routes::note_called(const Peer& peer, const std::string& at) {
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
  if (called_.size() >= kMostCalled) called_.clear();
  called_[peer.address.uid.bytes] = {by->first, at};
}

// The address at which the peer answered `provider`'s query; "" if it was not queried.
std::string Routes::called_at(const Peer& peer, std::string_view provider) const {
  const auto found = called_.find(peer.address.uid.bytes);
  return found != called_.end() && found->second.provider == provider ? found->second.at : "";
}

// The providers that both sides have, the best first, with their ranks; and why the others are out.
std::vector<std::pair<int, std::string>> Routes::rank_routes(
    const Peer& peer, const std::string& require, std::vector<std::string>& notes) const {
  std::vector<std::pair<int, std::string>> ranked;
  for (auto& provider : core_.providers) {
    const Capabilities& can = provider->capabilities();
    std::string note;
    const auto theirs = std::find_if(peer.address.providers.begin(), peer.address.providers.end(),
                                     [&](const auto& entry) { return entry.first == can.name; });
    if (!require.empty() && can.name != require) {
      note = absl::StrCat("not wanted (require=", require, ")");
    } else if (!can.available) {
      note = can.detail;
    } else if (theirs == peer.address.providers.end()) {
      note = absl::StrCat("peer is not listening on ", can.name);
      if (!why_on_request(can.name).empty()) note += " (on request only: enable it there too)";
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
  for (const std::string& note : provider_notes_) notes.push_back(note);
  std::sort(ranked.begin(), ranked.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  });
  return ranked;
}

void Routes::plan_routes(Peer& peer) {
  core_.peers.set_name(peer, peer.address.name);
  peer.uid = peer.address.uid;
  for (auto& [rank, name] : rank_routes(peer, peer.require, peer.notes)) {
    peer.untried.push_back(name);
  }
  try_next_route(peer);
}

void Routes::try_next_route(Peer& peer) {
  const bool again = peer.state == PeerState::kReconnecting;
  if (peer.untried.empty()) {
    if (again) return core_.sessions.round_over(peer);
    core_.sessions.peer_down(
        peer, absl::UnavailableError(absl::StrFormat(
                  "no route to %s%s. %s", peer.name,
                  peer.require.empty() ? std::string()
                                       : absl::StrFormat(" (only %s is allowed)", peer.require),
                  absl::StrJoin(peer.notes, "; "))));
    return;
  }
  peer.route = peer.untried.front();
  peer.untried.erase(peer.untried.begin());
  if (!again) core_.peers.set_session(peer, next_session_++);
  dial(peer, peer.route, !again ? Resume::kNew : peer.dialled ? Resume::kOurs : Resume::kTheirs);
}

void Routes::dial(Peer& peer, const std::string& by, Resume resume) {
  ConnectRequest request{.session = peer.session, .resume = resume};
  for (const auto& [theirs, where] : peer.address.providers) {
    if (theirs == by) request.address = where;
  }
  request.expected.uid = peer.address.uid;
  request.expected.name = peer.address.name;
  request.called = called_at(peer, by);
  sessions_[request.session] = peer.id();
  for (auto& provider : core_.providers) {
    if (provider->capabilities().name == by) return provider->connect(request);
  }
}

void Routes::connect_failed(uint64_t session, const absl::Status& why) {
  Peer* peer = peer_of_session(session);
  // A session that was up keeps its number: another call for it may still be under way.
  if (peer == nullptr || peer->state == PeerState::kConnecting) sessions_.erase(session);
  if (peer == nullptr || peer->session != session) return;
  if (core_.other_routes.failed(*peer, why)) return;
  if (!peer->rails.empty()) return;
  const bool again = peer->state == PeerState::kReconnecting;
  if (peer->state != PeerState::kConnecting && !again) return;
  peer->notes.push_back(absl::StrCat(peer->route, ": ", why.message()));
  base::log_event(base::LogLevel::kInfo, "%s: no route to %s by %s: %s", core_.self.name,
                  peer->name, peer->route, why.message());
  // A wrong key or version will not get better on another route; nor by calling again.
  const bool refused = absl::IsPermissionDenied(why) || absl::IsFailedPrecondition(why);
  if (refused) peer->untried.clear();
  if (again) {
    if (refused) {
      peer->redial.hopeless = absl::StrCat("called again, it refused: ", why.message());
    } else if (absl::IsNotFound(why)) {
      peer->redial.hopeless = "no worker listens at its address any more";
      peer->redial.gone = true;
    }
    return try_next_route(*peer);
  }
  if (peer->untried.empty() && peer->notes.size() == 1) {
    core_.sessions.peer_down(*peer, why);
  } else {
    try_next_route(*peer);
  }
}

}  // namespace baton::internal
