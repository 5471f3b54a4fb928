// The sim provider of one node: connections, and the events that wait for the worker's progress().
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tests/sim/fabric/rail.h"
#include "transport/provider.h"

namespace baton::sim {

class SimNetwork;

class SimProvider final : public Provider {
 public:
  SimProvider(SimNetwork& network, size_t node, const ProviderContext& context);
  ~SimProvider() override;

  const Capabilities& capabilities() const override { return capabilities_; }
  absl::StatusOr<std::string> listen() override;
  void set_worker_address(const std::string& encoded) override { self_.address = encoded; }
  absl::Status reachable(const std::string& address, std::string_view host_id) const override;
  void connect(const ConnectRequest& request) override;
  absl::Status add_region(const RegionEntry& region) override;
  absl::Status remove_region(const RegionEntry& region, EventSink& sink) override;
  bool progress(EventSink& sink) override;
  int wait_fd() const override { return -1; }
  // Its program goes on, after it had stood still.
  void thaw();
  bool arm() override { return delivered_ == added_; }

  SimNetwork& network() { return network_; }
  size_t node() const { return node_; }
  RegionTable& regions() { return regions_; }

 private:
  friend class SimRail;

  // Something to tell the worker. Entries are reused, with the memory of `payload`.
  struct Entry {
    enum class Kind { kNothing, kConnected, kConnectFailed, kAccepted, kDone, kArrived, kDown };
    Kind kind = Kind::kNothing;
    uint32_t queue_pair = 0;  // names the rail: it may be gone when the entry's turn comes
    uint64_t session = 0;
    TransferId transfer;
    uint32_t slice = 0;
    Arrival arrival;
    std::string payload;
    absl::Status status;
    HelloInfo peer;
    std::unique_ptr<Rail> rail;
  };
  // A connection that this side started, until its last rail is lost or closed.
  struct Session {
    ConnectRequest request;
    size_t node = 0;
    uint16_t rails = 1;
    uint16_t failed = 0;       // rails that could not be made
    bool established = false;  // has had a rail
  };

  Entry& add_entry(Entry::Kind kind, const SimRail* rail);
  void deliver(Entry& entry, EventSink& sink);
  static SimRail* find(const SimNetwork& network, uint32_t queue_pair);

  // For rails.
  void report_done(const SimRail& rail, const Slice& slice, const absl::Status& status);
  void report_arrival(const SimRail& rail, const Arrival& arrival);
  void rail_lost(SimRail& rail, const absl::Status& why, bool closed);
  void deliver_all(const SimRail& rail, EventSink& sink);
  void forget(SimRail& rail);
  void say_goodbye(const SimRail& rail, bool for_good, const absl::Status& cause);

  // Connecting (connect.cc): a dial travels to the other node and is answered.
  void dial(uint64_t session, uint16_t rail, uint32_t attempt);
  void dial_arrived(uint64_t session, uint16_t rail, uint32_t attempt);
  void redial(uint64_t session, uint16_t rail, uint32_t attempt);
  void complete(uint64_t session, uint64_t server_incarnation, const HelloInfo& server,
                const HelloInfo& client);
  void give_up(uint64_t session, const absl::Status& why);
  absl::Status shake_hands(const SimProvider& server, const HelloInfo& introduction,
                           HelloInfo& server_info, HelloInfo& client_info) const;
  size_t live_rails(uint64_t session, const WorkerUid* peer, bool dialled) const;
  // Calls back after `delay`, unless this provider is gone by then.
  void later(Time delay, std::function<void(SimProvider&)> call);

  SimNetwork& network_;
  const size_t node_;
  const ClusterKey& key_;
  HelloInfo self_;
  RegionTable& regions_;
  Capabilities capabilities_;
  bool listening_ = false;
  const uint64_t incarnation_;  // which of the node's providers, over time
  std::vector<SimRail*> rails_;
  std::map<uint64_t, Session> sessions_;
  // Entries [delivered_, added_) wait; both return to 0 when none does.
  std::deque<Entry> inbox_;
  size_t delivered_ = 0;
  size_t added_ = 0;
};

}  // namespace baton::sim
