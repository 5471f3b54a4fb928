// Sharded checkpoints: resuming on any number of ranks, and everything that can be wrong with one.
#include "engine/files/files.h"
#include "engine/train/data_parallel/sharded_checkpoint.h"
#include "tests/engine_train/train_fixture.h"
#include "tests/forbidden_calls.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"

namespace baton::engine::train {
namespace {

namespace fs = std::filesystem;
using ::testing::Test;

constexpr RunIdentity kIdentity{1, 2, 3};
constexpr uint64_t kParameters = 4000;

ShardState shard(int64_t steps, int rank, int ranks) {
  ShardState state;
  state.steps = steps;
  const size_t part = 4096 / static_cast<size_t>(ranks);
  state.pieces = {{rank * part, rank * part + part / 2},
                  {rank * part + part / 2, (rank + 1) * part}};
  state.values = AlignedArray<float>(3 * part);
  for (size_t i = 0; i < state.values.size(); ++i) {
    state.values[i] = static_cast<float>(i) + 0.25f * static_cast<float>(rank);
  }
  return state;
}

class Checkpoints : public Test {
 protected:
  void write(int64_t steps, int ranks) {
    CheckpointManifest manifest{"", steps, kParameters, 100, kIdentity, {}};
    for (int rank = 0; rank < ranks; ++rank) {
      manifest.shards.push_back(
          must(write_shard(directory_, shard(steps, rank, ranks), rank, ranks)));
    }
    ASSERT_EQ(finish_checkpoint(directory_, manifest), absl::OkStatus());
  }
  absl::StatusOr<CheckpointManifest> find(const RunIdentity& identity = kIdentity) {
    return find_checkpoint(directory_, identity, kParameters);
  }
  void overwrite(const std::string& name, const std::string& bytes) {
    std::ofstream(checkpoint_path(directory_, 10) + "/" + name, std::ios::binary) << bytes;
  }
  std::string path(const std::string& name) { return checkpoint_path(directory_, 10) + "/" + name; }
  // The error must say which file, and what to do.
  void expect_lost(const std::string& name) {
    auto manifest = must(find());
    const absl::Status status = read_shard(manifest, 1).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr(name));
    EXPECT_THAT(std::string(status.message()), ::testing::HasSubstr("remove"));
    EXPECT_TRUE(read_shard(manifest, 0).ok());
  }

  const TemporaryFolder folder_;
  const std::string directory_ = folder_.path("checkpoints");  // not there yet
};

TEST_F(Checkpoints, ReadBackWhatWasWritten) {
  write(10, 2);
  auto manifest = must(find());
  EXPECT_EQ(manifest.steps, 10);
  ASSERT_EQ(manifest.shards.size(), 2u);
  for (int rank : {0, 1}) {
    auto read = must(read_shard(manifest, rank));
    const ShardState expected = shard(10, rank, 2);
    EXPECT_EQ(read.steps, 10);
    EXPECT_EQ(read.pieces, expected.pieces);
    EXPECT_EQ(std::vector(read.values.data(), read.values.data() + read.values.size()),
              std::vector(expected.values.data(), expected.values.data() + expected.values.size()));
  }
}

TEST_F(Checkpoints, KeepTheNewestTwoAndIgnoreIncompleteOnes) {
  for (int64_t steps : {10, 20, 30}) write(steps, 2);
  ASSERT_TRUE(write_shard(directory_, shard(40, 0, 2), 0, 2).ok());  // and then a crash
  EXPECT_FALSE(fs::exists(checkpoint_path(directory_, 10)));
  EXPECT_TRUE(fs::exists(checkpoint_path(directory_, 20)));
  ASSERT_TRUE(find().ok());
  EXPECT_EQ(find()->steps, 30);
  write(50, 2);
  EXPECT_FALSE(fs::exists(checkpoint_path(directory_, 40)));
  // The remains of a run with more ranks do not stay beside the files of this one.
  ASSERT_TRUE(write_shard(directory_, shard(60, 3, 4), 3, 4).ok());
  write(60, 1);
  EXPECT_EQ(std::distance(fs::directory_iterator(checkpoint_path(directory_, 60)), {}), 2);
}

// The calls that remove files and folders.
const std::vector<long> kRemovals = {
#ifdef SYS_unlink
    SYS_unlink, SYS_rmdir,
#endif
    SYS_unlinkat};

TEST_F(Checkpoints, AKillWhileOneIsRemovedLeavesNoHalfOfOne) {
  for (int64_t steps : {10, 20}) write(steps, 2);
  const auto wholes = [&] {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(directory_)) {
      const bool named = !entry.path().has_extension();
      if (named) names.push_back(entry.path().filename());
      EXPECT_TRUE(!named || fs::exists(entry.path() / "manifest.json")) << entry.path();
      EXPECT_TRUE(!named || fs::exists(entry.path() / "shard-1-of-2.safetensors")) << entry.path();
    }
    std::sort(names.begin(), names.end());
    return names;
  };
  // One makes way for a third, then one for its own like.
  for (const int64_t steps : {30, 30}) {
    const pid_t child = fork();
    if (child == 0) {
      CheckpointManifest manifest{"", steps, kParameters, 100, kIdentity, {}};
      for (int rank : {0, 1}) {
        manifest.shards.push_back(*write_shard(directory_, shard(steps, rank, 2), rank, 2));
      }
      // As a kill at that moment would end it.
      if (!forbid(kRemovals, SECCOMP_RET_KILL_PROCESS)) _exit(77);
      (void)finish_checkpoint(directory_, manifest);
      _exit(1);  // nothing was removed
    }
    int how = 0;
    ASSERT_EQ(child, waitpid(child, &how, 0));
    if (WIFEXITED(how) && WEXITSTATUS(how) == 77) GTEST_SKIP() << "no seccomp here";
    EXPECT_TRUE(WIFSIGNALED(how)) << how;
    EXPECT_THAT(wholes(), ::testing::ElementsAre("step-00000020", "step-00000030"));
    ASSERT_TRUE(find().ok());
    EXPECT_EQ(find()->steps, 30);
    EXPECT_TRUE(read_shard(*find(), 1).ok());
  }
  // The next one clears up.
  write(40, 2);
  EXPECT_THAT(wholes(), ::testing::ElementsAre("step-00000030", "step-00000040"));
  EXPECT_EQ(std::distance(fs::directory_iterator(directory_), {}), 2);
}

// Promise(training): A checkpoint is never written to after it exists | written elsewhere, synced,
//   then renamed
TEST_F(Checkpoints, AreNeverWrittenTo) {
  const std::string name = "shard-0-of-2.safetensors";
  write(10, 2);
  const std::string good = read_file(path(name)).value();
  ShardState other = shard(10, 0, 2);
  other.values[0] = 77;
  ASSERT_TRUE(write_shard(directory_, other, 0, 2).ok());  // the same step again, and then a crash
  EXPECT_EQ(read_file(path(name)).value(), good);
  ASSERT_TRUE(find().ok());
  EXPECT_TRUE(read_shard(*find(), 0).ok()) << read_shard(*find(), 0).status();
  // Between the two renames that replace it.
  fs::rename(checkpoint_path(directory_, 10), checkpoint_path(directory_, 10) + ".old");
  ASSERT_TRUE(find().ok()) << find().status();
  EXPECT_TRUE(read_shard(*find(), 0).ok()) << read_shard(*find(), 0).status();
  write(10, 1);
  EXPECT_EQ(find()->shards.size(), 1u);
  EXPECT_EQ(std::distance(fs::directory_iterator(directory_), {}), 1);
}

TEST_F(Checkpoints, HoldFiniteNumbersOnly) {
  for (const float bad : {NAN, INFINITY}) {
    ShardState state = shard(10, 0, 1);
    state.values[5000] = bad;
    const absl::Status status = write_shard(directory_, state, 0, 1).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss) << status;
    EXPECT_FALSE(fs::exists(directory_));
  }
}

TEST_F(Checkpoints, RefuseMissingShortAndDamagedShards) {
  const std::string name = "shard-1-of-2.safetensors";
  write(10, 2);
  const std::string good = read_file(path(name)).value();
  overwrite(name, good.substr(0, good.size() / 2));
  expect_lost(name);
  std::string flipped = good;
  flipped[flipped.size() - 5] ^= 1;
  overwrite(name, flipped);
  expect_lost(name);
  fs::remove(path(name));
  expect_lost(name);
  overwrite(name, good);
  EXPECT_TRUE(read_shard(*find(), 1).ok());
}

TEST_F(Checkpoints, RefuseOtherRunsAndDamagedManifests) {
  EXPECT_EQ(find().status().code(), absl::StatusCode::kNotFound);
  write(10, 2);
  for (const RunIdentity& other :
       {RunIdentity{9, 2, 3}, RunIdentity{1, 9, 3}, RunIdentity{1, 2, 9}}) {
    EXPECT_EQ(find(other).status().code(), absl::StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(find_checkpoint(directory_, kIdentity, kParameters + 1).status().code(),
            absl::StatusCode::kInvalidArgument);
  const std::string good = read_file(path("manifest.json")).value();
  for (size_t size : {size_t{0}, size_t{1}, good.size() / 2, good.size() - 3}) {
    overwrite("manifest.json", good.substr(0, size));
    EXPECT_EQ(find().status().code(), absl::StatusCode::kInvalidArgument) << size;
  }
  overwrite("manifest.json", "{\"format\": 2}");
  EXPECT_EQ(find().status().code(), absl::StatusCode::kInvalidArgument);
}

// Trains to step 3 on `before` ranks, then goes on to the end with `after` ranks.
void resume(const std::string& directory, int before, int after) {
  constexpr int kSteps = 6, kStop = 3;
  TrainerOptions options = tiny_options(kSteps);
  options.parallel.zero = 1;
  // Four micro-batches in one sum, on any number of ranks that is 1 or 4.
  options.parallel.accumulate = 4 / before;
  const TinyText& text = TinyText::get();
  CheckpointManifest manifest{"", kStop, ParameterMap(options.model).size, kSteps, kIdentity, {}};
  manifest.shards.resize(before);
  run_ranks(before, [&](Communicator* comm, int rank) {
    ComputePool pool(1);
    auto trainer = must(Trainer::create(options, text.corpus, pool, comm));
    run_steps(*trainer, 0, kStop);
    ShardState state;
    ASSERT_TRUE(trainer->save(kStop, state).ok());
    manifest.shards[rank] = write_shard(directory, state, rank, before).value();
  });
  ASSERT_TRUE(finish_checkpoint(directory, manifest).ok());
  options.parallel.accumulate = 4 / after;
  std::vector<std::vector<float>> resumed(after);
  run_ranks(after, [&](Communicator* comm, int rank) {
    ComputePool pool(1);
    auto trainer = must(Trainer::create(options, text.corpus, pool, comm));
    const auto found = must(find_checkpoint(directory, kIdentity, trainer->map().size));
    for (int shard = 0; shard < before; ++shard) {
      const auto state = must(read_shard(found, shard));
      ASSERT_TRUE(trainer->load(state).ok());
    }
    run_steps(*trainer, kStop, kSteps);
    resumed[rank] = weights_of(*trainer);
  });
  options.parallel.accumulate = 4;
  const std::vector<float> expected = train_ranks(1, options, kSteps)[0];
  for (const std::vector<float>& weights : resumed) EXPECT_EQ(weights, expected);
}

TEST_F(Checkpoints, ResumeOnAnotherNumberOfRanksWithTheSameBits) {
  resume(directory_, 4, 1);
  fs::remove_all(directory_);
  resume(directory_, 1, 4);
}

}  // namespace
}  // namespace baton::engine::train
