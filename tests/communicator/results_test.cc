// Every collective over real providers: the right bytes, for all counts, ranks, algorithms, types.
#include <cmath>
#include <cstring>
#include <numeric>

#include "collectives/schedules/schedule.h"
#include "tests/communicator/group.h"
#include "tests/sanitized.h"

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

// From nothing over one element to many pieces.
const size_t kCounts[] = {0, 1, 2, 3, 17, 1000, 4099, kSanitized ? 20'011 : 70'001};

std::vector<float> contribution(int rank, size_t count) {
  std::vector<float> out(count);
  for (size_t i = 0; i < count; ++i) out[i] = value(rank, i);
  return out;
}

std::vector<float> total(int ranks, size_t count) {
  std::vector<float> out(count);
  for (int r = 0; r < ranks; ++r) {
    for (size_t i = 0; i < count; ++i) out[i] += value(r, i);
  }
  return out;
}

TEST_P(Results, AllReduceByEveryAlgorithm) {
  run([](Communicator& comm) {
    const int n = comm.ranks();
    for (bool ordered : {false, true}) {
      for (Algorithm algorithm : algorithms_for(Collective::kAllReduce, ordered)) {
        for (size_t count : kCounts) {
          CallOptions options;
          options.algorithm = algorithm;
          options.ordered = ordered;
          options.chunk_bytes = 4096;
          const std::vector<float> in = contribution(comm.rank(), count);
          std::vector<float> out(count, -1);
          ASSERT_EQ(comm.all_reduce(in.data(), out.data(), count, DataType::kF32, ReduceOp::kSum,
                                    options),
                    absl::OkStatus())
              << name_of(algorithm) << " " << count;
          ASSERT_EQ(out, total(n, count)) << name_of(algorithm) << " " << count;
          std::vector<float> both = in;
          ASSERT_EQ(comm.all_reduce(both.data(), both.data(), count, DataType::kF32, ReduceOp::kSum,
                                    options),
                    absl::OkStatus());
          ASSERT_EQ(both, total(n, count)) << "in place, " << name_of(algorithm) << " " << count;
        }
      }
    }
  });
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

TEST_P(Results, ReduceScatterAndAllGather) {
  run([](Communicator& comm) {
    const auto n = static_cast<size_t>(comm.ranks());
    const auto rank = static_cast<size_t>(comm.rank());
    for (bool ordered : {false, true}) {
      for (Algorithm algorithm : algorithms_for(Collective::kReduceScatter, ordered)) {
        for (size_t count : kCounts) {
          CallOptions options;
          options.algorithm = algorithm;
          options.ordered = ordered;
          options.chunk_bytes = 4096;
          std::vector<float> in = contribution(comm.rank(), n * count);
          const std::vector<float> sum = total(comm.ranks(), n * count);
          const std::vector<float> wanted(sum.begin() + rank * count,
                                          sum.begin() + (rank + 1) * count);
          std::vector<float> out(count, -1);
          ASSERT_EQ(comm.reduce_scatter(in.data(), out.data(), count, DataType::kF32,
                                        ReduceOp::kSum, options),
                    absl::OkStatus());
          ASSERT_EQ(out, wanted) << name_of(algorithm) << " " << count;
          float* own = in.data() + rank * count;
          ASSERT_EQ(
              comm.reduce_scatter(in.data(), own, count, DataType::kF32, ReduceOp::kSum, options),
              absl::OkStatus());
          ASSERT_EQ(std::vector<float>(own, own + count), wanted)
              << "in place, " << name_of(algorithm) << " " << count;
        }
      }
    }
    for (Algorithm algorithm : algorithms_for(Collective::kAllGather)) {
      for (size_t count : kCounts) {
        CallOptions options;
        options.algorithm = algorithm;
        options.chunk_bytes = 4096;
        const std::vector<float> in = contribution(comm.rank(), count);
        std::vector<float> wanted;
        for (int r = 0; r < comm.ranks(); ++r) {
          const std::vector<float> theirs = contribution(r, count);
          wanted.insert(wanted.end(), theirs.begin(), theirs.end());
        }
        std::vector<float> out(n * count, -1);
        ASSERT_EQ(comm.all_gather(in.data(), out.data(), count, DataType::kF32, options),
                  absl::OkStatus());
        ASSERT_EQ(out, wanted) << name_of(algorithm) << " " << count;
        std::fill(out.begin(), out.end(), -1);
        std::copy(in.begin(), in.end(), out.begin() + rank * count);
        ASSERT_EQ(
            comm.all_gather(out.data() + rank * count, out.data(), count, DataType::kF32, options),
            absl::OkStatus());
        ASSERT_EQ(out, wanted) << "in place, " << name_of(algorithm) << " " << count;
      }
    }
  });
}

TEST_P(Results, BroadcastAndReduceFromEveryRoot) {
  run([](Communicator& comm) {
    for (Collective what : {Collective::kBroadcast, Collective::kReduce}) {
      for (Algorithm algorithm : algorithms_for(what)) {
        for (int root = 0; root < comm.ranks(); ++root) {
          for (size_t count : {size_t{0}, size_t{1}, size_t{1000}, size_t{20001}}) {
            CallOptions options;
            options.algorithm = algorithm;
            options.chunk_bytes = 4096;
            const std::vector<float> in = contribution(comm.rank(), count);
            std::vector<float> out(count, -1);
            if (what == Collective::kBroadcast) {
              ASSERT_EQ(comm.broadcast(in.data(), out.data(), count, DataType::kF32, root, options),
                        absl::OkStatus());
              ASSERT_EQ(out, contribution(root, count)) << name_of(algorithm) << " " << count;
            } else {
              ASSERT_EQ(comm.reduce(in.data(), out.data(), count, DataType::kF32, ReduceOp::kSum,
                                    root, options),
                        absl::OkStatus());
              if (comm.rank() == root) {
                ASSERT_EQ(out, total(comm.ranks(), count)) << name_of(algorithm) << " " << count;
              }
            }
          }
        }
      }
    }
  });
}

TEST_P(Results, GatherAndScatterFromEveryRoot) {
  run([](Communicator& comm) {
    const auto n = static_cast<size_t>(comm.ranks());
    const auto rank = static_cast<size_t>(comm.rank());
    for (Algorithm algorithm : algorithms_for(Collective::kGather)) {
      for (int root = 0; root < comm.ranks(); ++root) {
        for (size_t count : kCounts) {
          CallOptions options;
          options.algorithm = algorithm;
          options.chunk_bytes = 4096;
          const bool at_root = comm.rank() == root;
          std::vector<float> all;
          for (int r = 0; r < comm.ranks(); ++r) {
            const std::vector<float> theirs = contribution(r, count);
            all.insert(all.end(), theirs.begin(), theirs.end());
          }
          const std::vector<float> own = contribution(comm.rank(), count);
          const auto trace = [&] {
            return absl::StrCat(std::string(name_of(algorithm)), " ", count);
          };

          std::vector<float> out(at_root ? n * count : 0, -1);
          ASSERT_EQ(comm.gather(own.data(), out.data(), count, DataType::kF32, root, options),
                    absl::OkStatus());
          ASSERT_EQ(out, at_root ? all : out) << trace();
          std::vector<float> block(count, -1);
          ASSERT_EQ(comm.scatter(at_root ? all.data() : nullptr, block.data(), count,
                                 DataType::kF32, root, options),
                    absl::OkStatus());
          ASSERT_EQ(block, own) << trace();
          if (!at_root) {  // in place at the root
            ASSERT_EQ(comm.gather(own.data(), nullptr, count, DataType::kF32, root, options),
                      absl::OkStatus());
            ASSERT_EQ(comm.scatter(nullptr, block.data(), count, DataType::kF32, root, options),
                      absl::OkStatus());
            ASSERT_EQ(block, own) << trace();
            continue;
          }
          std::fill(out.begin(), out.end(), -1);
          float* const place = out.data() + rank * count;
          std::copy(own.begin(), own.end(), place);
          ASSERT_EQ(comm.gather(place, out.data(), count, DataType::kF32, root, options),
                    absl::OkStatus());
          ASSERT_EQ(out, all) << "in place, " << trace();
          ASSERT_EQ(comm.scatter(out.data(), place, count, DataType::kF32, root, options),
                    absl::OkStatus());
          ASSERT_EQ(out, all) << "in place, " << trace();
        }
      }
    }
  });
}

TEST_P(Results, AllToAllEqualAndNot) {
  run([](Communicator& comm) {
    const auto n = static_cast<size_t>(comm.ranks());
    const auto rank = static_cast<size_t>(comm.rank());
    for (size_t count : kCounts) {
      std::vector<float> in(n * count), out(n * count, -1), wanted(n * count);
      for (size_t r = 0; r < n; ++r) {
        for (size_t i = 0; i < count; ++i) {
          in[r * count + i] = value(static_cast<int>(10 * rank + r), i);
          wanted[r * count + i] = value(static_cast<int>(10 * r + rank), i);
        }
      }
      ASSERT_EQ(comm.all_to_all(in.data(), out.data(), count, DataType::kF32), absl::OkStatus());
      ASSERT_EQ(out, wanted) << count;
    }
    // Rank a sends 100 (a + 1) + b elements to rank b; those of the last rank are large.
    auto count_of = [&](size_t from, size_t to) {
      return from + 1 == n ? 40000 + to : 100 * (from + 1) + to;
    };
    std::vector<size_t> send, send_at, receive, receive_at;
    size_t sent = 0, received = 0;
    for (size_t r = 0; r < n; ++r) {
      send.push_back(count_of(rank, r));
      send_at.push_back(sent);
      sent += send.back();
      receive.push_back(count_of(r, rank));
      receive_at.push_back(received);
      received += receive.back();
    }
    std::vector<int32_t> in(sent), out(received, -1);
    for (size_t r = 0; r < n; ++r) {
      std::iota(in.begin() + send_at[r], in.begin() + send_at[r] + send[r],
                static_cast<int32_t>(1000000 * rank + 100000 * r));
    }
    auto work = comm.all_to_all_v_async(in.data(), send, send_at, out.data(), receive, receive_at,
                                        DataType::kI32);
    ASSERT_TRUE(work.ok()) << work.status();
    ASSERT_EQ(comm.wait(*work), absl::OkStatus());
    for (size_t r = 0; r < n; ++r) {
      for (size_t i = 0; i < receive[r]; ++i) {
        ASSERT_EQ(out[receive_at[r] + i], static_cast<int32_t>(1000000 * r + 100000 * rank + i));
      }
    }
  });
}

TEST_P(Results, SendReceiveAndBarrier) {
  run([](Communicator& comm) {
    const int n = comm.ranks();
    ASSERT_EQ(comm.barrier(), absl::OkStatus());
    if (n == 1) return;
    const int next = (comm.rank() + 1) % n, previous = (comm.rank() + n - 1) % n;
    for (size_t count : kCounts) {
      const std::vector<float> out = contribution(comm.rank(), count);
      std::vector<float> in(count, -1);
      auto send = comm.send_async(out.data(), count, DataType::kF32, next);
      auto receive = comm.receive_async(in.data(), count, DataType::kF32, previous);
      ASSERT_TRUE(send.ok() && receive.ok());
      ASSERT_EQ(comm.wait(*receive), absl::OkStatus());
      ASSERT_EQ(comm.wait(*send), absl::OkStatus());
      ASSERT_EQ(in, contribution(previous, count));
    }
    ASSERT_EQ(comm.barrier(), absl::OkStatus());
  });
}

TEST_P(Results, ManyCallsInFlightAtOnce) {
  run([](Communicator& comm) {
    constexpr size_t kCalls = 40, kCount = 9000;
    std::vector<std::vector<float>> buffers;
    std::vector<Work> works;
    for (size_t c = 0; c < kCalls; ++c) {
      buffers.push_back(contribution(comm.rank() + static_cast<int>(c), kCount));
    }
    for (size_t c = 0; c < kCalls; ++c) {
      CallOptions options;
      options.chunk_bytes = 4096;
      auto work = comm.all_reduce_async(buffers[c].data(), buffers[c].data(), kCount - c,
                                        DataType::kF32, ReduceOp::kMax, options);
      ASSERT_TRUE(work.ok()) << work.status();
      works.push_back(*work);
    }
    // Ends may be asked for in any order.
    for (size_t c = kCalls; c-- > 0;) ASSERT_EQ(comm.wait(works[c]), absl::OkStatus());
    for (size_t c = 0; c < kCalls; ++c) {
      for (size_t i = 0; i < kCount - c; ++i) {
        float best = value(static_cast<int>(c), i);
        for (int r = 1; r < comm.ranks(); ++r) {
          best = std::max(best, value(r + static_cast<int>(c), i));
        }
        ASSERT_EQ(buffers[c][i], best);
      }
    }
    EXPECT_TRUE(absl::IsNotFound(comm.wait(works[0]))) << "an end is reported once";
  });
}

INSTANTIATE_TEST_SUITE_P(Providers, Results, Combine(Values("shm", "tcp"), Values(1, 2, 3, 4)),
                         [](const auto& param) {
                           return std::get<0>(param.param) + "_" +
                                  std::to_string(std::get<1>(param.param));
                         });

}  // namespace
}  // namespace baton
