// Lost rails: what was on them, and what the peer knows of it.
//
// When a rail is lost, some of our slices on it may have landed, and bytes of others may still lie
// in buffers on the way. Before one of them is sent again the peer closes its end of that rail, so
// that nothing more comes over it, and says which had landed (its Arrivals know; of those that have
// no name there, how many the rail had counted): those are done, the others go on over another
// rail. Nothing lands twice, and nothing late.
#pragma once

#include <memory>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "transport/internal/messages/control_message.h"
#include "transport/internal/tables/peer_table.h"
#include "transport/internal/tables/transfer_slots.h"
#include "transport/provider.h"

namespace baton::internal {

class WorkerCore;

class LostRails {
 public:
  explicit LostRails(WorkerCore& core) : core_(core) {}

  static LostRail& lost_rail(Peer& peer, uint64_t link);
  static void note_counted(Peer& peer, uint64_t link, const Rail& rail);
  static bool fenced(const Peer& peer, uint64_t link);  // the other side lost it before it came up
  // It is not known whether the slice has landed.
  void unsettled(Peer& peer, uint64_t link, const SliceName& name,
                 const std::optional<Ordinal>& number);
  void settle_all(Peer& peer, const absl::Status& why);  // the peer is down: it cannot be asked
  void ask_about_lost_rails(Peer& peer);
  void ask_again(Peer& peer);
  // The lost rail that a control message of ours asks about, if that is not known yet.
  static LostRail* asked_by(Peer& peer, const TransferSlot& slot);

  // From inside a provider, so what closes rails waits until that has returned.
  void hear(Peer& peer, Rail& rail, std::string_view words);
  bool any_questions() const { return !questions_.empty(); }
  bool answer_questions();
  // A rail that goes down now does so because the peer has lost it.
  bool answering() const { return answering_; }

 private:
  void settle(const SliceName& name, Fate fate);
  static Fate fate_of(const Peer& peer, uint64_t link, const SliceName& name);
  void on_fenced(Peer& peer, const ControlMessage& answer);
  void look_for_asked_rails();

  WorkerCore& core_;
  std::vector<std::pair<PeerId, ControlMessage>> questions_;  // kFence, to be answered
  bool answering_ = false;
};

// Rails that are closed, or freed, once the provider that is being called has returned.

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
