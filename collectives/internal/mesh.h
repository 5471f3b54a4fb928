// The mesh: who is in the group, how each rank is reached, and the memory that they reach.
//
// Meets the others at the rendezvous, connects to each of them, and makes a link per pair: a
// DirectLink where both can map the other's memory, else a TransferLink. It also carries control
// messages: short notifications between ranks. What they mean, and what follows when a rank goes
// down, is its listener's business.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "collectives/communicator.h"
#include "collectives/executor/control_block.h"
#include "collectives/executor/direct_link.h"
#include "collectives/executor/memory.h"
#include "collectives/executor/transfer_link.h"
#include "collectives/rendezvous.h"

namespace baton::collectives::internal {

// What ranks tell each other besides data: the first byte of a notification.
enum class ControlMessage : char {
  kWake = 'w',      // look at your links
  kCall = 'c',      // TransferLink::Announcement: what I called
  kPacket = 'p',    // of a send or a receive: executor/link.h
  kView = 'v',      // one byte: whether I can map your memory
  kOffer = 'o',     // TransferLink::Offer
  kBye = 'b',       // I leave, in order
  kAbort = 'x',     // it is over, and why: see failure_detector.cc
  kQuery = 'q',     // Standing of mine: tell me yours
  kStanding = 's',  // Standing: an answer
  kBallot = 'k',    // who is lost: see survivors.cc
  kSlab = 'd',      // where memory of mine on a device is: see devices/device_exchange.h
};

// Everything under the communicator's lock; the listener is called from inside drain().
class Mesh {
 public:
  class Listener {
   public:
    virtual ~Listener() = default;
    // Called for the kinds that the mesh does not handle itself: kCall, kAbort, kQuery, kStanding,
    // kBallot.
    virtual void on_control_message(uint32_t from, ControlMessage kind, std::string_view body) = 0;
    virtual void on_down(uint32_t rank, const absl::Status& why) = 0;
    // What ends the start of the mesh early.
    virtual absl::Status status() const = 0;
  };

  struct Member {  // another rank
    PeerId peer;
    bool known = false;  // `peer` is set
    bool up = false;
    bool bye = false;   // left in order
    std::string label;  // "rank 3 (host, pid 17)"
    WorkerUid uid;
    RemoteRegion control;  // holds its control block
    uint64_t control_offset = 0;
    int can_view = -1;  // whether it can map us; -1: not told yet
    int we_can_view = -1;
    RemoteView view;  // of its control block
    std::unique_ptr<executor::Link> link;
    executor::DirectLink* direct = nullptr;  // `link`, if it is one
    executor::TransferLink* transfer = nullptr;
    std::string offer;   // of a TransferLink, as it came
    std::string slab;    // of a DeviceExchange, as it came
    bool ready = false;  // the link can be used

    // Its control block; only with a direct link.
    const executor::ControlBlock& block() const {
      return *reinterpret_cast<const executor::ControlBlock*>(view.data);
    }
  };

  // `options` and `listener` outlive the mesh. start() may lower options.slot_bytes.
  Mesh(CommunicatorOptions& options, Listener& listener);
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  // Returns once every link can be used.
  absl::Status start();
  // Says goodbye, so that no rank takes the silence for a death, and waits until what is on its way
  // has arrived (at most as long as a call may take), and a moment for the goodbyes of others.
  // After this the listener hears of no rank that goes down.
  void leave();

  uint32_t rank() const { return rank_; }
  uint32_t ranks() const { return ranks_; }
  Worker& worker() { return *worker_; }
  executor::Memory& memory() { return *memory_; }
  executor::ControlBlock& control() { return *control_; }
  std::vector<Member>& members() { return members_; }  // by rank; our own is unused
  const std::vector<Member>& members() const { return members_; }
  Member& member(uint32_t rank) { return members_[rank]; }
  const Member& member(uint32_t rank) const { return members_[rank]; }
  std::vector<executor::Link*> links() const;  // by rank
  Time now() const { return worker_->clock().now(); }

  // All other ranks are processes of this machine that map each other's memory.
  bool all_direct() const;
  // Those that sleep look at what this rank has published.
  void wake_all();
  // Some link needs the worker to advance.
  bool any_transfer() const { return any_transfer_; }
  // Since the last question a link has submitted something that the worker has yet to send.
  bool submitted();
  // More ranks than cores on this machine.
  bool crowded() const { return crowded_; }
  uint32_t node_size() const { return node_size_; }

  // Publishes regions of memory() that peers do not know yet. Cheap where there are none.
  absl::Status publish_regions() {
    return published_regions_ < memory_->regions().size() ? publish_new_regions()
                                                          : absl::OkStatus();
  }

  void tell(uint32_t rank, ControlMessage kind, std::string_view body);
  void tell_all(ControlMessage kind, std::string_view body);
  // Takes what has come, messages before news of who went down: whoever leaves or gives up says so
  // first.
  void drain();
  // Sleeps until the worker has something to do. Needs no lock.
  void nap(Time longest);
  // What has been sent is taken back: no byte of it moves any more once this returns, and no peer
  // takes what it has read out of our memory for a message.
  void end_transfers();

 private:
  absl::Status publish_new_regions();
  absl::Status open();
  absl::Status meet();
  absl::Status take_rank_info(const RankInfo& info);
  absl::Status connect_all();
  absl::Status link_up(uint32_t rank);
  void count_neighbours();
  Member* member_of(PeerId peer);
  uint32_t rank_of(const Member& member) const {
    return static_cast<uint32_t>(&member - members_.data());
  }
  void on_control_message(Member& member, std::string_view bytes);
  void on_events();
  bool unsettled() const;

  CommunicatorOptions& options_;
  Listener& listener_;
  const uint32_t rank_;
  const uint32_t ranks_;
  const std::string host_;
  std::unique_ptr<Worker> worker_;
  std::unique_ptr<executor::Memory> memory_;
  Block control_memory_;
  executor::ControlBlock* control_ = nullptr;
  size_t published_regions_ = 0;
  std::vector<RankInfo> rank_infos_;
  std::vector<Member> members_;
  uint32_t node_size_ = 1;
  bool any_transfer_ = false;
  bool crowded_ = false;
  bool leaving_ = false;
  Notification notification_;  // its memory is reused
};

}  // namespace baton::collectives::internal
