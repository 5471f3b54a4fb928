// Prefill and decode servers of one or several ranks, on threads of this process.
#pragma once

#include "engine/shard/kv_ranks.h"
#include "tests/engine_serve/sessions.h"
#include "tests/engine_shard/ranks.h"
#include "tests/test.h"

namespace baton::engine::shard {

struct ServerOptions {
  std::string role = "prefill";  // "all": without a session
  int ranks = 1;
  StepLimits limits;
  Arithmetic arithmetic = Arithmetic::kFp32;
  std::string provider = "shm";
  bool push = false;
  serve::KvTierOptions tiers;  // no block is written over before they have it
  const Checkpoint* checkpoint = &ranks_checkpoint();
  std::optional<int> stranger;  // a rank that no other engine takes for one of this model
  // Instead of following, at ranks behind rank 0; `session` is the rank's.
  std::function<absl::Status(Group&, const Model&, handoff::HandOff&)> body;
};

inline std::unique_ptr<handoff::HandOff> rank_session(const ServerOptions& options,
                                                      const Model& model) {
  handoff::HandOffOptions more;
  more.lease = patient(std::chrono::seconds(2));  // of loads that fail at another rank
  return serve::test_session(options.role, options.provider, model, std::move(more),
                             options.stranger == model.shard().rank ? "another" : "");
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
    if (options.role != "all") session_ = rank_session(options, *model_);
    if (group_ != nullptr) {
      leader_ = *Leader::create(*group_, *model_, options.limits, options.role,
                                options.tiers.of_rank(model_->shard()));
    }
    engine_ = *serve::Engine::create(*model_, serve::test_tokenizer(),
                                     {.blocks = options.limits.blocks,
                                      .token_budget = options.limits.token_budget,
                                      .max_sequences = options.limits.max_sequences,
                                      .min_remote_tokens = 8,
                                      .hand_off = session_.get(),
                                      .push = options.push,
                                      .tiers = options.tiers,
                                      .leader = leader_.get()});
  }
  ~Server() { stop(); }

  serve::Engine& engine() { return *engine_; }
  Leader* leader() { return leader_.get(); }
  std::string address() const { return engine_->kv_address(); }

  // Steps on a thread of its own, from now until stop().
  void start() {
    thread_ = std::thread([this] {
      while (!stop_) step();
    });
  }
  // Until nothing is to be done any more, for others too.
  void stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
    if (engine_ != nullptr) finish();
  }
  void finish(CallSite from = CallSite::here()) {
    until([this] { return !engine_->owes_others(); }, [this] { step(); },
          [this] { return state_of(*engine_); }, from);
  }
  // Ends the server; how its followers ended, from rank 1 on.
  std::vector<absl::Status> end() {
    stop();
    engine_ = nullptr;
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
  absl::Status follow(Group& group, const Model& model) {
    const auto session = options_.role == "all" ? nullptr : rank_session(options_, model);
    if (options_.body) return options_.body(group, model, *session);
    auto follower = Follower::create(group, model,
                                     {.limits = options_.limits,
                                      .role = options_.role,
                                      .session = session.get(),
                                      .tiers = options_.tiers.of_rank(model.shard())});
    return follower.ok() ? (*follower)->run() : follower.status();
  }

  const ServerOptions options_;
  std::optional<RendezvousPlace> place_;
  std::optional<Followers> followers_;  // gone after the group, which they need to end
  std::unique_ptr<Group> group_;
  std::optional<Model> model_;
  std::unique_ptr<Leader> leader_;
  std::unique_ptr<handoff::HandOff> session_;
  std::unique_ptr<serve::Engine> engine_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// All of them, asking the prefill at `address`; some alone, then all at once.
inline std::map<uint64_t, serve::Outcome> run_all(Server& server,
                                                  const std::vector<serve::Request>& requests,
                                                  const std::string& address = "") {
  std::map<uint64_t, serve::Outcome> outcomes;
  for (size_t i = 0; i < requests.size(); ++i) {
    serve::Request request = requests[i];
    request.prefill_address = address;
    EXPECT_TRUE(submit(server.engine(), request, &outcomes[i]).ok());
    if (i < 5) server.finish();
  }
  server.finish();
  return outcomes;
}

// The same, and clients give requests up, at any moment.
inline void run_and_abort(Server& server, KnownAnswers& answers, const std::string& address = "") {
  std::map<uint64_t, serve::Outcome> outcomes;
  std::mt19937_64 random(7);
  for (size_t i = 0; i < answers.requests().size(); ++i) {
    serve::Request request = answers.requests()[i];
    request.prefill_address = address;
    ASSERT_TRUE(submit(server.engine(), request, &outcomes[i]).ok());
    for (uint64_t steps = random() % 6; steps > 0; --steps) server.engine().step();
    if (random() % 2 == 0) server.engine().abort(random() % (i + 1));
  }
  server.finish();
  size_t aborted = 0;
  for (const auto& [id, outcome] : outcomes) {
    if (outcome.reason == serve::FinishReason::kAbort) {
      ++aborted;
    } else {
      EXPECT_EQ(outcome.tokens, answers.of().at(id).tokens) << id;
    }
  }
  EXPECT_GT(aborted, 3u);
}

// Nothing is under way, nothing is lost, and all ranks end well.
inline void expect_clean(Server& server, uint32_t blocks) {
  server.stop();
  const serve::EngineStats stats = server.engine().stats();
  EXPECT_EQ(stats.free_blocks, blocks);
  EXPECT_EQ(stats.quarantined_blocks, 0u);
  EXPECT_TRUE(server.engine().check_integrity().ok()) << server.engine().check_integrity();
  for (const absl::Status& status : server.end()) EXPECT_TRUE(status.ok()) << status;
}

}  // namespace baton::engine::shard
