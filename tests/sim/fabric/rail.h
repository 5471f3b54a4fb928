// A rail of the sim provider: a queue of slices in front of one queue pair.
#pragma once

#include <cstdint>
#include <string>

#include "tests/sim/fabric/queue_pair.h"
#include "transport/base/ring.h"
#include "transport/provider.h"

namespace baton::sim {

class SimProvider;

class SimRail final : public Rail, private QueuePairOwner {
 public:
  SimRail(SimProvider& provider, size_t peer_node, const HelloInfo& peer, bool dialled);
  ~SimRail() override;

  const Properties& properties() const override { return properties_; }
  absl::Status reaches(const RemoteRegion& remote) const override;
  bool post(const Slice& slice, EventSink& sink) override;
  void abort(TransferId transfer, EventSink& sink) override;
  bool let_go(TransferId transfer) const override;
  void close(absl::Status why, EventSink& sink) override;

  // The other end has gone, or a new rail takes this one's place: reports everything and goes down.
  void lose(const absl::Status& why);

  QueuePair& queue_pair() { return queue_pair_; }
  bool up() const { return state_ == State::kUp; }
  bool dialled() const { return dialled_; }  // by this side
  size_t peer_node() const { return peer_node_; }
  const WorkerUid& peer_uid() const { return peer_uid_; }
  uint64_t session() const { return session_; }
  uint16_t index() const { return index_; }

 private:
  enum class State { kUp, kDown, kReported };  // kReported: the worker has heard rail_down()
  friend class SimProvider;

  void completed(uint64_t id, const absl::Status& status, bool flushed) override;
  void landed(const Arrival& arrival) override;
  void broken(const absl::Status& cause, Break how) override;
  void recovered() override { pump(); }
  void pump();

  SimProvider& provider_;
  const size_t peer_node_;
  const WorkerUid peer_uid_;
  const uint64_t session_;
  const uint16_t index_;
  const bool dialled_;
  Properties properties_;
  QueuePair queue_pair_;
  State state_ = State::kUp;
  bool closed_ = false;        // by the worker
  base::Ring<Slice> waiting_;  // not yet in the queue pair: may still be cancelled
  base::Ring<Slice> posted_;   // in the queue pair, in order
  base::Ring<Slice> flushed_;  // came back from a broken queue pair
};

}  // namespace baton::sim
