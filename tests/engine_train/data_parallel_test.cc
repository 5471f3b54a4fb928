// Ranks, micro-batches, buckets, ZeRO and overlap: the weights are the same, bit for bit.
#include "tests/engine_model/test_model.h"
#include "tests/engine_train/train_fixture.h"
#include "tests/test.h"

namespace baton::engine::train {
namespace {

constexpr int kParallelSteps = 6;  // the last two with long sequences

std::vector<float> alone(int accumulate) {
  TrainerOptions options = tiny_options(kParallelSteps);
  options.parallel.accumulate = accumulate;
  return train_ranks(1, options, kParallelSteps)[0];
}

struct Variant {
  const char* name;
  int ranks;
  int zero;
  bool overlap;
  size_t bucket_bytes;
};

class OrderedRanks : public ::testing::TestWithParam<Variant> {};

TEST_P(OrderedRanks, EqualOneRankWithAsManyMicroBatches) {
  const Variant& variant = GetParam();
  TrainerOptions options = tiny_options(kParallelSteps);
  options.parallel.zero = variant.zero;
  options.parallel.overlap = variant.overlap;
  options.parallel.bucket_bytes = variant.bucket_bytes;
  const std::vector<float> expected = alone(variant.ranks);
  for (const std::vector<float>& weights : train_ranks(variant.ranks, options, kParallelSteps)) {
    EXPECT_EQ(weights, expected);
  }
}

INSTANTIATE_TEST_SUITE_P(
    Variants, OrderedRanks,
    ::testing::Values(Variant{"TwoRanks", 2, 0, true, 0},
                      Variant{"TwoRanksSmallBuckets", 2, 0, true, 1},
                      Variant{"TwoRanksWithoutOverlap", 2, 0, false, 16 << 10},
                      Variant{"TwoRanksZero", 2, 1, true, 0},
                      Variant{"TwoRanksZeroSmallBuckets", 2, 1, true, 1},
                      Variant{"TwoRanksZeroWithoutOverlap", 2, 1, false, 16 << 10},
                      Variant{"FourRanks", 4, 0, true, 1}, Variant{"FourRanksZero", 4, 1, true, 1}),
    [](const auto& test) { return test.param.name; });

// One rank's weights are spoilt for one step: no rank applies what came of it.
void expect_a_bad_step_is_skipped(int ranks, int zero, bool overlap) {
  TrainerOptions options = tiny_options(kParallelSteps);
  options.parallel.zero = zero;
  options.parallel.overlap = overlap;
  std::vector<std::vector<float>> weights(ranks), expected(ranks);
  for (const bool spoil : {true, false}) {
    run_ranks(ranks, [&](Communicator* comm, int rank) {
      ComputePool pool(1);
      auto trainer = Trainer::create(options, TinyText::get().corpus, pool, comm).value();
      ShardState good, bad;
      for (int step = 0; step < kParallelSteps; ++step) {
        if (step == 3) {
          if (!spoil) continue;
          ASSERT_TRUE(trainer->finish().ok());
          for (ShardState* state : {&good, &bad}) ASSERT_TRUE(trainer->save(step, *state).ok());
          std::fill_n(bad.values.data(), bad.owned(), NAN);  // the weights
          if (rank == ranks - 1) {
            ASSERT_TRUE(trainer->load(bad).ok());
          }
        }
        const auto report = must(trainer->step(step));
        EXPECT_EQ(report.skipped, spoil && step == 3);
        if (step == 3 && rank == ranks - 1) {
          ASSERT_TRUE(trainer->load(good).ok());
        }
      }
      (spoil ? weights : expected)[rank] = weights_of(*trainer);
    });
  }
  EXPECT_EQ(weights, expected);
}

// Promise(training): A gradient that is not finite is applied and saved nowhere | all ranks know
//   all losses before they update
TEST(DataParallel, AGradientThatIsNotFiniteIsAppliedNowhere) {
  expect_a_bad_step_is_skipped(1, 0, true);
  expect_a_bad_step_is_skipped(2, 0, true);
  expect_a_bad_step_is_skipped(2, 1, true);
  expect_a_bad_step_is_skipped(2, 1, false);
}

TEST(DataParallel, HowMicroBatchesAreAddedChangesTheSumOnlyByRounding) {
  TrainerOptions options = tiny_options(kParallelSteps);
  options.parallel.accumulate = 2;
  const auto ranks = train_ranks(2, options, kParallelSteps);
  EXPECT_EQ(ranks[0], ranks[1]);
  const std::vector<float> parts = alone(4);
  for (const std::vector<float>& other : {alone(1), ranks[0]}) {
    ASSERT_EQ(other.size(), parts.size());
    EXPECT_NE(other, parts);
    for (size_t i = 0; i < parts.size(); ++i) ASSERT_NEAR(other[i], parts[i], 2e-2) << i;
  }
}

TEST(DataParallel, Bf16OnTheWireIsTheSameAtAllRanksAndCloseToF32) {
  std::vector<std::vector<float>> sharded;
  for (int zero : {0, 1}) {
    TrainerOptions options = tiny_options(kParallelSteps);
    options.parallel.wire = DataType::kBF16;
    options.parallel.zero = zero;
    const auto weights = train_ranks(2, options, kParallelSteps);
    EXPECT_EQ(weights[0], weights[1]);
    sharded.push_back(weights[0]);
  }
  EXPECT_EQ(sharded[0], sharded[1]);
  const std::vector<float> exact = alone(2);
  EXPECT_NE(sharded[0], exact);
  for (size_t i = 0; i < exact.size(); ++i) ASSERT_NEAR(sharded[0][i], exact[i], 5e-2) << i;
}

TEST(DataParallel, RanksReportTheSameLossNormAndEvaluation) {
  double bits[3];
  StepReport reports[3];
  const auto body = [&](int place) {
    return [&, place](Communicator* comm, int rank) {
      TrainerOptions options = tiny_options(kParallelSteps);
      options.parallel.zero = 1;
      if (comm == nullptr) options.parallel.accumulate = 2;
      ComputePool pool(1);
      auto trainer = must(Trainer::create(options, TinyText::get().corpus, pool, comm));
      const auto report = must(trainer->step(0));
      reports[place + rank] = report;
      bits[place + rank] = trainer->held_out_bits_per_byte(5, false).value();
    };
  };
  run_ranks(1, body(0));
  run_ranks(2, body(1));
  for (int i : {1, 2}) {
    EXPECT_EQ(reports[i].loss, reports[0].loss);
    EXPECT_EQ(reports[i].norm, reports[0].norm);
    EXPECT_EQ(bits[i], bits[0]);
  }
}

TEST(DataParallel, RefusesBatchesThatCannotBeDivided) {
  ComputePool pool(1);
  const auto create = [&](int accumulate) {
    TrainerOptions options = tiny_options(kParallelSteps);
    options.parallel.accumulate = accumulate;
    return Trainer::create(options, TinyText::get().corpus, pool).status().code();
  };
  EXPECT_EQ(create(3), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(create(8), absl::StatusCode::kInvalidArgument);  // only four long sequences
  EXPECT_EQ(create(0), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(create(4), absl::StatusCode::kOk);
}

TEST(Buckets, CoverTheArrayInEqualPartsOfWholeBlocks) {
  const ParameterMap map(tiny_model_config());
  for (int ranks : {1, 2, 3, 7}) {
    for (size_t bytes : {size_t{0}, size_t{1}, size_t{20000}, size_t{1} << 30}) {
      const std::vector<FlatRange> buckets = cut_buckets(map, ranks, bytes);
      size_t end = 0;
      for (const FlatRange& bucket : buckets) {
        EXPECT_EQ(bucket.begin, end);
        EXPECT_GT(bucket.end, bucket.begin);
        EXPECT_EQ(bucket.size() % (kNormBlock * ranks), 0u);
        EXPECT_EQ(part_of(bucket, 0, ranks).begin, bucket.begin);
        EXPECT_EQ(part_of(bucket, ranks - 1, ranks).end, bucket.end);
        end = bucket.end;
      }
      EXPECT_EQ(end, padded_size(map.size, ranks));
      EXPECT_GE(end, map.size);
    }
  }
}

}  // namespace
}  // namespace baton::engine::train
