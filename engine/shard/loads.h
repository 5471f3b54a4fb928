// Loads that every rank makes, of a KvConnector or of a TierStore: what rank 0 and the other ranks
// keep of them. One is here when it is here at every rank, and has failed when it has at one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "engine/shard/commands.h"
#include "engine/shard/leader.h"
#include "transport/clock.h"

namespace baton::engine::shard {

struct FollowedLoad {
  uint64_t number = 0;  // the source's
  bool told = false;    // rank 0 knows that it is complete or will not be
  bool ended = false;
};
using FollowedLoads = absl::flat_hash_map<uint64_t, FollowedLoad>;  // by rank 0's number

// At the other ranks: notes what has become of them. The source's cache has `layers`.
template <typename Source>
void follow_loads(Source& source, uint32_t layers, FollowedLoads& loads,
                  std::deque<Event>& events) {
  absl::erase_if(loads, [&](auto& entry) {
    const uint64_t id = entry.first;
    FollowedLoad& load = entry.second;
    if (load.ended) {
      if (!source.end_load(load.number)) return false;
      events.push_back({EventKind::kLoadQuiet, id});
      return true;
    }
    if (load.told) return false;
    if (source.layers_loaded(load.number) >= layers) {
      events.push_back({EventKind::kLoaded, id});
      load.told = true;
    } else if (absl::Status status = source.load_status(load.number); !status.ok()) {
      events.push_back({EventKind::kLoadFailed, id, std::move(status)});
      load.told = true;
    }
    return false;
  });
}

// What a follower says, for people.
inline absl::Status said_by(size_t follower, const absl::Status& why) {
  return absl::Status(why.code(), absl::StrCat("rank ", follower + 1, ": ", why.message()));
}

// At rank 0, by the numbers that all ranks know. When the group fails, loads fail with it and have
// ended at the other ranks.
template <typename Source>
class RanksLoads {
 public:
  struct Load {
    uint64_t own = 0;  // the number of rank 0's source
    size_t here = 0;   // followers that have it
    size_t quiet = 0;  // followers where it has ended
    bool ending = false;
    bool own_quiet = false;
    absl::Status failure;
  };
  // Both must outlive it.
  RanksLoads(Leader& leader, Source& own) : leader_(leader), own_(own) {}

  bool empty() const { return loads_.empty(); }
  void start(uint64_t id, uint64_t own) { loads_[id].own = own; }
  Load* find(uint64_t id) {
    const auto it = loads_.find(id);
    return it == loads_.end() ? nullptr : &it->second;
  }
  void hear(size_t follower, const Event& event) {
    Load* load = find(event.id);
    if (load == nullptr) return;
    load->here += event.kind == EventKind::kLoaded ? 1 : 0;
    load->quiet += event.kind == EventKind::kLoadQuiet ? 1 : 0;
    if (event.kind == EventKind::kLoadFailed && load->failure.ok()) {
      load->failure = said_by(follower, event.why);
    }
  }
  // All of the layers, or none: no step waits for a layer, for the ranks would have to stop waiting
  // together.
  uint32_t layers_loaded(uint64_t id, uint32_t layers) {
    const Load* load = find(id);
    if (load == nullptr || load->here < leader_.about_followers().size()) return 0;
    return own_.layers_loaded(load->own) >= layers ? layers : 0;
  }
  absl::Status status(uint64_t id) {
    const Load* load = find(id);
    if (load == nullptr) return absl::NotFoundError(absl::StrCat("there is no load ", id));
    if (absl::Status status = leader_.status(); !status.ok()) return status;
    return load->failure.ok() ? own_.load_status(load->own) : load->failure;
  }
  // Calls `tell_followers` the first time. True when it has ended everywhere, and is forgotten.
  template <typename Tell>
  bool end(uint64_t id, Tell tell_followers) {
    Load* load = find(id);
    if (load == nullptr) return true;
    if (!std::exchange(load->ending, true)) tell_followers();
    if (!load->own_quiet) load->own_quiet = own_.end_load(load->own);
    if (!load->own_quiet || !leader_.everywhere(load->quiet)) return false;
    loads_.erase(id);
    return true;
  }

 private:
  Leader& leader_;
  Source& own_;
  absl::flat_hash_map<uint64_t, Load> loads_;
};

}  // namespace baton::engine::shard
