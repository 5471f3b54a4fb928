// The gathering: the ranks that have come to a rendezvous, and the answer to each. It does no I/O:
// a server feeds it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "collectives/launch/rendezvous_wire.h"
#include "transport/clock.h"

namespace baton::launch {

// Gathers one generation after the other. Times are those of one clock, the caller's.
class Gathering {
 public:
  using ConnectionId = uint64_t;  // by the caller's number
  // A message to send over a connection, after which its rank is no longer here.
  struct Answer {
    ConnectionId connection;
    std::shared_ptr<const std::vector<std::string>> messages;
  };

  // `ranks` 0: every attempt takes the number that the first rank to come expects.
  explicit Gathering(uint32_t ranks) : fixed_ranks_(ranks), ranks_(ranks) {}

  // A rank has shown its info. Appends an answer for each rank that need not wait any longer.
  void join(ConnectionId connection, const Join& join, Time now, std::vector<Answer>& answers);
  // Closes the rendezvous: ranks that wait and ranks that come later get Cancelled and `why`.
  void close(const std::string& why, std::vector<Answer>& answers);
  // A rank has hung up; it may come again.
  void leave(ConnectionId connection);
  // Gives up if a rank's patience has ended.
  void expire(Time now, std::vector<Answer>& answers);
  // The time at which expire() has work; kNever: no rank waits, or all wait without a limit.
  Time deadline() const;

  // The connection that waits as this info's rank in its generation; nullptr: none.
  const ConnectionId* waiting_as(const collectives::RankInfo& info) const;
  // The generation that the next group will have: one above the last that has met.
  uint64_t next_generation() const { return next_; }

 private:
  struct Waiting {
    ConnectionId connection = 0;
    collectives::RankInfo info;
    Time deadline = kNever;
  };

  absl::Status check(const collectives::RankInfo& info) const;
  void refuse_all(const absl::Status& why, std::vector<Answer>& answers);

  const uint32_t fixed_ranks_;
  uint32_t ranks_;     // of the waiting ranks
  uint64_t next_ = 0;  // lower generations are over; the waiting ranks are of this one
  std::map<uint32_t, Waiting> waiting_;  // by rank
  std::string last_failure_;             // of an earlier attempt at this generation
  absl::Status closed_;                  // not OK: why no rank can meet
};

inline constexpr uint32_t kMostRanks = 1 << 16;

// "1, 3-7, 9", cut short after a few.
std::string list_ranks(const std::vector<uint32_t>& ascending);

}  // namespace baton::launch
