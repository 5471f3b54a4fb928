// Rails that are closed, or freed, once the provider that is being called has returned.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "transport/internal/tables/peer_table.h"
#include "transport/provider.h"

namespace baton::internal {

class ClosingRails {
 public:
  ClosingRails(PeerTable& peers, EventSink& sink) : peers_(peers), sink_(sink) {}

  // The rail's peer misbehaves.
  void close_later(PeerId peer, const Rail* rail, absl::Status why) {
    doomed_.push_back({peer, rail, std::move(why)});
  }
  void free_later(std::unique_ptr<Rail> rail) { closed_.push_back(std::move(rail)); }
  void close_now(std::unique_ptr<Rail> rail, const absl::Status& why) {
    Rail* stray = rail.get();
    free_later(std::move(rail));
    stray->close(why, sink_);
  }
  bool any_to_close() const { return !doomed_.empty(); }
  bool any() const { return !doomed_.empty() || !closed_.empty(); }
  bool run() {
    bool any = false;
    while (!doomed_.empty()) {
      const Doomed next = std::move(doomed_.back());
      doomed_.pop_back();
      Peer* peer = peers_.find(next.peer);
      RailState* state = peer == nullptr ? nullptr : peer->find(next.rail);
      if (state == nullptr) continue;  // went down by itself meanwhile
      state->rail->close(next.why, sink_);
      any = true;
    }
    any |= !closed_.empty();
    closed_.clear();
    return any;
  }
  void free_closed() { closed_.clear(); }

 private:
  struct Doomed {
    PeerId peer;
    const Rail* rail;  // may be gone already
    absl::Status why;
  };

  PeerTable& peers_;
  EventSink& sink_;
  std::vector<Doomed> doomed_;
  std::vector<std::unique_ptr<Rail>> closed_;
};

}  // namespace baton::internal
