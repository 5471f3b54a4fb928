// What the cost model chooses, against what one must expect.
#include "collectives/prediction/cost_model.h"
#include "tests/test.h"

namespace baton::collectives::prediction {
namespace {

using testing::HasSubstr;

constexpr size_t kSlot = 512 << 10;
constexpr uint32_t kLanes = 8;

CostModel flat_model() { return CostModel(CostParameters{}, kSlot, kLanes); }

// Nodes of eight with a fast inside and a slow outside.
CostModel node_model() {
  CostParameters cost;
  cost.local = {1.5e-6, 1 / 40e9};
  cost.remote = {20e-6, 1 / 1e9};
  cost.node_size = 8;
  return CostModel(cost, kSlot, kLanes);
}

Choice choose(const CostModel& model, const CallShape& call, const Override& fixed = {}) {
  const absl::StatusOr<Choice> choice = model.choose(call, fixed);
  EXPECT_TRUE(choice.ok()) << choice.status();
  return choice.ok() ? *choice : Choice{};
}

TEST(CostModel, SmallCallsTakeFewRounds) {
  for (uint32_t ranks : {16, 64, 256}) {
    const Choice choice = choose(flat_model(), {.ranks = ranks, .bytes = 8});
    EXPECT_EQ(choice.spec.algorithm, Algorithm::kRecursiveDoubling) << ranks;
    EXPECT_EQ(choice.spec.channels, 1u);
    EXPECT_EQ(choice.part_bytes, 8u);
  }
}

// What a message takes, and a step of all ranks, in us, as measured on two cores.
TEST(CostModel, WhereRanksShareCoresTheWorkOfAllCounts) {
  struct Machine {
    uint32_t ranks;
    double alpha, shared_step;
    Algorithm best;
  };
  for (const Machine& machine :
       {Machine{4, 2, 0.85, Algorithm::kRecursiveDoubling},  // over shm
        Machine{16, 14, 3.4, Algorithm::kRecursiveDoubling}, Machine{64, 110, 75, Algorithm::kTree},
        Machine{16, 103, 103, Algorithm::kTree},  // over tcp
        Machine{64, 770, 770, Algorithm::kTree}}) {
    CostParameters cost;
    cost.local.alpha = machine.alpha * 1e-6;
    cost.shared_step = machine.shared_step * 1e-6;
    cost.node_size = machine.ranks;
    const auto all =
        must(CostModel(cost, kSlot, kLanes).candidates({.ranks = machine.ranks, .bytes = 8}));
    EXPECT_EQ(all.front().spec.algorithm, machine.best) << machine.ranks << " ranks";
    const auto direct = std::find_if(all.begin(), all.end(), [](const Choice& choice) {
      return choice.spec.algorithm == Algorithm::kDirect;
    });
    ASSERT_NE(direct, all.end());
    if (machine.ranks >= 64) {
      EXPECT_GT(direct->seconds, 5 * all.front().seconds);
    }
  }
}

TEST(CostModel, LargeCallsSendFewBytes) {
  for (uint32_t ranks : {3, 8, 64}) {
    const Choice choice = choose(flat_model(), {.ranks = ranks, .bytes = 256 << 20});
    EXPECT_THAT(choice.spec.algorithm,
                testing::AnyOf(Algorithm::kRing, Algorithm::kDirect, Algorithm::kHalvingDoubling))
        << ranks;
  }
}

TEST(CostModel, NodesWithSlowLinksBetweenThemMakeAHierarchy) {
  for (size_t bytes : {size_t{1} << 20, size_t{256} << 20}) {
    const Choice choice = choose(node_model(), {.ranks = 64, .bytes = bytes});
    EXPECT_EQ(choice.spec.algorithm, Algorithm::kHierarchical) << bytes;
    EXPECT_EQ(choice.spec.node_size, 8u);
  }
  // Without nodes there is none to be made.
  const auto flat = must(flat_model().candidates({.ranks = 64, .bytes = 1 << 20}));
  for (const Choice& choice : flat) EXPECT_NE(choice.spec.algorithm, Algorithm::kHierarchical);
}

TEST(CostModel, TakesWhatTheCallerFixes) {
  const CostModel model = flat_model();
  const CallShape call{.ranks = 8, .bytes = 64 << 20};
  const auto ring = must(model.candidates(call, {.algorithm = Algorithm::kTree, .channels = 2}));
  for (const Choice& choice : ring) {
    EXPECT_EQ(choice.spec.algorithm, Algorithm::kTree);
    EXPECT_EQ(choice.spec.channels, 2u);
  }
  const auto chunks = must(model.candidates(call, {.chunk_bytes = 100'000}));
  for (const Choice& choice : chunks) {
    EXPECT_LE(choice.part_bytes * max_message_parts(choice.spec), 100'000u);
    EXPECT_GT(choice.part_bytes * max_message_parts(choice.spec), 50'000u);
  }
}

TEST(CostModel, CutsIntoWholeElementsThatFitSlots) {
  const CostModel model = flat_model();
  for (Collective collective : {Collective::kAllReduce, Collective::kAllToAll,
                                Collective::kBroadcast, Collective::kReduceScatter}) {
    for (uint32_t ranks : {2, 7, 64}) {
      for (size_t bytes : {0, 8, 1000, 1 << 20, 1'000'000'000}) {
        const auto all = must(model.candidates(
            {.collective = collective, .ranks = ranks, .bytes = bytes, .element_bytes = 8}));
        for (const Choice& choice : all) {
          EXPECT_GE(choice.part_bytes, 8u);
          EXPECT_EQ(choice.part_bytes % 8, 0u);
          EXPECT_LE(choice.part_bytes * max_message_parts(choice.spec), kSlot);
          EXPECT_TRUE(std::isfinite(choice.seconds));
        }
        EXPECT_TRUE(std::is_sorted(all.begin(), all.end(), [](const Choice& a, const Choice& b) {
          return a.seconds < b.seconds;
        }));
      }
    }
  }
}

// Ranks that were asked different things before still choose alike.
TEST(CostModel, DoesNotDependOnItsPast) {
  CostModel asked = node_model();
  for (size_t bytes = 1; bytes < 64 << 20; bytes *= 3) {
    choose(asked, {.ranks = 24, .bytes = bytes});
  }
  asked.set_parameters(CostParameters{});
  const CallShape call{.collective = Collective::kBroadcast, .ranks = 24, .root = 3, .bytes = 1234};
  const Choice one = choose(asked, call), other = choose(flat_model(), call);
  EXPECT_EQ(one.spec, other.spec);
  EXPECT_EQ(one.part_bytes, other.part_bytes);
  EXPECT_EQ(one.seconds, other.seconds);
  EXPECT_EQ(choose(asked, call).seconds, one.seconds);
}

TEST(CostModel, RefusesWhatDoesNotExist) {
  const CostModel model = flat_model();
  const Override ring{.algorithm = Algorithm::kRing};
  const auto refused = model.choose({.collective = Collective::kAllToAll, .ranks = 4}, ring);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("direct"));
  EXPECT_FALSE(model.choose({.ranks = 0}).ok());
  EXPECT_FALSE(model.choose({.collective = Collective::kBroadcast, .ranks = 4, .root = 4}).ok());
}

TEST(CostModel, ServesEveryCollectiveOnAnyRankCount) {
  const CostModel models[] = {flat_model(), node_model()};
  for (int c = 0; c < kCollectives; ++c) {
    for (bool ordered : {false, true}) {
      for (uint32_t ranks : {1, 2, 5, 12}) {
        for (const CostModel& model : models) {
          const CallShape call{.collective = static_cast<Collective>(c),
                               .ranks = ranks,
                               .root = ranks - 1,
                               .bytes = 1 << 16,
                               .ordered = ordered};
          const absl::StatusOr<Choice> choice = model.choose(call);
          // Sends and receives run by no schedule.
          EXPECT_EQ(choice.ok(), call.collective != Collective::kSendReceive)
              << c << " of " << ranks << ": " << choice.status();
        }
      }
    }
  }
}

TEST(Explain, ShowsTheChosenOneFirst) {
  const CallShape call{.ranks = 8, .bytes = 1 << 20};
  const auto all = must(flat_model().candidates(call));
  const std::string table = explain(call, all, 1234.5e-6);
  EXPECT_THAT(table, HasSubstr("all_reduce of 1.0 MiB among 8 ranks"));
  EXPECT_THAT(table,
              HasSubstr(std::string("* ") + std::string(name_of(all.front().spec.algorithm))));
  EXPECT_THAT(table, HasSubstr("1.00x      1234.50\n"));
  for (Algorithm algorithm : {Algorithm::kRing, Algorithm::kTree, Algorithm::kDirect}) {
    EXPECT_THAT(table, HasSubstr(std::string(name_of(algorithm))));
  }
  EXPECT_THAT(explain(call, {}), HasSubstr("no candidates"));
}

TEST(CostParameters, AgreesOnTheMiddle) {
  CostParameters a, b, c;
  a.gamma = 1, b.gamma = 5, c.gamma = 2;
  a.remote.alpha = NAN, b.remote.alpha = 4, c.remote.alpha = 3;
  a.step = INFINITY, b.step = 1e7, c.step = 0.5;
  a.local.beta = b.local.beta = c.local.beta = -1;
  a.node_size = 8, b.node_size = 8, c.node_size = 0;
  const CostParameters agreed = agree({a, b, c});
  EXPECT_EQ(agreed.gamma, 2);
  EXPECT_EQ(agreed.remote.alpha, 3);
  EXPECT_EQ(agreed.step, 0.5);
  EXPECT_EQ(agreed.local.beta, LinkCost{}.beta);
  EXPECT_EQ(agreed.node_size, 8u);
  EXPECT_EQ(agreed, agree({c, a, b}));
  EXPECT_EQ(agree({}), CostParameters{});
}

TEST(CostParameters, SurviveTheWireAndNothingElseDoes) {
  CostParameters cost;
  cost.local = {1.25e-6, 3e-11};
  cost.shared_step = 7e-6;
  cost.node_size = 8;
  const std::string bytes = encode(cost);
  ASSERT_EQ(bytes.size(), kEncodedCostBytes);
  const auto back = must(decode_cost_parameters(bytes));
  EXPECT_EQ(back, cost);
  for (size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_FALSE(decode_cost_parameters(std::string_view(bytes).substr(0, size)).ok());
  }
  EXPECT_FALSE(decode_cost_parameters(bytes + "x").ok());
  EXPECT_FALSE(decode_cost_parameters(std::string(kEncodedCostBytes, '\0')).ok());
  EXPECT_FALSE(decode_cost_parameters(std::string(kEncodedCostBytes, '\xff')).ok());
}

}  // namespace
}  // namespace baton::collectives::prediction
