// Replicas of training state: copied to the next rank, agreed on, restored from.
#include "engine/train/replica.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace baton::engine::train {
namespace {

bool holds(const Holdings& holdings, bool own, int64_t steps) {
  const size_t at = own ? 0 : 2;
  return holdings[at] == steps || holdings[at + 1] == steps;
}

}  // namespace

Holdings holdings_of(const ReplicaStore& store) {
  const auto& [a, b] = store.copies;
  return {a.own_steps, b.own_steps, a.peer_steps, b.peer_steps};
}

int64_t newest_common(absl::Span<const Holdings> ranks) {
  int64_t newest = ReplicaStore::kNothing;
  for (const Holdings& some : ranks) {
    for (int64_t steps : some) {
      if (steps <= newest) continue;
      bool everybody = true;
      for (size_t r = 0; r < ranks.size(); ++r) {
        everybody &=
            holds(ranks[r], true, steps) || holds(ranks[(r + 1) % ranks.size()], false, steps);
      }
      if (everybody) newest = steps;
    }
  }
  return newest;
}

Replicator::Replicator(Communicator& comm, Trainer& trainer, ReplicaStore& store)
    : comm_(comm), trainer_(trainer), store_(store) {
  trainer_.before_update([this] { return complete(); });
}

absl::Status Replicator::begin(int64_t steps) {
  if (absl::Status status = complete(); !status.ok()) return status;
  ReplicaStore::Copy& copy = store_.copies[store_.next];
  store_.next = 1 - store_.next;
  copy.own_steps = copy.peer_steps = ReplicaStore::kNothing;
  if (absl::Status status = trainer_.save(steps, copy.own); !status.ok()) return status;
  copy.own_steps = steps;
  const size_t count = copy.own.values.size();
  if (copy.peer.size() != count) copy.peer = AlignedArray<float>(count);
  const int ranks = comm_.ranks(), next = (comm_.rank() + 1) % ranks;
  const int previous = (comm_.rank() + ranks - 1) % ranks;
  const Time now = Clock::steady().now();
  const size_t bytes = count * sizeof(float);
  sending_ =
      trainer_.calls()->add(comm_.send_async(copy.own.values.data(), count, DataType::kF32, next),
                            now, absl::StrCat("copy to rank ", next), bytes);
  receiving_ =
      trainer_.calls()->add(comm_.receive_async(copy.peer.data(), count, DataType::kF32, previous),
                            now, absl::StrCat("copy of rank ", previous), bytes);
  under_way_ = &copy;
  return trainer_.calls()->status();
}

absl::Status Replicator::complete() {
  if (under_way_ == nullptr) return absl::OkStatus();
  for (CallTracker::Id call : {sending_, receiving_}) {
    if (absl::Status status = trainer_.calls()->wait(call); !status.ok()) return status;
  }
  under_way_->peer_steps = under_way_->own_steps;
  under_way_ = nullptr;
  return absl::OkStatus();
}

absl::StatusOr<int64_t> Replicator::restore() {
  const Holdings mine = holdings_of(store_);
  const auto ranks = static_cast<size_t>(comm_.ranks());
  const auto rank = static_cast<size_t>(comm_.rank());
  std::vector<Holdings> all(ranks);
  absl::Status status = comm_.all_gather(mine.data(), all.data(), mine.size(), DataType::kI64);
  if (!status.ok()) return status;
  const int64_t steps = newest_common(all);
  if (steps == ReplicaStore::kNothing) return steps;

  // This rank returns the kept state to the rank before it.
  const size_t previous = (rank + ranks - 1) % ranks;
  const auto find = [&](int64_t ReplicaStore::Copy::*what) {
    return std::find_if(store_.copies.begin(), store_.copies.end(),
                        [&](const ReplicaStore::Copy& copy) { return copy.*what == steps; });
  };
  Work sending;
  if (!holds(all[previous], true, steps)) {
    const AlignedArray<float>& kept = find(&ReplicaStore::Copy::peer_steps)->peer;
    absl::StatusOr<Work> work =
        comm_.send_async(kept.data(), kept.size(), DataType::kF32, static_cast<int>(previous));
    if (!work.ok()) return work.status();
    sending = *work;
  }
  auto own = find(&ReplicaStore::Copy::own_steps);
  if (own == store_.copies.end()) {
    own = store_.copies.begin();
    // For its pieces and size: the values come from the next rank.
    if (status = trainer_.save(steps, own->own); !status.ok()) return status;
    status = comm_.receive(own->own.values.data(), own->own.values.size(), DataType::kF32,
                           static_cast<int>((rank + 1) % ranks));
    if (!status.ok()) return status;
    own->own_steps = steps;
  }
  if (sending.sequence != 0) {
    if (status = comm_.wait(sending); !status.ok()) return status;
  }
  if (status = trainer_.load(own->own); !status.ok()) return status;
  if (status = trainer_.gather_weights(); !status.ok()) return status;
  // The copies of a replaced rank are gone; that of these steps must not be overwritten by the
  // next.
  store_.next = own == store_.copies.begin() ? 1 : 0;
  if (status = begin(steps); !status.ok()) return status;
  return steps;
}

}  // namespace baton::engine::train
