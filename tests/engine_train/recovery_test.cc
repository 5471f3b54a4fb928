// Ranks that are killed while they train: the final weights are those of an undisturbed run.
#include "engine/files/files.h"
#include "engine/files/safetensors.h"
#include "engine/train/data_parallel/sharded_checkpoint.h"
#include "engine/train/replica.h"
#include "tests/engine_train/train_fixture.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"

namespace baton::engine::train {
namespace {

namespace fs = std::filesystem;
constexpr int64_t kNone = ReplicaStore::kNothing;
constexpr int kRecoverySteps = 8;

TEST(NewestCommon, IsWhatEveryRankOrItsNeighbourHolds) {
  // {own, own, peer, peer}; the peer's are those of the rank before.
  EXPECT_EQ(newest_common({{4, 5, 4, 5}, {4, 5, 4, 5}}), 5);
  EXPECT_EQ(newest_common({{4, 5, 4, kNone}, {kNone, kNone, kNone, kNone}}), 4);
  EXPECT_EQ(newest_common({{kNone, kNone, kNone, kNone}, {5, 4, 4, kNone}}), 4);
  EXPECT_EQ(newest_common({{5, 4, kNone, kNone}, {kNone, kNone, kNone, kNone}, {6, 5, 4, kNone}}),
            kNone);
  EXPECT_EQ(newest_common({{5, 4, 5, 4}, {kNone, kNone, kNone, kNone}, {6, 5, 4, 5}}), 5);
  EXPECT_EQ(newest_common({{3, 2, 3, 2}, {3, 2, 3, kNone}, {3, 2, 3, 2}}), 3);
  EXPECT_EQ(newest_common({{kNone, kNone, kNone, kNone}, {kNone, kNone, kNone, kNone}}), kNone);
}

// Behind the last step.
constexpr int kBeforeWriting = 100, kAfterWriting = 101, kAtTheEnd = 102;

struct Kill {
  int rank;
  int step;  // behind which, in the first life of the rank
  bool operator==(const Kill&) const = default;
};

void die(const std::vector<Kill>& kills, const Kill& here, int restarts) {
  if (restarts > 0 || std::count(kills.begin(), kills.end(), here) == 0) return;
  ::kill(getpid(), SIGKILL);
}

class Recovery : public ::testing::Test {
 protected:
  RunOptions options() {
    RunOptions run = recovering_run(tiny_options(kRecoverySteps), weights_file());
    run.trainer.parallel.bucket_bytes = 1;
    return run;
  }

  // Forks ranks that train, kills some, and returns the exit status of the whole.
  int train(int ranks, RunOptions run, const std::vector<Kill>& kills) {
    const Corpus& corpus = TinyText::get().corpus;
    const auto result = launch::fork_ranks(
        {.ranks = ranks, .restart = run.recover}, [&](const launch::Place& place, int restarts) {
          run.after_step = [&](int step) { die(kills, {place.rank, step}, restarts); };
          const auto write = run.done;
          run.done = [&](const Trainer& trainer) {
            die(kills, {place.rank, kBeforeWriting}, restarts);
            const absl::Status status = write(trainer);
            die(kills, {place.rank, kAfterWriting}, restarts);
            return status;
          };
          const absl::Status status = run_rank(run, corpus, place);
          run.done = write;
          if (status.ok()) die(kills, {place.rank, kAtTheEnd}, restarts);
          if (!status.ok()) std::fprintf(stderr, "%s\n", status.ToString().c_str());
          return status.ok() ? 0 : 1;
        });
    EXPECT_TRUE(result.ok()) << result.status();
    return result.value_or(-1);
  }

  void expect_undisturbed(int micro_batches) {
    TrainerOptions alone = tiny_options(kRecoverySteps);
    alone.parallel.accumulate = micro_batches;
    expect_weights(weights_file(), train_ranks(1, alone, kRecoverySteps)[0]);
  }

  std::string weights_file() const { return folder_.path("weights"); }
  const TemporaryFolder folder_;
};

// Nothing happens; a rank is replaced from its peer's memory, several are one after the other; and
// before the first copy everybody begins again. Behind the last step some ranks may be done while
// others die: the run ends, and what it wrote is whole, whoever that is and whenever.
TEST_F(Recovery, RanksThatAreKilledChangeNothing) {
  constexpr int kLast = kRecoverySteps - 1;
  const struct {
    int ranks;
    std::vector<Kill> kills;
    int copy_every = 1;
  } cases[] = {{2, {}},
               {2, {{1, 4}}},
               {4, {{2, 2}, {0, 3}, {3, 6}}},
               {2, {{0, 1}}, 5},
               {4, {{1, kLast}}},
               {4, {{0, kLast}}},
               {4, {{0, kBeforeWriting}}},
               {4, {{0, kAfterWriting}}},
               {4, {{1, kAtTheEnd}}},
               {4, {{0, kAtTheEnd}}},
               {4, {{0, kAtTheEnd}, {1, kAtTheEnd}, {2, kAtTheEnd}}}};
  for (const auto& [ranks, kills, copy_every] : cases) {
    SCOPED_TRACE(kills.empty() ? 0 : kills[0].rank * 1000 + kills[0].step);
    fs::remove(weights_file());
    RunOptions run = options();
    run.copy_every = copy_every;
    EXPECT_EQ(train(ranks, run, kills), 0);
    expect_undisturbed(ranks);
  }
}

TEST_F(Recovery, FromACheckpointWhereNoPeerHoldsACopy) {
  RunOptions run = options();
  run.copy_every = 100;
  run.checkpoint_dir = folder_.path("checkpoints");
  run.checkpoint_every = 3;
  EXPECT_EQ(train(2, run, {{1, 6}}), 0);
  expect_undisturbed(2);
  // Of another start, these are not silently gone on from.
  run.recover = false;
  EXPECT_NE(train(2, run, {}), 0);
  // But they are if one says so, by any number of ranks.
  fs::remove(weights_file());
  fs::remove_all(checkpoint_path(run.checkpoint_dir, kRecoverySteps));
  run.resume_dir = run.checkpoint_dir;
  run.trainer.parallel.accumulate = 2;
  EXPECT_EQ(train(1, run, {}), 0);
  expect_undisturbed(2);
}

// Promise(training): Resuming does not silently change the learning rate | the manifest has the
//   planned number of steps
TEST_F(Recovery, AnotherScheduleIsNotSlippedInto) {
  RunOptions run = options();
  run.recover = false;
  run.checkpoint_dir = folder_.path("checkpoints");
  run.checkpoint_every = 3;
  EXPECT_EQ(train(2, run, {}), 0);
  fs::remove_all(checkpoint_path(run.checkpoint_dir, kRecoverySteps));
  const launch::Place alone;
  const Corpus& corpus = TinyText::get().corpus;
  run.trainer.parallel.accumulate = 2;
  run.resume_dir = run.checkpoint_dir;
  run.trainer.optimizer.steps = kRecoverySteps + 2;
  const absl::Status status = run_rank(run, corpus, alone);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_NE(status.message().find("--steps 8"), std::string::npos) << status;
  EXPECT_NE(status.message().find("--new-schedule"), std::string::npos) << status;
  run.new_schedule = true;
  EXPECT_TRUE(run_rank(run, corpus, alone).ok());
}

// However long it takes until somebody looks, what was good is still there.
TEST_F(Recovery, ARunThatDivergesEndsAndKeepsItsCheckpoints) {
  RunOptions run = options();
  run.recover = false;
  run.checkpoint_dir = folder_.path("checkpoints");
  run.checkpoint_every = 1;
  run.trainer.max_skipped = 2;
  run.trainer.optimizer.learning_rate = 1e37f;
  EXPECT_NE(train(2, run, {}), 0);
  EXPECT_FALSE(fs::exists(weights_file()));
  size_t files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(run.checkpoint_dir)) {
    if (entry.path().extension() != ".safetensors") continue;
    const std::string bytes = read_file(entry.path().string()).value();
    const SafetensorsHeader header = parse_safetensors(bytes).value();
    const auto& weights = header.tensors.at("weights");
    for (size_t i = 0; i < weights.elements(); ++i) {
      float value = 0;
      std::memcpy(&value, bytes.data() + weights.begin + i * sizeof value, sizeof value);
      ASSERT_TRUE(std::isfinite(value)) << entry.path();
    }
    ++files;
  }
  EXPECT_EQ(files, 4u);  // two checkpoints of two shards
}

TEST_F(Recovery, WithoutItAKilledRankEndsTheRun) {
  RunOptions run = options();
  run.recover = false;
  EXPECT_NE(train(2, run, {{1, 2}}), 0);
  EXPECT_FALSE(fs::exists(weights_file()));
}

TEST_F(Recovery, NeedsZeroAndASecondRank) {
  RunOptions run = options();
  launch::Place place;
  EXPECT_EQ(run_rank(run, TinyText::get().corpus, place).code(),
            absl::StatusCode::kInvalidArgument);
  place.ranks = 2;
  run.trainer.parallel.zero = 0;
  EXPECT_EQ(run_rank(run, TinyText::get().corpus, place).code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace baton::engine::train
