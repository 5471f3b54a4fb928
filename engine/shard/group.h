// The ranks of one tensor-parallel model: they meet, agree on what they serve, and talk.
//
//   auto group = Group::meet({.rank = r, .ranks = 2, .rendezvous = "10.0.0.1:4711"});
//   auto model = Model::load(directory, arithmetic, (*group)->shard());
//   rank 0:  auto leader = Leader::create(**group, *model, limits);      // leader.h; an Engine
//   uses it others:  auto follower = Follower::create(**group, *model, limits);  // follower.h
//            (*follower)->run();
//
// Rank 0 decides what is computed next and tells the others; then all compute it, and exchange
// their slices of each result (engine/model/shard.h).
//
// Nothing hangs: a rank that died, stopped or fails ends every call at every other rank, with an
// error that names it. From then on the group only fails. One thread at a time, except abort().
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "collectives/communicator.h"
#include "collectives/experts.h"
#include "engine/model/shard.h"

namespace baton::engine::shard {

// What must be equal at all ranks, by the names that people know: ("--blocks", "2048").
using Settings = std::vector<std::pair<std::string, std::string>>;

class Group final : public ShardExchange {
 public:
  // As Communicator::create(), whose errors it passes on. `timeout` is how long a rank may keep the
  // others waiting in the middle of a step; between steps they wait for rank 0 without limit.
  // `expert_parallel`: the ranks share out the model's experts.
  static absl::StatusOr<std::unique_ptr<Group>> meet(CommunicatorOptions options,
                                                     bool expert_parallel = false);

  ModelShard shard() const {
    return {communicator_->rank(), communicator_->ranks(), expert_parallel_};
  }

  // Every rank calls it, once it is ready; however long that takes the others. Returns what each
  // rank says of itself (at most 4 KiB), in their order. FailedPrecondition, at every rank, where
  // settings differ: says which, and both values.
  absl::StatusOr<std::vector<std::string>> agree(const Settings& settings,
                                                 std::string_view about_me = "");

  // Rank 0 to all others; they are in receive() or will be.
  absl::Status tell(std::string_view message);
  // What rank 0 told; valid until the next call. `idle` is called again and again while nothing
  // comes, and returns true where it has done something; without it the thread sleeps.
  absl::StatusOr<std::string_view> receive(const std::function<bool()>& idle = nullptr);
  // Every rank gives equally many bytes and gets all, in the order of ranks.
  absl::StatusOr<std::string_view> exchange(std::string_view mine);

  absl::StatusOr<float*> allocate(size_t floats) override;
  absl::Status all_gather(float* all, size_t count) override;
  void expect_experts(const ExpertShape& shape) override { shape_ = shape; }
  absl::StatusOr<Asked> ask_experts(const float* rows, int tokens,
                                    std::span<const int32_t> chosen) override;
  absl::Status sum_answers(std::span<const float> weights, float* out, size_t floats) override;

  // Lets the group notice that a rank is gone, while there is nothing to do.
  absl::Status look();
  // Ends everything at all ranks, with this reason.
  void abort(const absl::Status& why) { communicator_->abort(why); }
  absl::Status status() const { return communicator_->status(); }
  Communicator& communicator() { return *communicator_; }

 private:
  Group(std::unique_ptr<Communicator> communicator, bool expert_parallel, Time timeout)
      : communicator_(std::move(communicator)),
        expert_parallel_(expert_parallel),
        timeout_(timeout) {}
  absl::Status none_missing(Work work) const;

  const std::unique_ptr<Communicator> communicator_;
  const bool expert_parallel_;
  const Time timeout_;
  ExpertShape shape_;
  std::unique_ptr<Experts> experts_;  // from the first round on
  Work asked_;
  std::string message_;
  std::string answers_;
};

}  // namespace baton::engine::shard
