// What waits: for room at the worker, by peer, where one that takes nothing holds up what is its
// own; and for its time.
#pragma once

#include <algorithm>
#include <cstdint>
#include <deque>
#include <set>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "transport/clock.h"

namespace baton::kvtransfer {

template <typename T>
class KvWaiting {
 public:
  // Whether something of this peer waits: what comes next waits behind it.
  bool has(uint64_t peer) const {
    const auto at = queues_.find(peer);
    return at != queues_.end() && !at->second.empty();
  }
  void add(uint64_t peer, T item) { queues_[peer].push_back(std::move(item)); }

  // Lets `go(item)` have the oldest of each peer, in turns, until it returns false: there is no
  // room for this peer, the item stays. True if any went. `go` may call erase_if().
  template <typename Go>
  bool go_on(Go&& go) {
    if (queues_.empty()) return false;
    bool any = false;
    std::vector<uint64_t> peers;
    for (const auto& [peer, queue] : queues_) peers.push_back(peer);
    // The last of all slots is not always the same one's.
    const auto first = static_cast<ptrdiff_t>(turn_++ % peers.size());
    std::rotate(peers.begin(), peers.begin() + first, peers.end());
    while (!peers.empty()) {
      std::erase_if(peers, [&](uint64_t peer) {
        const bool went = one(peer, go);
        any |= went;
        return !went;
      });
    }
    return any;
  }
  template <typename Gone>
  void erase_if(uint64_t peer, const Gone& gone) {
    if (const auto at = queues_.find(peer); at != queues_.end()) std::erase_if(at->second, gone);
  }

 private:
  template <typename Go>
  bool one(uint64_t peer, const Go& go) {
    const auto at = queues_.find(peer);
    if (at->second.empty()) {
      queues_.erase(at);
      return false;
    }
    // Taken out first: where it fails, the queue may be emptied.
    T item = std::move(at->second.front());
    at->second.pop_front();
    if (go(item)) return true;
    queues_[peer].push_front(std::move(item));
    return false;
  }

  absl::flat_hash_map<uint64_t, std::deque<T>> queues_;
  uint64_t turn_ = 0;
};

// What is to be looked at when: of many, only those whose time has come are.
template <typename Key>
class KvDue {
 public:
  // At `time`, and no other; kNever: at none.
  void set(const Key& key, Time time) {
    if (time == kNever) return erase(key);
    Time& known = times_.try_emplace(key, kNever).first->second;
    if (known == time) return;
    if (known != kNever) order_.erase({known, key});
    known = time;
    order_.emplace(time, key);
  }
  void erase(const Key& key) {
    const auto at = times_.find(key);
    if (at == times_.end()) return;
    order_.erase({at->second, key});
    times_.erase(at);
  }
  Time first() const { return order_.empty() ? kNever : order_.begin()->first; }
  // Takes those whose time has come.
  std::vector<Key> take(Time now) {
    std::vector<Key> due;
    while (!order_.empty() && order_.begin()->first <= now) {
      due.push_back(order_.begin()->second);
      times_.erase(due.back());
      order_.erase(order_.begin());
    }
    return due;
  }

 private:
  std::set<std::pair<Time, Key>> order_;
  absl::flat_hash_map<Key, Time> times_;
};

}  // namespace baton::kvtransfer
