// The survivors' ballots: who is lost, sent around until all say the same.
#include "collectives/internal/survivors.h"

#include <algorithm>

#include "absl/strings/str_format.h"
#include "transport/net/endpoint.h"

namespace baton::collectives::internal {
namespace {

// A rank that is connected and has not voted after so long is stopped.
constexpr Time kVotingTime = std::chrono::seconds(3);

// A ballot: one byte per rank ('1' lost), then the address where its sender would serve.
std::string_view lost_of(const std::string& ballot, uint32_t ranks) {
  return std::string_view(ballot).substr(0, ranks);
}

}  // namespace

void Survivors::on_ballot(uint32_t from, std::string_view body) {
  if (body.size() < mesh_.ranks()) return;
  ballots_[from] = std::string(body);
  for (uint32_t r = 0; r < mesh_.ranks(); ++r) {
    if (body[r] == '1' && r != mesh_.rank()) failure_.mark_lost(r);
  }
  failure_.fail(absl::AbortedError(mesh_.member(from).label + " shrinks the group"), from, true);
}

std::string Survivors::lost(bool late) {
  std::string out(mesh_.ranks(), '0');
  for (uint32_t r = 0; r < mesh_.ranks(); ++r) {
    if (r == mesh_.rank()) continue;
    if (!mesh_.member(r).up || (late && ballots_[r].empty())) failure_.mark_lost(r);
    if (failure_.lost()[r]) out[r] = '1';
  }
  return out;
}

absl::StatusOr<CommunicatorOptions> Survivors::agree() {
  absl::StatusOr<ClusterKey> key = options_.worker.key
                                       ? absl::StatusOr<ClusterKey>(*options_.worker.key)
                                       : ClusterKey::for_this_user();
  if (!key.ok()) return key.status();
  const uint32_t rank = mesh_.rank();
  const uint32_t ranks = mesh_.ranks();
  failure_.fail(absl::AbortedError(absl::StrFormat("rank %u shrinks the group", rank)), rank, true);
  absl::StatusOr<std::unique_ptr<RendezvousServer>> own = RendezvousServer::start(
      *key, options_.worker.listen_host, 0, 0, net::hosts_of(options_.worker.advertise));
  if (!own.ok()) return own.status();
  std::string cast;
  const Time begin = mesh_.now();
  while (true) {
    if (!mesh_.worker().progress()) mesh_.nap(std::chrono::milliseconds(2));
    mesh_.drain();
    const std::string mine = lost(mesh_.now() - begin > kVotingTime);
    if (mine != lost_of(cast, ranks)) {
      cast = mine + (*own)->address();
      mesh_.tell_all(ControlMessage::kBallot, cast);
    }
    std::vector<uint32_t> left;
    bool agreed = true;
    for (uint32_t r = 0; r < ranks; ++r) {
      if (mine[r] == '1') continue;
      left.push_back(r);
      if (r != rank && lost_of(ballots_[r], ranks) != mine) agreed = false;
    }
    if (mesh_.now() - begin > options_.start_timeout) {
      return absl::DeadlineExceededError("the survivors could not agree on which ranks are left");
    }
    if (!agreed) continue;
    CommunicatorOptions next = options_;
    next.rank = static_cast<int>(std::find(left.begin(), left.end(), rank) - left.begin());
    next.ranks = static_cast<int>(left.size());
    next.generation = 0;
    const uint32_t first = left.front();
    next.rendezvous = first == rank ? (*own)->address() : ballots_[first].substr(ranks);
    if (first == rank) server_ = *std::move(own);
    return next;
  }
}

}  // namespace baton::collectives::internal
