// What schedules cost, as the textbooks say, and what they look like where it matters.
#include <iostream>

#include "collectives/schedules/schedule.h"
#include "collectives/types.h"
#include "tests/sanitized.h"
#include "tests/schedules/verify.h"
#include "tests/test.h"

namespace baton::collectives::schedules {
namespace {

using testing::HasSubstr;
using A = Algorithm;
using C = Collective;
using Kind = Step::Kind;

proof::VerifyReport proven(const ScheduleSpec& spec,
                           uint32_t sampled_parts = proof::kSampledParts) {
  return must(proof::verify(spec, sampled_parts));
}

uint32_t log2_up(uint32_t n) {
  uint32_t log = 0;
  while ((1u << log) < n) ++log;
  return log;
}

TEST(Shape, RingSendsTheLeastInTheMostRounds) {
  for (const uint32_t n : {2u, 3u, 8u, 13u, 64u}) {
    const proof::VerifyReport all = proven({.algorithm = A::kRing, .ranks = n, .channels = 4});
    EXPECT_EQ(all.most_parts_sent, 2 * (n - 1));
    EXPECT_EQ(all.most_parts_reduced, n - 1);
    EXPECT_EQ(all.rounds, 2 * (n - 1));
    for (const C half : {C::kReduceScatter, C::kAllGather}) {
      const proof::VerifyReport report =
          proven({.collective = half, .algorithm = A::kRing, .ranks = n});
      EXPECT_EQ(report.most_parts_sent, n - 1);
      EXPECT_EQ(report.rounds, n - 1);
    }
  }
}

TEST(Shape, LogStepAlgorithmsTakeLogSteps) {
  for (const uint32_t n : {2u, 4u, 16u, 64u}) {
    const uint32_t log = log2_up(n);
    EXPECT_EQ(proven({.algorithm = A::kRecursiveDoubling, .ranks = n}).rounds, log);
    const proof::VerifyReport halving = proven({.algorithm = A::kHalvingDoubling, .ranks = n});
    EXPECT_EQ(halving.rounds, 2 * log);
    EXPECT_EQ(halving.most_parts_sent, 2 * (n - 1));
    EXPECT_EQ(halving.most_parts_reduced, n - 1);
  }
  for (uint32_t n = 2; n <= 64; ++n) {
    const uint32_t log = log2_up(n);
    const proof::VerifyReport gather =
        proven({.collective = C::kAllGather, .algorithm = A::kRecursiveDoubling, .ranks = n});
    EXPECT_EQ(gather.rounds, log);
    EXPECT_EQ(gather.most_parts_sent, n - 1);
    EXPECT_EQ(
        proven({.collective = C::kBarrier, .algorithm = A::kRecursiveDoubling, .ranks = n}).rounds,
        log);
    EXPECT_LE(proven({.algorithm = A::kRecursiveDoubling, .ranks = n}).rounds, log + 1);
    EXPECT_LE(proven({.algorithm = A::kTree, .ranks = n}).rounds, 2 * log + 1);
  }
}

TEST(Shape, DirectTakesOneRoundEachWay) {
  EXPECT_EQ(proven({.algorithm = A::kDirect, .ranks = 16}).rounds, 2u);
  EXPECT_EQ(proven({.collective = C::kAllToAll, .algorithm = A::kDirect, .ranks = 16}).rounds, 1u);
  // Ordered costs no more on the wire.
  const proof::VerifyReport ordered =
      proven({.algorithm = A::kDirect, .ranks = 16, .ordered = true});
  EXPECT_EQ(ordered.rounds, 2u);
  EXPECT_EQ(ordered.most_parts_sent, 30u);
}

TEST(Shape, HierarchicalIsTwoRingsAndHalvingDoublingBetween) {
  const uint32_t node = 8, nodes = 8, part = nodes;
  const proof::VerifyReport report =
      proven({.algorithm = A::kHierarchical, .ranks = node * nodes, .node_size = node});
  EXPECT_EQ(report.rounds, 2 * (node - 1) + 2 * log2_up(nodes));
  EXPECT_EQ(report.most_parts_sent, 2 * (node - 1) * part + 2 * (nodes - 1));
}

TEST(Shape, EveryRankIsALeafOfOneTree) {
  for (const uint32_t n : {6u, 7u, 16u, 33u}) {
    for (uint32_t rank = 1; rank < n; ++rank) {
      int inside = 0;
      for (uint32_t channel = 0; channel < 2; ++channel) {
        const auto program =
            *write_program({.algorithm = A::kTree, .ranks = n, .channels = 2}, rank, channel);
        inside += std::any_of(program.steps.begin(), program.steps.end(),
                              [](const Step& s) { return s.kind == Kind::kReceiveReduce; });
      }
      EXPECT_LE(inside, n % 2 == 0 ? 1 + (rank == n - 1) : 1) << rank << " of " << n;
    }
  }
}

TEST(Shape, TwoRanksExchangeWithoutACopy) {
  for (uint32_t rank = 0; rank < 2; ++rank) {
    const auto program =
        *write_program({.algorithm = A::kRecursiveDoubling, .ranks = 2, .separate = true}, rank);
    ASSERT_EQ(program.steps.size(), 2u);
    EXPECT_EQ(program.scratch_parts, 0u);
    EXPECT_EQ(program.steps[0].kind, Kind::kSend);
    EXPECT_EQ(program.steps[0].source.buffer, BufferName::kInput);
    EXPECT_EQ(program.steps[1].kind, Kind::kReceiveReduce);
    EXPECT_EQ(program.steps[1].source.buffer, BufferName::kInput);
    EXPECT_EQ(program.steps[1].target.buffer, BufferName::kOutput);
    EXPECT_TRUE(program.steps[1].final);
  }
  proven({.algorithm = A::kRecursiveDoubling, .ranks = 2, .separate = true});
}

TEST(Shape, OneRankCopiesOrDoesNothing) {
  for (int c = 0; c < kCollectives; ++c) {
    for (const A algorithm : algorithms_for(static_cast<C>(c))) {
      const auto program =
          *write_program({.collective = static_cast<C>(c), .algorithm = algorithm}, 0);
      EXPECT_EQ(program.steps.size(), static_cast<C>(c) == C::kBarrier ? 0u : 1u);
    }
  }
}

// A slot must hold the largest message, and need not be larger.
TEST(Shape, LargestMessageIsAsPromised) {
  for (int c = 0; c < kCollectives; ++c) {
    for (const A algorithm : algorithms_for(static_cast<C>(c))) {
      for (uint32_t n = 2; n <= 24; ++n) {
        for (const uint32_t node : {1u, 4u}) {
          const ScheduleSpec spec{.collective = static_cast<C>(c),
                                  .algorithm = algorithm,
                                  .ranks = n,
                                  .node_size = node};
          uint32_t largest = 1;
          for (uint32_t rank = 0; rank < n; ++rank) {
            const auto program = *write_program(spec, rank);
            EXPECT_EQ(program.max_message_parts, max_message_parts(spec));
            for (const Step& step : program.steps) {
              if (step.kind == Kind::kSend) largest = std::max(largest, step.parts);
            }
          }
          EXPECT_LE(largest, max_message_parts(spec)) << spec.to_string();
          if (algorithm != A::kHierarchical) {
            EXPECT_EQ(largest, max_message_parts(spec)) << spec.to_string();
          }
        }
      }
    }
  }
}

TEST(Shape, ThousandsOfRanksAreProvedBySample) {
  for (const uint32_t n : {65u, 100u, 1000u, 4096u}) {
    if (kSanitized && n > 100) {
      std::cout << "under a sanitizer: up to 100 ranks\n";
      return;
    }
    for (const A algorithm : {A::kRecursiveDoubling, A::kTree}) {
      proven({.algorithm = algorithm, .ranks = n});
    }
    for (const C collective : {C::kBroadcast, C::kReduce}) {
      proven({.collective = collective, .algorithm = A::kHierarchical, .ranks = n, .node_size = 8});
    }
    proven({.collective = C::kBroadcast, .algorithm = A::kTree, .ranks = n, .root = n / 3});
    proven({.collective = C::kBarrier, .algorithm = A::kRecursiveDoubling, .ranks = n});
  }
  proven({.algorithm = A::kHierarchical, .ranks = 4096, .node_size = 8}, 4);
  proven({.algorithm = A::kHierarchical, .ranks = 1000, .node_size = 7});
  proven({.algorithm = A::kHalvingDoubling, .ranks = 1000});
  for (const C collective : {C::kReduceScatter, C::kAllGather}) {
    proven({.collective = collective, .algorithm = A::kHierarchical, .ranks = 300, .node_size = 8});
    proven({.collective = collective, .algorithm = A::kHalvingDoubling, .ranks = 500});
  }
  proven({.algorithm = A::kRing, .ranks = 101, .channels = 3});
}

// For small blocks few rounds, for large ones nothing twice.
TEST(Shape, GatherAndScatterTakeLogRoundsOrSendEachBlockOnce) {
  for (const C collective : {C::kGather, C::kScatter}) {
    for (const uint32_t n : {2u, 3u, 5u, 16u, 61u}) {
      const proof::VerifyReport tree = proven({.collective = collective,
                                               .algorithm = A::kRecursiveDoubling,
                                               .ranks = n,
                                               .root = n / 3});
      EXPECT_LE(tree.rounds, log2_up(n));
      const proof::VerifyReport star =
          proven({.collective = collective, .algorithm = A::kDirect, .ranks = n, .root = n / 3});
      EXPECT_EQ(star.rounds, 1u);
      EXPECT_EQ(star.messages, n - 1);
    }
  }
}

// A message then is as long as its part, whichever rank looks.
TEST(Shape, UnevenBlocksTravelAlone) {
  int found = 0;
  for (const C collective : {C::kAllGather, C::kReduceScatter}) {
    for (const bool ordered : {false, true}) {
      for (const A algorithm : algorithms_for(collective, ordered)) {
        for (uint32_t n = 2; n <= 9; ++n) {
          const ScheduleSpec spec{
              .collective = collective, .algorithm = algorithm, .ranks = n, .ordered = ordered};
          if (!takes_uneven_blocks(spec)) continue;
          ++found;
          EXPECT_LE(proven(spec).most_parts_sent, n - 1) << spec.to_string();
          for (uint32_t rank = 0; rank < n; ++rank) {
            const auto program = *write_program(spec, rank);
            for (const Step& step : program.steps) {
              EXPECT_EQ(step.parts, 1u) << spec.to_string();
              if (step.kind == Kind::kSend) {
                EXPECT_NE(step.source.buffer, BufferName::kScratch) << spec.to_string();
                // Into scratch goes the rank's own block alone.
                if (collective == C::kReduceScatter) {
                  EXPECT_EQ(step.source.part, step.peer);
                }
              } else if (step.target.buffer == BufferName::kScratch) {
                EXPECT_EQ(collective, C::kReduceScatter) << spec.to_string();
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(found, 8);
}

TEST(Spec, RefusesWhatDoesNotExist) {
  const auto why = [](const ScheduleSpec& spec) { return std::string(validate(spec).message()); };
  EXPECT_THAT(why({.collective = C::kAllToAll, .ranks = 4}), HasSubstr("use direct"));
  EXPECT_THAT(why({.collective = C::kReduce, .algorithm = A::kHalvingDoubling, .ranks = 4}),
              HasSubstr("use ring or recursive_doubling"));
  EXPECT_THAT(why({.ranks = 4, .ordered = true}), HasSubstr("use direct or recursive_doubling"));
  EXPECT_THAT(why({.ranks = 0}), HasSubstr("ranks"));
  EXPECT_THAT(why({.ranks = 2, .root = 2}), HasSubstr("no rank 2"));
  EXPECT_THAT(why({.ranks = 2, .channels = 0}), HasSubstr("channels"));
  EXPECT_FALSE(write_program({.ranks = 2}, 2).ok());
  EXPECT_FALSE(write_program({.ranks = 2}, 0, 1).ok());
  EXPECT_THAT(ScheduleSpec({.ranks = 8, .channels = 2, .ordered = true}).to_string(),
              "all_reduce ring n=8 channels=2 ordered");
}

TEST(Names, AreReadAsTheyAreWritten) {
  for (int i = 0; i < kDataTypes; ++i) {
    const auto type = static_cast<DataType>(i);
    EXPECT_EQ(*parse_data_type(name_of(type)), type);
  }
  for (int i = 0; i < kAlgorithms; ++i) {
    const auto algorithm = static_cast<Algorithm>(i);
    EXPECT_EQ(*parse_algorithm(name_of(algorithm)), algorithm);
  }
  for (int i = 0; i < kReduceOps; ++i) {
    const auto op = static_cast<ReduceOp>(i);
    EXPECT_EQ(*parse_reduce_op(name_of(op)), op);
  }
  EXPECT_EQ(*parse_data_type("bfloat16"), DataType::kBF16);
  EXPECT_EQ(*parse_data_type("int64"), DataType::kI64);
  EXPECT_EQ(*parse_data_type("uint32"), DataType::kU32);
  EXPECT_EQ(*parse_reduce_op("mulsum"), ReduceOp::kPreMulSum);
  EXPECT_THAT(std::string(parse_data_type("f8").status().message()), HasSubstr("f32 (float)"));
  EXPECT_EQ(size_of(DataType::kF64), 8u);
}

}  // namespace
}  // namespace baton::collectives::schedules
