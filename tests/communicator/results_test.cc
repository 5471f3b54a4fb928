// Collectives over real providers beside what model_test.cc looks at: memory and links.
#include "collectives/schedules/schedule.h"
#include "tests/communicator/group.h"

namespace baton {
namespace {

using collectives::schedules::algorithms_for;
using testing::Combine;
using testing::Values;

// What rank `rank` contributes at index i: small integers, so that every order of summing is exact.
float value(int rank, size_t i) { return static_cast<float>((i * 7 + 13 * rank) % 31) - 8; }

class Results : public testing::TestWithParam<std::tuple<std::string, int>> {
 protected:
  static std::string provider() { return std::get<0>(GetParam()); }
  static int ranks() { return std::get<1>(GetParam()); }
  static void run(const std::function<void(Communicator&)>& body) {
    run_group(ranks(), test_options(provider()), body);
  }
};

std::vector<float> total(int ranks, size_t count) {
  std::vector<float> out(count);
  for (int r = 0; r < ranks; ++r) {
    for (size_t i = 0; i < count; ++i) out[i] += value(r, i);
  }
  return out;
}

TEST_P(Results, MemoryOfTheCommunicatorIsReachedInPlace) {
  run([](Communicator& comm) {
    const size_t count = 300000;
    auto in = comm.allocate(count * sizeof(float));
    auto out = comm.allocate(count * sizeof(float));
    ASSERT_TRUE(in.ok() && out.ok());
    auto* a = reinterpret_cast<float*>(in->data);
    auto* b = reinterpret_cast<float*>(out->data);
    for (size_t i = 0; i < count; ++i) a[i] = value(comm.rank(), i);
    for (int round = 0; round < 3; ++round) {
      ASSERT_EQ(comm.all_reduce(a, b, count, DataType::kF32, ReduceOp::kSum), absl::OkStatus());
      ASSERT_EQ(std::vector<float>(b, b + count), total(comm.ranks(), count));
    }
    if (provider() == "shm" && comm.ranks() > 1) {
      EXPECT_GT(comm.stats().direct_bytes, count * sizeof(float));
    }
    // In place: what a peer has read may be overwritten past the caches.
    for (Algorithm algorithm : algorithms_for(Collective::kAllReduce)) {
      for (const size_t n : {size_t{4096}, size_t{16'387}, count}) {
        for (size_t i = 0; i < n; ++i) b[i] = value(comm.rank(), i);
        ASSERT_EQ(
            comm.all_reduce(b, b, n, DataType::kF32, ReduceOp::kSum, {.algorithm = algorithm}),
            absl::OkStatus());
        ASSERT_EQ(std::vector<float>(b, b + n), total(comm.ranks(), n))
            << name_of(algorithm) << " " << n;
      }
    }
    comm.free(*in);
    comm.free(*out);
  });
}

// Promise(collectives): Over tcp and RDMA a rank keeps 2.2 MiB for a peer that it talks to, however
//   large the messages | large ones go to where their receiver has granted a place
TEST_P(Results, LargeMessagesArriveWhereTheyAreWantedAndLinksHoldLittle) {
  run([](Communicator& comm) {
    if (provider() != "tcp") return;
    const auto peers = static_cast<uint64_t>(comm.ranks() - 1);
    const size_t block = 1 << 20;  // of floats
    auto in = comm.allocate(block * sizeof(float));
    auto out = comm.allocate(block * sizeof(float) * (peers + 1));
    ASSERT_TRUE(in.ok() && out.ok());
    auto* a = reinterpret_cast<float*>(in->data);
    auto* b = reinterpret_cast<float*>(out->data);
    for (size_t i = 0; i < block; ++i) a[i] = value(comm.rank(), i);
    ASSERT_EQ(comm.all_gather(a, b, block, DataType::kF32, {.algorithm = Algorithm::kRing}),
              absl::OkStatus());
    for (int r = 0; r < comm.ranks(); ++r) {
      for (size_t i = 0; i < block; ++i) {
        ASSERT_EQ(b[static_cast<size_t>(r) * block + i], value(r, i)) << "rank " << r << ", " << i;
      }
    }
    EXPECT_EQ(comm.stats().direct_bytes, peers * block * sizeof(float));
    EXPECT_LE(comm.stats().link_bytes, peers * 2200 * 1024);
    // Neither input nor output can be reached: what messages wait in is given back.
    std::vector<float> data(block, 1), sum(block);
    ASSERT_EQ(comm.all_reduce(data.data(), sum.data(), block, DataType::kF32, ReduceOp::kSum),
              absl::OkStatus());
    EXPECT_EQ(sum, std::vector<float>(block, static_cast<float>(comm.ranks())));
    EXPECT_LE(comm.stats().link_bytes, peers * 2200 * 1024);
    comm.free(*in);
    comm.free(*out);
  });
}

INSTANTIATE_TEST_SUITE_P(Providers, Results, Combine(Values("shm", "tcp"), Values(1, 2, 3, 4)),
                         [](const auto& param) {
                           return std::get<0>(param.param) + "_" +
                                  std::to_string(std::get<1>(param.param));
                         });

}  // namespace
}  // namespace baton
