// The KV connector of a rank behind rank 0: does what rank 0's has it do, for this rank's heads.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "engine/model/model.h"
#include "engine/shard/commands.h"
#include "engine/shard/loads.h"
#include "kvtransfer/kv_connector.h"
#include "transport/clock.h"

namespace baton::engine::shard {

// As a LayerHook it sends what a step completes. The follower's thread calls everything.
class KvFollower : public LayerHook {
 public:
  // `connector` must outlive this object; its cache has `layers` layers.
  KvFollower(kvtransfer::KvConnector& connector, uint32_t layers)
      : connector_(connector), layers_(layers) {}

  void make(const KvCall& call);
  // What the next step completes; must outlive the step.
  void begin_step(const std::vector<Command::Send>& sends) { sends_ = &sends; }
  absl::Status before_layer(int layer) override;
  void kv_written(int layer) override;

  // Advances transfers, and notes what has changed.
  void progress();
  // Sleeps until a peer has something, at most `timeout`; then as progress().
  void wait(Time timeout);
  // Adds what has changed since the last one.
  void report(Report& report);

 private:
  struct Job {
    uint64_t number = 0;  // the connector's; 0: it has none
    bool told = false;    // rank 0 knows that it is not wanted
    bool finished = false;
  };
  void start_load(const KvCall& call);
  void open_job(const KvCall& call);
  void finish_job(const KvCall& call);
  void save(uint64_t id, uint32_t layer, uint32_t first_block, const std::vector<uint32_t>& blocks);
  void unwanted(uint64_t id, Job& job, const absl::Status& why);
  void take_jobs();
  void follow();
  void follow_jobs();

  kvtransfer::KvConnector& connector_;
  const uint32_t layers_;
  const std::vector<Command::Send>* sends_ = nullptr;
  FollowedLoads loads_;
  absl::flat_hash_map<uint64_t, Job> jobs_;               // by rank 0's number
  absl::flat_hash_map<std::string, uint64_t> unclaimed_;  // by key: rank 0 has not named it yet
  std::vector<uint64_t> closing_;                         // it never will
  std::deque<Event> events_;
};

}  // namespace baton::engine::shard
