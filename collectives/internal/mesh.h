// The mesh: a group's members, the link to each rank, and the memory that those ranks reach.
//
// A link is made to a rank when it is first used, over the connection that the endpoint has or
// makes: a DirectLink where both can map the other's memory, else a TransferLink. Until then a
// PendingLink stands in its place. The mesh also carries control messages: short notifications
// between ranks. What they mean, and what follows when a rank goes down, is its listener's
// business.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "collectives/communicator.h"
#include "collectives/executor/control_block.h"
#include "collectives/executor/direct_link.h"
#include "collectives/executor/memory.h"
#include "collectives/executor/transfer_link.h"
#include "collectives/internal/endpoint_impl.h"

namespace baton::collectives::internal {

// The body of kAbort: code, culprit, text.
std::string encode_verdict(const absl::Status& why, uint32_t culprit);

// Everything under the endpoint's lock; the listener is called from inside drain(), and from where
// a link is first used.
class Mesh {
 public:
  class Listener {
   public:
    virtual ~Listener() = default;
    // Called for the kinds that the mesh does not handle itself: kAdd, kCall, kAbort, kQuery,
    // kStanding, kBallot.
    virtual void on_control_message(uint32_t from, ControlMessage kind, std::string_view body) = 0;
    virtual void on_down(uint32_t rank, const absl::Status& why) = 0;
    // The group cannot go on, and `culprit` is to blame.
    virtual void on_wrong(const absl::Status& why, uint32_t culprit) = 0;
    // From now on messages to and from `rank` take this link.
    virtual void on_link(uint32_t rank, executor::Link& link) = 0;
    // Transfers beside the links', of windows: takes them back; and whether those to and from
    // `rank` have let go of this rank's memory.
    virtual void cancel_accesses() = 0;
    virtual bool accesses_free(uint32_t rank) const = 0;
    virtual void withdraw_accesses(uint32_t rank) = 0;  // makes it so, but for memory of devices
  };

  // In the place of a link that is not there yet: asks for it when it is used.
  class PendingLink final : public executor::Link {
   public:
    PendingLink(Mesh& mesh, uint32_t rank) : mesh_(mesh), rank_(rank) {}
    uint64_t send(uint32_t, const executor::Segments&, const executor::CallTag&) override {
      mesh_.want(rank_);
      return 0;
    }
    bool delivered(uint32_t, uint64_t) override { return false; }
    bool peek(uint32_t, size_t, const executor::CallTag&, executor::Segments&,
              absl::Status&) override {
      mesh_.want(rank_);
      return false;
    }
    bool consume(uint32_t) override { return false; }
    size_t most_behind() const override { return 0; }
    bool tell(const executor::Packet&, absl::Span<const std::byte>) override {
      mesh_.want(rank_);
      return false;
    }
    bool hear(executor::Packet&, absl::Span<const std::byte>&) override { return false; }
    void heard() override {}
    void expect() override { mesh_.want(rank_); }
    bool made() const override { return false; }
    bool reads() const override { return false; }
    std::string route() const override { return "no connection yet"; }

   private:
    Mesh& mesh_;
    const uint32_t rank_;
  };

  struct Member {  // another rank
    Process* process = nullptr;
    std::string label;        // "rank 3 (host, pid 17)"
    bool wanted = false;      // a link to it
    bool active = false;      // one of active()
    bool asked = false;       // we have told it kJoin
    bool met = false;         // it has told us
    bool bye = false;         // left in order
    bool ended = false;       // it neither reads nor writes our memory any more
    bool told_ended = false;  // and we not its
    RemoteRegion control;     // holds its control block
    uint64_t control_offset = 0;
    RemoteRegion outbox;  // and its outbox for us
    uint64_t outbox_offset = 0;
    RemoteView view;   // of its control block
    Block our_outbox;  // for it
    std::unique_ptr<executor::Link> link;
    executor::DirectLink* direct = nullptr;  // `link`, if it is one
    executor::TransferLink* transfer = nullptr;
    std::string offer;    // of a TransferLink, as it came
    std::string slab;     // of a DeviceExchange, as it came
    bool ready = false;   // the link can be used
    bool linked = false;  // and the peer's to us, it says

    bool up() const { return process != nullptr && process->up; }
    PeerId peer() const { return process->peer; }
    // Its control block; only with a direct link.
    const executor::ControlBlock& block() const {
      return *reinterpret_cast<const executor::ControlBlock*>(view.data);
    }
  };

  // `options` and `listener` outlive the mesh.
  Mesh(EndpointImpl& endpoint, const CommunicatorOptions& options, Listener& listener)
      : endpoint_(endpoint), options_(options), listener_(listener) {}
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  // OK, or what is wrong with these handles and this id. `rank` is set to this process's place.
  absl::Status check(absl::Span<const Handle> handles, uint64_t id, uint32_t& rank) const;
  // Makes a group of them, which are checked. `group` hears of it. With `eager` it is starting()
  // until the links to some neighbours are there, which want_first() wants.
  absl::Status enter(absl::Span<const Handle> handles, uint64_t id, uint32_t rank,
                     EndpointImpl::Group& group, bool eager, Time start_timeout);
  // Says goodbye, so that no rank takes the silence for a death, and leaves the group. Memory that
  // others may still touch is given back when they have said that they do not. Before the group can
  // be left like that, `lock` given, what is on its way is waited for (at most as long as a call
  // may take, and without the lock).
  void leave(EndpointImpl::Lock* lock = nullptr);

  uint32_t rank() const { return rank_; }
  uint32_t ranks() const { return ranks_; }
  uint64_t id() const { return id_; }
  EndpointImpl& endpoint() { return endpoint_; }
  Worker& worker() { return endpoint_.worker(); }
  executor::Memory& memory() { return endpoint_.memory(); }
  executor::ControlBlock& control() { return *state_->control; }
  std::vector<Member>& members() { return state_->members; }  // by rank; our own is unused
  const std::vector<Member>& members() const { return state_->members; }
  Member& member(uint32_t rank) { return state_->members[rank]; }
  const Member& member(uint32_t rank) const { return state_->members[rank]; }
  std::vector<executor::Link*> links();  // by rank
  // The ranks that are wanted or have said something, few of thousands; enter() made the others.
  const std::vector<uint32_t>& active() const { return state_->active; }
  const std::vector<Handle>& handles() const { return state_->handles; }
  Time now() const { return endpoint_.clock().now(); }

  // Wants a link to a rank, or to all, or to those that the group is not ready without;
  // make_links() makes what is wanted, as far as it goes, and may break the group.
  void want(uint32_t rank);
  void want_all();
  void want_first();
  void make_links();
  // The links that were wanted at first are not up yet.
  bool starting() const { return starting_ > 0; }

  // All other ranks are processes of this machine that map each other's memory, and linked.
  bool all_direct() const;
  // Wakes sleeping ranks so that they read what this rank has published.
  void wake_all();
  bool connecting() const { return connecting_ > 0; }
  // Some link needs the worker to advance, or is being made.
  bool any_transfer() const { return transfers_ > 0 || connecting_ > 0; }
  bool any_wanted() const { return any_wanted_; }
  // All are likely to be direct.
  bool expects_direct() const { return expects_direct_; }
  // Since the last question a link has submitted something that the worker has yet to send.
  bool submitted();
  // More ranks than cores on this machine.
  bool crowded() const { return crowded_; }
  uint32_t node_size() const { return node_size_; }

  absl::Status publish_regions() { return endpoint_.publish_regions(); }

  void tell(uint32_t rank, ControlMessage kind, std::string_view body);
  void tell_all(ControlMessage kind, std::string_view body);  // all that are connected
  void drain() { endpoint_.drain(); }
  // Calls may have ended whose last messages are still on their way to ranks that are busy.
  bool unsettled() const;
  // Withdraws all sends. When quiet() is true no byte of the callers' memory moves any more, and no
  // peer takes bytes that it read from our memory as a message.
  void end_transfers();
  bool quiet() const;
  // Forces that: closes and reopens the connections to ranks that do not let go. Other groups do
  // not notice.
  void force_quiet();

  // --- what the endpoint tells, passed on by the communicator ---
  void on_control_message(Process& from, ControlMessage kind, std::string_view body);
  void on_ready(Process& process);
  void on_goodbye(Process& process);
  void on_down(Process& process, const absl::Status& why);
  void look(Time now);

 private:
  // The memory of this rank that the ranks of one group reach. It outlives the group until they
  // have let go.
  struct State final : Remains {
    explicit State(EndpointImpl& of) : endpoint(of) {}
    ~State() override;
    void on_control_message(Process& from, ControlMessage kind) override;
    bool over() override;
    void tell_ended();
    Member* find(const Process& process);
    void activate(Member& member);

    EndpointImpl& endpoint;
    uint64_t id = 0;
    uint64_t digest = 0;  // of the handles
    std::vector<Handle> handles;
    std::vector<Member> members;
    std::vector<uint32_t> active;
    std::vector<std::unique_ptr<PendingLink>> pending;
    std::unordered_map<const Process*, uint32_t> ranks;
    Block control_memory;
    executor::ControlBlock* control = nullptr;
    bool ending = false;
  };

  bool lets_go(const Member& member) const;
  absl::Status step(Member& member);
  void advance(Member& member);
  absl::Status join(Member& member);
  absl::Status on_join(Member& member, std::string_view body);
  absl::Status link_up(Member& member);
  void made(Member& member);
  void count_linked(const Member& member);
  void count_neighbours();
  uint32_t rank_of(const Member& member) const {
    return static_cast<uint32_t>(&member - state_->members.data());
  }

  EndpointImpl& endpoint_;
  const CommunicatorOptions& options_;
  Listener& listener_;
  uint32_t rank_ = 0;
  uint32_t ranks_ = 0;
  uint64_t id_ = 0;
  std::unique_ptr<State> state_;
  uint32_t node_size_ = 1;
  uint32_t starting_ = 0;    // links that start() wanted and that are not there yet
  std::vector<bool> first_;  // those, by rank
  Time start_by_ = kNever;
  Time start_timeout_{};
  uint32_t connecting_ = 0;  // links that are wanted and not there yet
  bool any_wanted_ = false;  // since make_links()
  uint32_t transfers_ = 0;
  bool crowded_ = false;
  bool expects_direct_ = true;
};

}  // namespace baton::collectives::internal
