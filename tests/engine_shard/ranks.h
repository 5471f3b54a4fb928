// The ranks of one model on threads of this process, over a communicator; rank 0 is the caller.
#pragma once

#include "collectives/rendezvous.h"
#include "engine/shard/follower.h"
#include "engine/shard/leader.h"
#include "tests/engine_model/test_model.h"
#include "tests/engine_serve/engine_fixture.h"
#include "tests/test.h"

namespace baton::engine::shard {

// Slices of it are uneven: 48 columns over 2 ranks are 32 and 16, over 4 the last rank has none.
inline ModelConfig ranks_config() {
  ModelConfig config = tiny_model_config();
  config.hidden_size = 48;
  config.num_heads = 4;
  config.num_kv_heads = 4;
  return config;
}

inline const Checkpoint& ranks_checkpoint() {
  static const auto* checkpoint = new Checkpoint(make_test_checkpoint(ranks_config(), 3));
  return *checkpoint;
}

// The same with experts in the second layer, whose width of 80 columns is uneven over 2 ranks.
inline const Checkpoint& ranks_expert_checkpoint() {
  static const auto* checkpoint = [] {
    ModelConfig config = ranks_config();
    config.family = ModelFamily::kQwen3Moe;
    config.num_experts = 6;
    config.experts_per_token = 3;
    config.expert_size = 80;
    config.norm_topk_prob = true;
    config.dense_layers = {true, false};
    return new Checkpoint(make_test_checkpoint(config, 3));
  }();
  return *checkpoint;
}

inline const ClusterKey& ranks_key() {
  static const auto* key =
      new ClusterKey(*ClusterKey::from_bytes("a secret for these tests, 32 bytes long"));
  return *key;
}

// Where ranks meet.
class RendezvousPlace {
 public:
  explicit RendezvousPlace(int ranks, std::vector<std::string> providers = {})
      : ranks_(ranks),
        providers_(std::move(providers)),
        server_(*collectives::RendezvousServer::start(ranks_key(), "", 0,
                                                      static_cast<uint32_t>(ranks))) {}
  CommunicatorOptions options(int rank) const {
    CommunicatorOptions options;
    options.rank = rank;
    options.ranks = ranks_;
    options.rendezvous = server_->address();
    options.calibrate = false;
    options.start_timeout = std::chrono::hours(1);
    options.timeout = kNever;
    options.worker.key = ranks_key();
    options.worker.providers = providers_;
    return options;
  }
  int ranks() const { return ranks_; }

 private:
  const int ranks_;
  const std::vector<std::string> providers_;
  const std::unique_ptr<collectives::RendezvousServer> server_;
};

// The followers, each on a thread, until rank 0 ends or the group fails.
class Followers {
 public:
  using Body = std::function<absl::Status(Group& group, const Model& model)>;

  // `body`: instead of following.
  Followers(const RendezvousPlace& place, Arithmetic arithmetic, const FollowerOptions& options,
            const Checkpoint& checkpoint = ranks_checkpoint(), const Body& body = nullptr) {
    ended_.resize(static_cast<size_t>(place.ranks()));
    for (int rank = 1; rank < place.ranks(); ++rank) {
      threads_.emplace_back([this, &place, &checkpoint, arithmetic, options, body, rank] {
        absl::Status& ended = ended_[static_cast<size_t>(rank)];
        auto group = Group::meet(place.options(rank));
        ended = group.status();
        if (!group.ok()) return;
        const Model model = *Model::create(checkpoint, arithmetic, (*group)->shard());
        if (body) {
          ended = body(**group, model);
          return;
        }
        auto follower = Follower::create(**group, model, options);
        ended = follower.ok() ? (*follower)->run() : follower.status();
      });
    }
  }
  ~Followers() { join(); }
  // How each ended, by rank.
  const std::vector<absl::Status>& join() {
    for (std::thread& thread : threads_) {
      if (thread.joinable()) thread.join();
    }
    return ended_;
  }

 private:
  std::vector<absl::Status> ended_;
  std::vector<std::thread> threads_;
};

// Rank 0 of two is the caller; rank 1 follows, or does `body`.
struct TwoRanks {
  explicit TwoRanks(const FollowerOptions& options, const Followers::Body& body = nullptr,
                    Arithmetic arithmetic = Arithmetic::kFp32,
                    const Checkpoint& checkpoint = ranks_checkpoint())
      : followers(place, arithmetic, options, checkpoint, body) {}

  const RendezvousPlace place{2};
  Followers followers;
  std::unique_ptr<Group> group = *Group::meet(place.options(0));
  const Model model = *Model::create(ranks_checkpoint(), Arithmetic::kFp32, group->shard());
};

// What one process answers to `count` requests, one at a time: what ranks have to answer, too.
class KnownAnswers {
 public:
  explicit KnownAnswers(size_t count) : requests_(serve::random_requests(31, count)) {}
  const std::vector<serve::Request>& requests() const { return requests_; }
  const std::map<uint64_t, serve::Outcome>& of(Arithmetic arithmetic = Arithmetic::kFp32,
                                               const Checkpoint& checkpoint = ranks_checkpoint()) {
    const std::pair<const Checkpoint*, Arithmetic> which{&checkpoint, arithmetic};
    if (!known_.contains(which)) {
      const Model model = *Model::create(checkpoint, arithmetic);
      known_[which] = serve::run_one_at_a_time(requests_, model);
    }
    return known_.at(which);
  }

 private:
  const std::vector<serve::Request> requests_;
  std::map<std::pair<const Checkpoint*, Arithmetic>, std::map<uint64_t, serve::Outcome>> known_;
};

}  // namespace baton::engine::shard
