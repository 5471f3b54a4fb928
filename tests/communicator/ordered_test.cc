// Ordered results are bit-identical whatever the algorithm, chunk, provider, placement and run; and
// every type and operation gives what its reference says.
#include <cstring>
#include <random>

#include "collectives/schedules/schedule.h"
#include "tests/communicator/group.h"
#include "tests/reduce/reference.h"

namespace baton {
namespace {

using collectives::schedules::algorithms_for;

constexpr size_t kOrderedCount = 5003;

// Floats whose sum depends on its order.
std::vector<float> wild(int rank, size_t count) {
  std::mt19937 random(static_cast<uint32_t>(rank + 1));
  std::uniform_real_distribution<float> digits(-1, 1);
  std::uniform_int_distribution<int> scale(-20, 20);
  std::vector<float> out(count);
  for (float& x : out) x = std::ldexp(digits(random), scale(random));
  return out;
}

// Elements of any type, small enough that nothing overflows.
std::vector<std::byte> elements(DataType type, int rank, size_t count) {
  const std::vector<float> source = wild(rank, count);
  std::vector<std::byte> out(count * size_of(type));
  std::mt19937 random(static_cast<uint32_t>(rank + 77));
  for (size_t i = 0; i < count; ++i) {
    std::byte* to = out.data() + i * size_of(type);
    switch (type) {
      case DataType::kF32:
        std::memcpy(to, &source[i], 4);
        break;
      case DataType::kF64: {
        const double x = source[i];
        std::memcpy(to, &x, 8);
        break;
      }
      case DataType::kBF16: {
        std::memcpy(to, reinterpret_cast<const std::byte*>(&source[i]) + 2, 2);
        break;
      }
      case DataType::kF16: {  // normal numbers around 1
        const auto bits = static_cast<uint16_t>(0x3000 + random() % 0x1800);
        std::memcpy(to, &bits, 2);
        break;
      }
      default: {
        const uint64_t bits = random() % 5 + 1;
        std::memcpy(to, &bits, size_of(type));
      }
    }
  }
  return out;
}

std::vector<std::byte> one_of(DataType type) {
  std::vector<std::byte> out(size_of(type));
  const auto put = [&out](auto value) { std::memcpy(out.data(), &value, sizeof value); };
  switch (type) {
    case DataType::kF32:
      put(1.0F);
      break;
    case DataType::kF64:
      put(1.0);
      break;
    case DataType::kF16:
      put(uint16_t{0x3C00});
      break;
    case DataType::kBF16:
      put(uint16_t{0x3F80});
      break;
    case DataType::kF8E4M3:
      put(uint8_t{0x38});
      break;
    case DataType::kF8E5M2:
      put(uint8_t{0x3C});
      break;
    default:
      out[0] = std::byte{1};
  }
  return out;
}

std::vector<std::byte> folded(DataType type, ReduceOp op, int ranks, size_t count) {
  std::vector<std::vector<std::byte>> all;
  std::vector<const void*> sources;
  for (int r = 0; r < ranks; ++r) all.push_back(elements(type, r, count));
  for (const auto& one : all) sources.push_back(one.data());
  std::vector<std::byte> out(count * size_of(type));
  collectives::reduce::reference::fold(type, op, out.data(), sources, count,
                                       op == ReduceOp::kAvg ? static_cast<uint32_t>(ranks) : 1);
  return out;
}

TEST(Ordered, EveryAlgorithmChunkAndProviderGivesTheSameBits) {
  for (const char* provider : {"shm", "tcp"}) {
    for (int ranks : {2, 3, 4}) {
      for (DataType type : {DataType::kF32, DataType::kBF16, DataType::kF16}) {
        const std::vector<std::byte> wanted = folded(type, ReduceOp::kSum, ranks, kOrderedCount);
        run_group(ranks, test_options(provider), [&](Communicator& comm) {
          for (Algorithm algorithm : algorithms_for(Collective::kAllReduce, true)) {
            for (size_t chunk : {size_t{512}, size_t{4096}, size_t{65536}}) {
              CallOptions options;
              options.ordered = true;
              options.algorithm = algorithm;
              options.chunk_bytes = chunk;
              std::vector<std::byte> data = elements(type, comm.rank(), kOrderedCount);
              ASSERT_EQ(comm.all_reduce(data.data(), data.data(), kOrderedCount, type,
                                        ReduceOp::kSum, options),
                        absl::OkStatus());
              ASSERT_EQ(std::memcmp(data.data(), wanted.data(), wanted.size()), 0)
                  << provider << " n=" << ranks << " " << name_of(algorithm) << " chunk " << chunk
                  << " " << name_of(type);
            }
          }
        });
      }
    }
  }
}

TEST(Ordered, ReduceScatterAndReduceOnOneNodeAndSeveral) {
  constexpr size_t kShare = 1001;
  for (const char* provider : {"shm", "tcp"}) {
    for (int ranks : {2, 3, 5}) {
      const size_t n = static_cast<size_t>(ranks);
      const std::vector<std::byte> wanted =
          folded(DataType::kF32, ReduceOp::kSum, ranks, n * kShare);
      CommunicatorOptions group = test_options(provider);
      group.node_size = 2;
      run_group(ranks, group, [&](Communicator& comm) {
        const size_t bytes = kShare * sizeof(float);
        const auto rank = static_cast<size_t>(comm.rank());
        CallOptions options;
        options.ordered = true;
        options.chunk_bytes = 4096;
        for (Algorithm algorithm : algorithms_for(Collective::kReduceScatter, true)) {
          options.algorithm = algorithm;
          const std::vector<std::byte> in = elements(DataType::kF32, comm.rank(), n * kShare);
          std::vector<std::byte> out(bytes);
          ASSERT_EQ(comm.reduce_scatter(in.data(), out.data(), kShare, DataType::kF32,
                                        ReduceOp::kSum, options),
                    absl::OkStatus());
          ASSERT_EQ(std::memcmp(out.data(), wanted.data() + rank * bytes, bytes), 0)
              << provider << " n=" << ranks << " " << name_of(algorithm);
        }
        for (Algorithm algorithm : algorithms_for(Collective::kReduce, true)) {
          options.algorithm = algorithm;
          const int root = ranks - 1;
          const std::vector<std::byte> in = elements(DataType::kF32, comm.rank(), n * kShare);
          std::vector<std::byte> out(n * bytes);
          ASSERT_EQ(comm.reduce(in.data(), out.data(), n * kShare, DataType::kF32, ReduceOp::kSum,
                                root, options),
                    absl::OkStatus());
          if (comm.rank() != root) continue;
          ASSERT_EQ(std::memcmp(out.data(), wanted.data(), n * bytes), 0)
              << provider << " n=" << ranks << " " << name_of(algorithm);
        }
      });
    }
  }
}

TEST(Ordered, EveryTypeAndOperation) {
  run_group(3, test_options("shm"), [](Communicator& comm) {
    for (int t = 0; t < kDataTypes; ++t) {
      for (int o = 0; o < kReduceOps; ++o) {
        const auto type = static_cast<DataType>(t);
        const auto op = static_cast<ReduceOp>(o);
        if (!combines(type, op)) continue;
        const std::vector<std::byte> wanted = folded(type, op, 3, 1001);
        CallOptions options;
        // Times one: see model_test.cc for others.
        const std::vector<std::byte> one = one_of(type);
        options.factor = one.data();
        options.ordered = true;
        std::vector<std::byte> data = elements(type, comm.rank(), 1001);
        ASSERT_EQ(comm.all_reduce(data.data(), data.data(), 1001, type, op, options),
                  absl::OkStatus());
        ASSERT_EQ(std::memcmp(data.data(), wanted.data(), wanted.size()), 0)
            << name_of(type) << " " << name_of(op);
        // Integers, minima and maxima do not depend on the order.
        const bool exact = !is_float(type) || op == ReduceOp::kMin || op == ReduceOp::kMax;
        if (!exact) continue;
        for (Algorithm algorithm : algorithms_for(Collective::kAllReduce)) {
          CallOptions free;
          free.factor = one.data();
          free.ordered = false;
          free.algorithm = algorithm;
          data = elements(type, comm.rank(), 1001);
          ASSERT_EQ(comm.all_reduce(data.data(), data.data(), 1001, type, op, free),
                    absl::OkStatus());
          ASSERT_EQ(std::memcmp(data.data(), wanted.data(), wanted.size()), 0)
              << name_of(type) << " " << name_of(op) << " " << name_of(algorithm);
        }
      }
    }
  });
}

}  // namespace
}  // namespace baton
