// Many endpoints in one process and in virtual time: one group of all, a sum, a split; and what
// each of them costs. BATON_CASES=all: 1,024 of them; a number: so many.
#include <fstream>

#include "tests/communicator/sim_nodes.h"
#include "tests/sanitized.h"
#include "tests/seeds.h"

namespace baton {
namespace {

using std::chrono::seconds;

constexpr size_t kMiB = 1 << 20;

size_t resident_bytes() {
  std::ifstream statm("/proc/self/statm");
  size_t all = 0, resident = 0;
  statm >> all >> resident;
  return resident * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

size_t available_bytes() {
  std::ifstream meminfo("/proc/meminfo");
  for (std::string line; std::getline(meminfo, line);) {
    size_t kib = 0;
    if (std::sscanf(line.c_str(), "MemAvailable: %zu kB", &kib) == 1) return kib << 10;
  }
  return 0;
}

class Many : public SimNodes {
 public:
  explicit Many(size_t nodes) : SimNodes({.nodes = nodes}, 256) {
    for (size_t node = 0; node < nodes; ++node) {
      world_.push_back(must(Communicator::create(endpoints_[node], handles_, of_all(1))));
    }
  }
  ~Many() {
    drive_for(std::chrono::milliseconds(20));
    for (auto* comms : {&parts_, &world_}) {
      for (auto& comm : *comms) comm->abort(absl::CancelledError("over"));
      comms->clear();
    }
  }

  void run() {
    ASSERT_TRUE(
        at_all([&](size_t node) { return world_[node]->state() != GroupState::kStarting; }));
    for (const auto& comm : world_) ASSERT_EQ(comm->status(), absl::OkStatus());
    const auto count = static_cast<double>(nodes_);
    reduce(world_, [&](size_t) { return count * (count + 1) / 2; });
    if (testing::Test::HasFatalFailure()) return;
    split();
    if (testing::Test::HasFatalFailure()) return;
    // The odd ones, then the even ones: each gives one more than its rank in the world.
    reduce(parts_, [&](size_t node) { return count / 2 * (count / 2 + (node % 2 == 0 ? 0 : 1)); });
  }

 private:
  static GroupOptions of_all(uint64_t uuid) {
    GroupOptions options;
    options.uuid = uuid;
    options.timeout = options.start_timeout = seconds(60);
    return options;
  }
  bool at_all(const std::function<bool(size_t)>& fact) {
    size_t node = 0;  // all before it hold
    return drive(
        [&] {
          while (node < nodes_ && fact(node)) ++node;
          return node == nodes_;
        },
        seconds(60));
  }

  // Sums one number of each. By a named algorithm: a rank that chooses looks at the programs of
  // all, and here each would.
  void reduce(const std::vector<std::unique_ptr<Communicator>>& comms,
              const std::function<double(size_t)>& expected) {
    std::vector<double> data(nodes_);
    std::vector<Work> works;
    for (size_t node = 0; node < nodes_; ++node) {
      data[node] = static_cast<double>(node + 1);
      works.push_back(must(
          comms[node]->all_reduce_async(&data[node], &data[node], 1, DataType::kF64, ReduceOp::kSum,
                                        {.algorithm = Algorithm::kRecursiveDoubling})));
    }
    absl::Status status;
    ASSERT_TRUE(at_all([&](size_t node) {
      const auto ended = comms[node]->test(works[node]);
      if (ended.has_value()) status.Update(*ended);
      return ended.has_value();
    }));
    ASSERT_EQ(status, absl::OkStatus());
    for (size_t node = 0; node < nodes_; ++node) ASSERT_EQ(data[node], expected(node)) << node;
  }

  void split() {
    std::vector<std::unique_ptr<SteppedSplit>> splits;
    for (size_t node = 0; node < nodes_; ++node) {
      splits.push_back(std::make_unique<SteppedSplit>(*world_[node], node % 2, 0));
      ASSERT_TRUE(splits.back()->work.ok()) << splits.back()->work.status();
    }
    absl::Status status;
    ASSERT_TRUE(at_all([&](size_t node) {
      const auto ended = world_[node]->test(*splits[node]->work);
      if (ended.has_value()) status.Update(*ended);
      return ended.has_value();
    }));
    ASSERT_EQ(status, absl::OkStatus());
    for (size_t node = 0; node < nodes_; ++node) {
      auto part = must(splits[node]->finish(of_all(0)));
      ASSERT_EQ(part->ranks(), static_cast<int>(nodes_ / 2));
      ASSERT_EQ(part->rank(), static_cast<int>(node / 2));
      parts_.push_back(std::move(part));
    }
  }

  std::vector<std::unique_ptr<Communicator>> world_, parts_;
};

// Promise(collectives): 512 ranks make one group, sum and split it, in less than 16 MiB each |
//   all of them in one process and in virtual time; resident memory
TEST(SimScale, ManyRanksMakeAGroupAndSplitIt) {
  setenv("BATON_FLIGHT_RECORDER", "none", 1);
  size_t nodes = number_of("BATON_CASES", kSanitized ? 64 : 512);
  if (nodes == 0) nodes = 1024;
  if (available_bytes() < nodes * 12 * kMiB) {
    GTEST_SKIP() << "needs " << nodes * 12 / 1024 << " GiB of memory that is free";
  }
  const size_t before = resident_bytes();
  Many many(nodes);
  many.run();
  const size_t each = (resident_bytes() - before) / nodes;
  std::printf("%zu endpoints: %.2f MiB each\n", nodes, static_cast<double>(each) / kMiB);
  if (kSanitized) return;
  EXPECT_LT(each, 16 * kMiB);
}

}  // namespace
}  // namespace baton
