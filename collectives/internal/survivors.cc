// The survivors' ballots: each sends its list of lost ranks until all lists are equal.
#include "collectives/internal/survivors.h"

#include "absl/strings/str_format.h"

namespace baton::collectives::internal {
namespace {

// A rank that has not voted after so long is stopped.
constexpr Time kVotingTime = std::chrono::seconds(3);

}  // namespace

// A ballot: one byte per rank ('1' lost).
void Survivors::on_ballot(uint32_t from, std::string_view body) {
  if (body.size() != mesh_.ranks()) return;
  ballots_[from] = std::string(body);
  for (uint32_t r = 0; r < mesh_.ranks(); ++r) {
    if (body[r] == '1' && r != mesh_.rank()) failure_.mark_lost(r);
  }
  failure_.fail(absl::AbortedError(mesh_.member(from).label + " shrinks the group"), from);
}

std::string Survivors::lost(bool late) {
  std::string out(mesh_.ranks(), '0');
  for (uint32_t r = 0; r < mesh_.ranks(); ++r) {
    if (r == mesh_.rank()) continue;
    const Mesh::Member& member = mesh_.member(r);
    if (member.process->down && member.process->parted) mesh_.endpoint().want(*member.process);
    const bool gone = member.process->down || member.process->goodbye || member.bye;
    if (gone || (late && ballots_[r].empty())) failure_.mark_lost(r);
    if (failure_.lost()[r]) out[r] = '1';
  }
  return out;
}

absl::StatusOr<std::vector<int>> Survivors::agree(EndpointImpl::Lock& lock) {
  const uint32_t rank = mesh_.rank();
  const uint32_t ranks = mesh_.ranks();
  EndpointImpl& endpoint = mesh_.endpoint();
  failure_.fail(absl::AbortedError(absl::StrFormat("rank %u shrinks the group", rank)), rank);
  for (uint32_t r = 0; r < ranks; ++r) {
    if (r != rank && !failure_.lost()[r]) endpoint.want(*mesh_.member(r).process);
  }
  std::string cast;
  std::vector<bool> told(ranks);
  const Time begin = mesh_.now();
  while (true) {
    const uint64_t ticket = endpoint.nap_ticket();
    const bool moved = endpoint.tick();
    const std::string mine = lost(mesh_.now() - begin > kVotingTime);
    if (mine != cast) {
      cast = mine;
      told.assign(ranks, false);
    }
    std::vector<int> left;
    bool agreed = true;
    for (uint32_t r = 0; r < ranks; ++r) {
      if (mine[r] == '1') continue;
      left.push_back(static_cast<int>(r));
      if (r == rank) continue;
      if (!told[r] && mesh_.member(r).up()) {
        mesh_.tell(r, ControlMessage::kBallot, cast);
        mesh_.worker().progress();
        told[r] = true;
      }
      agreed &= told[r] && ballots_[r] == mine;
    }
    if (agreed) return left;
    if (mesh_.now() - begin > options_.start_timeout) {
      return absl::DeadlineExceededError("the survivors could not agree on which ranks are left");
    }
    lock.unlock();
    if (!moved) endpoint.nap(std::chrono::milliseconds(2), ticket);
    lock.lock();
  }
}

}  // namespace baton::collectives::internal
