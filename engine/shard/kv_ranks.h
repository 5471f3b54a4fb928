// The KV connector of a tensor-parallel model, at rank 0: one connector to the engine, and each
// call of it is one at every rank.
//
//   auto own = kvtransfer::make_baton_connector(...);           // a follower has one of its own
//   auto leader = Leader::create(group, model, limits, "decode");
//   auto connector = RanksConnector::create(*leader, std::move(*own));
//   auto engine = Engine::create(model, tokenizer, {.leader = ..., ...}, connector->get());
//
// Each rank moves the KV of its own heads, to and from ranks of the other server, whatever number
// of those there is. A load is here when it is here at every rank, and has failed when it has at
// one; a job is wanted while every rank's loads are, and saved when it is saved everywhere. The
// other ranks hear of calls with the next step, or when this is asked what there is: they are asked
// in turn, at most every half a millisecond, while a load or job is under way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "engine/shard/leader.h"
#include "engine/shard/loads.h"
#include "kvtransfer/kv_connector.h"
#include "transport/clock.h"

namespace baton::engine::shard {

// When the group fails, loads fail with it, and what is under way counts as ended at other ranks:
// nothing reads their memory any more.
class RanksConnector final : public kvtransfer::KvConnector, private Leader::Part {
 public:
  ~RanksConnector() override { leader_.leave(this); }
  // `own` is rank 0's. The leader must outlive the connector. InvalidArgument: a follower has none.
  static absl::StatusOr<std::unique_ptr<RanksConnector>> create(
      Leader& leader, std::unique_ptr<kvtransfer::KvConnector> own);

  absl::StatusOr<void*> allocate_cache(const kvtransfer::KvLayout& layout) override;
  // The address of all ranks (kv_address.h).
  std::string address() const override { return address_; }
  // Sums over the ranks, as of when they were asked last; the route is rank 0's.
  kvtransfer::KvConnectorStats stats() const override;
  void progress() override;
  void wait(Time timeout, int fd) override;

  // A load that several ranks make has a key, and names how many of them come to one prefill
  // worker.
  absl::Status start_load(kvtransfer::KvLoad load) override;
  // All or none.
  uint32_t layers_loaded(kvtransfer::KvRequestId id) override {
    return loads_.layers_loaded(id, layers_);
  }
  absl::Status load_status(kvtransfer::KvRequestId id) override { return loads_.status(id); }
  absl::Status wait_for_layer(kvtransfer::KvRequestId id, uint32_t layer) override;
  // True at the earliest when the other ranks have been asked once more.
  bool end_load(kvtransfer::KvRequestId id) override;

  // Jobs without a key were asked of this rank alone, and are refused.
  std::optional<kvtransfer::KvJob> next_job() override;
  bool is_wanted(uint64_t job) override;
  absl::Status renew_job(uint64_t job, Time lease) override;
  // In a step: what Leader::begin_step() has told the others that it completes.
  absl::Status save_layer(uint64_t job, uint32_t layer, uint32_t first_block,
                          absl::Span<const uint32_t> blocks) override;
  void finish_job(uint64_t job, const absl::Status& outcome) override;
  bool is_saved(uint64_t job) override;

 private:
  struct Job {
    size_t saved = 0;  // followers
    bool own_saved = false;
    absl::Status unwanted;
  };
  RanksConnector(Leader& leader, std::unique_ptr<kvtransfer::KvConnector> own);
  bool busy() const { return patience() != kNever || leader_.has_calls(); }
  Time patience() const override;
  void hear(size_t follower, const Report& report) override;

  Leader& leader_;
  const std::unique_ptr<kvtransfer::KvConnector> own_;
  std::string address_;
  uint32_t layers_ = UINT32_MAX;
  RanksLoads<kvtransfer::KvConnector> loads_;
  absl::flat_hash_map<uint64_t, Job> jobs_;
  std::vector<uint64_t> refused_;                       // jobs, not saved yet
  std::vector<kvtransfer::KvConnectorStats> reported_;  // of followers
};

}  // namespace baton::engine::shard
