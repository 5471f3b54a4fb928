// Prefill and decode servers of one or several ranks, on threads of this process.
#pragma once

#include "engine/shard/kv_ranks.h"
#include "kvtransfer/baton_connector.h"
#include "tests/engine_shard/ranks.h"
#include "tests/test.h"

namespace baton::engine::shard {

// What a test puts around the connector of a rank.
using Wrap = std::function<std::unique_ptr<kvtransfer::KvConnector>(
    int rank, std::unique_ptr<kvtransfer::KvConnector>)>;

struct ServerOptions {
  serve::EngineRole role = serve::EngineRole::kPrefill;
  int ranks = 1;
  StepLimits limits;
  Arithmetic arithmetic = Arithmetic::kFp32;
  std::string provider = "shm";
  Time loads_apart = kNever;
  serve::KvTierOptions tiers;  // no block is written over before they have it
  const Checkpoint* checkpoint = &ranks_checkpoint();
  Wrap wrap;
  // Instead of following, at ranks behind rank 0; `connector` is the rank's.
  std::function<absl::Status(Group&, const Model&, kvtransfer::KvConnector&)> body;
};

inline std::unique_ptr<kvtransfer::KvConnector> rank_connector(const ServerOptions& options,
                                                               int rank) {
  kvtransfer::BatonConnectorOptions how;
  how.worker.name =
      (options.role == serve::EngineRole::kPrefill ? "prefill-" : "decode-") + std::to_string(rank);
  how.worker.providers = {options.provider};
  how.worker.key = ranks_key();
  auto connector = *kvtransfer::make_baton_connector(how);
  return options.wrap ? options.wrap(rank, std::move(connector)) : std::move(connector);
}

// Rank 0's engine is the caller's; the other ranks follow it on threads of their own.
class Server {
 public:
  explicit Server(const ServerOptions& options) : options_(options) {
    if (options.ranks > 1) {
      place_.emplace(options.ranks, std::vector<std::string>{options.provider});
      followers_.emplace(*place_, options.arithmetic, FollowerOptions{}, *options.checkpoint,
                         [this](Group& group, const Model& model) { return follow(group, model); });
      group_ = *Group::meet(place_->options(0));
    }
    model_.emplace(*Model::create(*options.checkpoint, options.arithmetic,
                                  group_ != nullptr ? group_->shard() : ModelShard{}));
    connector_ = rank_connector(options, 0);
    if (group_ != nullptr) {
      leader_ = *Leader::create(*group_, *model_, options.limits, role_name(),
                                options.tiers.of_rank(model_->shard()));
      connector_ = *RanksConnector::create(*leader_, std::move(connector_));
    }
    engine_ = *serve::Engine::create(*model_, serve::test_tokenizer(),
                                     {.role = options.role,
                                      .blocks = options.limits.blocks,
                                      .token_budget = options.limits.token_budget,
                                      .max_sequences = options.limits.max_sequences,
                                      .min_remote_tokens = 8,
                                      .loads_apart = options.loads_apart,
                                      .tiers = options.tiers,
                                      .leader = leader_.get()},
                                     connector_.get());
  }
  ~Server() { stop(); }

  serve::Engine& engine() { return *engine_; }
  Leader* leader() { return leader_.get(); }
  kvtransfer::KvConnector& connector() { return *connector_; }
  std::string address() const { return connector_->address(); }

  // Steps on a thread of its own, from now until stop().
  void start() {
    thread_ = std::thread([this] {
      while (!stop_) step();
    });
  }
  // Until nothing is to be done any more.
  void stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
    if (engine_ != nullptr) finish();
  }
  void finish(CallSite from = CallSite::here()) {
    until([this] { return !engine_->has_work(); }, [this] { step(); },
          [this] { return state_of(*engine_); }, from);
  }
  // Ends the server; how its followers ended, from rank 1 on.
  std::vector<absl::Status> end() {
    stop();
    engine_ = nullptr;
    connector_ = nullptr;
    leader_ = nullptr;
    group_ = nullptr;
    if (!followers_.has_value()) return {};
    std::vector<absl::Status> ended = followers_->join();
    ended.erase(ended.begin());
    return ended;
  }
  void step() {
    if (!engine_->step()) engine_->wait(std::chrono::milliseconds(1), -1);
    if (engine_->tiers() != nullptr && engine_->tiers()->busy()) engine_->tiers()->flush();
  }

 private:
  std::string role_name() const {
    return options_.role == serve::EngineRole::kPrefill ? "prefill" : "decode";
  }
  absl::Status follow(Group& group, const Model& model) {
    const auto connector = rank_connector(options_, group.shard().rank);
    if (options_.body) return options_.body(group, model, *connector);
    auto follower = Follower::create(group, model,
                                     {.limits = options_.limits,
                                      .role = role_name(),
                                      .connector = connector.get(),
                                      .tiers = options_.tiers.of_rank(model.shard())});
    return follower.ok() ? (*follower)->run() : follower.status();
  }

  const ServerOptions options_;
  std::optional<RendezvousPlace> place_;
  std::optional<Followers> followers_;  // gone after the group, which they need to end
  std::unique_ptr<Group> group_;
  std::optional<Model> model_;
  std::unique_ptr<Leader> leader_;
  std::unique_ptr<kvtransfer::KvConnector> connector_;
  std::unique_ptr<serve::Engine> engine_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

}  // namespace baton::engine::shard
