// Going on without the lost: the survivors agree on who is left and meet anew.
#include <algorithm>

#include "absl/strings/str_format.h"
#include "collectives/communicator_impl.h"

namespace baton {

using collectives::Mail;
using collectives::RendezvousServer;

namespace {

// A rank that is connected and has not voted after so long is stopped.
constexpr Time kVoting = std::chrono::seconds(3);

// A ballot: one byte per rank ('1' lost), then the address where its sender would serve.
std::string_view lost_of(const std::string& ballot, uint32_t ranks) {
  return std::string_view(ballot).substr(0, ranks);
}

}  // namespace

void Communicator::Impl::on_ballot(Member& member, std::string_view body) {
  if (body.size() < ranks) return;
  ballots[rank_of(member)] = std::string(body);
  for (uint32_t r = 0; r < ranks; ++r) {
    if (body[r] == '1' && r != rank) members[r].lost = true;
  }
  if (broken.ok()) {
    fail(absl::AbortedError(member.label + " shrinks the group"), rank_of(member), true);
  }
}

absl::StatusOr<std::unique_ptr<Communicator>> Communicator::Impl::shrink() {
  absl::StatusOr<ClusterKey> key = options.worker.key
                                       ? absl::StatusOr<ClusterKey>(*options.worker.key)
                                       : ClusterKey::for_this_user();
  if (!key.ok()) return key.status();
  CommunicatorOptions next = options;
  {
    std::lock_guard lock(mutex);
    if (broken.ok())
      fail(absl::AbortedError(absl::StrFormat("rank %u shrinks the group", rank)), rank, true);
    absl::StatusOr<std::unique_ptr<RendezvousServer>> own =
        RendezvousServer::start(*key, options.worker.listen_host, 0, 0);
    if (!own.ok()) return own.status();
    std::string cast;
    const Time begin = now();
    while (true) {
      if (!worker->progress()) nap(std::chrono::milliseconds(2));
      drain();
      const bool late = now() - begin > kVoting;
      std::string mine(ranks, '0');
      for (uint32_t r = 0; r < ranks; ++r) {
        Member& member = members[r];
        if (r == rank) continue;
        if (!member.up || (late && ballots[r].empty())) member.lost = true;
        if (member.lost) mine[r] = '1';
      }
      if (mine != lost_of(cast, ranks)) {
        cast = mine + (*own)->address();
        tell_all(Mail::kShrink, cast);
      }
      bool agreed = true;
      uint32_t first = rank;
      std::vector<uint32_t> left;
      for (uint32_t r = 0; r < ranks; ++r) {
        if (mine[r] == '1') continue;
        first = std::min(first, r);
        left.push_back(r);
        if (r != rank && lost_of(ballots[r], ranks) != mine) agreed = false;
      }
      if (now() - begin > options.start_timeout) {
        return absl::DeadlineExceededError("the survivors could not agree on who is left");
      }
      if (!agreed) continue;
      next.rank = static_cast<int>(std::find(left.begin(), left.end(), rank) - left.begin());
      next.ranks = static_cast<int>(left.size());
      next.generation = 0;
      next.rendezvous = first == rank ? (*own)->address() : ballots[first].substr(ranks);
      if (first == rank) server = *std::move(own);
      break;
    }
  }
  return Communicator::create(next);
}

}  // namespace baton
