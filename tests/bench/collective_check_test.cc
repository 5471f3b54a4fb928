// The inputs are exact whatever the order, and every kind of mistake is counted.
#include "bench/nccl_tests/collective_check.h"

#include "collectives/reduce/reduce.h"
#include "tests/test.h"

namespace baton::bench {
namespace {

using Bytes = std::vector<uint8_t>;

constexpr std::array kReducing = {Measured::kAllReduce, Measured::kReduceScatter,
                                  Measured::kReduce};

std::string describe(const CollectiveCase& c) {
  return absl::StrCat(std::string(name_of(c.collective)), " ", std::string(name_of(c.type)), " ",
                      std::string(name_of(c.op)), " of ", c.ranks);
}

std::vector<Bytes> inputs_of(const CollectiveCase& c, size_t elements) {
  std::vector<Bytes> inputs;
  for (int rank = 0; rank < c.ranks; ++rank) {
    Bytes& input = inputs.emplace_back(elements * size_of(c.type));
    fill_input(c, rank, input.data(), elements);
    if (c.op != ReduceOp::kPreMulSum) continue;
    Bytes factor(size_of(c.type));
    fill_factor(c, rank, factor.data());
    collectives::reduce::multiply(c.type, input.data(), input.data(), factor.data(), elements);
  }
  return inputs;
}

// Combines in the given order of ranks, rounding to the type after each step, as a tree does if
// `pairwise`. The average divides at the last step, as schedules do.
Bytes combine(const CollectiveCase& c, const std::vector<Bytes>& inputs,
              const std::vector<int>& order, bool pairwise) {
  const size_t elements = inputs[0].size() / size_of(c.type);
  std::vector<Bytes> values;
  for (const int rank : order) values.push_back(inputs[static_cast<size_t>(rank)]);
  while (values.size() > 1) {
    const bool last = values.size() == 2;
    const uint32_t by = last && c.op == ReduceOp::kAvg ? static_cast<uint32_t>(c.ranks) : 1;
    std::vector<Bytes> next;
    for (size_t i = 0; i < values.size(); ++i) {
      const bool joins = i + 1 < values.size() && (pairwise || i == 0);
      if (joins) {
        collectives::reduce::reduce(c.type, c.op, values[i].data(), values[i].data(),
                                    values[i + 1].data(), elements, by);
      }
      next.push_back(std::move(values[i]));
      i += joins ? 1 : 0;
    }
    values = std::move(next);
  }
  return values[0];
}

TEST(CollectiveCheck, EveryOrderOfCombiningGivesTheExpectedBits) {
  std::mt19937 random(1);
  for (int type = 0; type < kDataTypes; ++type) {
    for (int op = 0; op < kReduceOps; ++op) {
      for (const int ranks : {2, 3, 8, 13, 64}) {
        const CollectiveCase c{.collective = Measured::kAllReduce,
                               .type = static_cast<DataType>(type),
                               .op = static_cast<ReduceOp>(op),
                               .ranks = ranks,
                               .call = 7};
        if (!combines(c.type, c.op)) continue;
        const size_t elements = 200;
        const std::vector<Bytes> inputs = inputs_of(c, elements);
        std::vector<int> order(static_cast<size_t>(ranks));
        std::iota(order.begin(), order.end(), 0);
        for (int round = 0; round < 4; ++round) {
          const Bytes result = combine(c, inputs, order, round % 2 == 1);
          ASSERT_EQ(count_wrong(c, 0, result.data(), elements), 0u) << describe(c);
          std::shuffle(order.begin(), order.end(), random);
        }
      }
    }
  }
}

TEST(CollectiveCheck, ManyRanksOverflowNothing) {
  for (const DataType type :
       {DataType::kF16, DataType::kBF16, DataType::kF32, DataType::kF8E4M3, DataType::kF8E5M2}) {
    for (const ReduceOp op :
         {ReduceOp::kSum, ReduceOp::kProd, ReduceOp::kAvg, ReduceOp::kPreMulSum}) {
      const CollectiveCase c{.type = type, .op = op, .ranks = 1000};
      std::vector<int> order(1000);
      std::iota(order.begin(), order.end(), 0);
      const Bytes result = combine(c, inputs_of(c, 100), order, false);
      EXPECT_EQ(count_wrong(c, 0, result.data(), 100), 0u) << describe(c);
    }
  }
}

TEST(CollectiveCheck, ReduceScatterAndReduceExpectTheRightPart) {
  for (const Measured collective : kReducing) {
    const CollectiveCase c{.collective = collective, .ranks = 3, .root = 1, .call = 3};
    const size_t count = 50;
    const bool scattered = collective == Measured::kReduceScatter;
    const Bytes all = combine(c, inputs_of(c, scattered ? 3 * count : count), {0, 1, 2}, false);
    for (int rank = 0; rank < 3; ++rank) {
      const size_t offset = scattered ? static_cast<size_t>(rank) * count * 4 : 0;
      EXPECT_EQ(count_wrong(c, rank, all.data() + offset, count), 0u) << describe(c);
    }
    // Only the root of a reduce has a result at all.
    const Bytes nothing(count * 4, 0xAA);
    EXPECT_EQ(count_wrong(c, 0, nothing.data(), count),
              collective == Measured::kReduce ? 0u : count);
    EXPECT_EQ(count_wrong(c, 1, nothing.data(), count), count);
  }
}

TEST(CollectiveCheck, WhatIsOnlyMovedArrivesWhereItShould) {
  const size_t count = 20;
  for (int type = 0; type < kDataTypes; ++type) {
    CollectiveCase c{.type = static_cast<DataType>(type), .ranks = 3, .root = 2, .call = 9};
    const size_t part = count * size_of(c.type);
    std::vector<Bytes> inputs = inputs_of(c, 3 * count);
    const auto inputs_as = [&](Measured collective) {
      c.collective = collective;
      inputs = inputs_of(c, 3 * count);
    };
    inputs_as(Measured::kBroadcast);
    EXPECT_EQ(count_wrong(c, 0, inputs[2].data(), count), 0u);
    EXPECT_GT(count_wrong(c, 0, inputs[1].data(), count), count / 2);
    inputs_as(Measured::kSendReceive);
    EXPECT_EQ(count_wrong(c, 0, inputs[2].data(), count), 0u);
    EXPECT_EQ(count_wrong(c, 1, inputs[0].data(), count), 0u);
    Bytes gathered, exchanged;
    inputs_as(Measured::kAllGather);
    for (const Bytes& input : inputs) {
      gathered.insert(gathered.end(), input.begin(), input.begin() + static_cast<long>(part));
    }
    EXPECT_EQ(count_wrong(c, 1, gathered.data(), count), 0u) << describe(c);
    for (const Measured composed : {Measured::kHypercube, Measured::kGather}) {
      c.collective = composed;
      EXPECT_EQ(count_wrong(c, c.root, gathered.data(), count), 0u) << describe(c);
      EXPECT_GT(count_wrong(c, c.root, inputs[0].data(), count), count) << describe(c);
    }
    EXPECT_EQ(count_wrong(c, 0, inputs[0].data(), count), 0u);  // not the root
    inputs_as(Measured::kScatter);
    EXPECT_EQ(count_wrong(c, 1, inputs[2].data() + part, count), 0u) << describe(c);
    EXPECT_GT(count_wrong(c, 1, inputs[2].data(), count), count / 2) << describe(c);
    inputs_as(Measured::kAllToAll);
    for (const Bytes& input : inputs) {
      exchanged.insert(exchanged.end(), input.begin() + static_cast<long>(part),
                       input.begin() + static_cast<long>(2 * part));
    }
    EXPECT_EQ(count_wrong(c, 1, exchanged.data(), count), 0u) << describe(c);
    EXPECT_GT(count_wrong(c, 0, exchanged.data(), count), count);
  }
}

TEST(CollectiveCheck, MistakesAreCounted) {
  const CollectiveCase c{.type = DataType::kF32, .op = ReduceOp::kSum, .ranks = 3, .call = 5};
  const size_t count = 1000;
  const std::vector<Bytes> inputs = inputs_of(c, count);
  Bytes right = combine(c, inputs, {0, 1, 2}, false);
  const Bytes missing = combine(c, inputs, {0, 1}, false);
  const Bytes twice = combine(c, inputs, {0, 1, 2, 2}, false);
  EXPECT_GT(count_wrong(c, 0, missing.data(), count), 990u);
  EXPECT_GT(count_wrong(c, 0, twice.data(), count), 990u);
  CollectiveCase next = c;
  next.call = 6;  // stale: the result of another call
  EXPECT_GT(count_wrong(next, 0, right.data(), count), 990u);
  EXPECT_GT(count_wrong(c, 0, right.data() + 4, count - 1), 990u);  // misplaced
  right[400] ^= 1;
  EXPECT_EQ(count_wrong(c, 0, right.data(), count), 1u);

  Bytes input = inputs[1];
  EXPECT_EQ(count_changed(c, 1, input.data(), count), 0u);
  input[17] ^= 0x80;
  EXPECT_EQ(count_changed(c, 1, input.data(), count), 1u);
}

}  // namespace
}  // namespace baton::bench
