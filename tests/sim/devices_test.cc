// Memory of simulated devices: which copies hold each other up, by value and in virtual time.
#include "tests/sim/fabric/devices.h"

#include "tests/sim/cluster.h"
#include "tests/test.h"

namespace baton::sim {
namespace {

using namespace std::chrono_literals;

constexpr size_t kBlockBytes = 8 << 20;
constexpr double kLaneRate = 10e9;  // so that 8 MiB take 839 us

// Three nodes with links that cost nothing; the device is node 0's.
struct Rig {
  explicit Rig(SimDeviceOptions options = {})
      : cluster({.seed = 3, .nodes = 3, .link = {.bytes_per_second = 0, .latency = 1us}},
                kBlockBytes) {
    options.to_host = options.to_device = kLaneRate;
    devices = std::make_unique<SimDevices>(cluster.fabric, options);
    for (const size_t i : {0, 1}) {
      blocks.push_back(*devices->allocate(0, kBlockBytes));
      regions.push_back(*cluster.worker(0).register_memory(blocks[i]->data(), kBlockBytes));
      peers.push_back(cluster.connect(0, i + 1).first);
    }
  }
  ~Rig() {
    EXPECT_THAT(cluster.fabric.violations(), testing::IsEmpty());
    for (size_t node = 0; node < 3; ++node) cluster.stop(node);
    blocks.clear();
  }
  // Between block `which` and the peer of that number.
  TransferRequest request(Op op, size_t which, size_t pieces = 1) {
    TransferRequest out = cluster.request(op, 0, peers[which], which + 1, kBlockBytes);
    out.local = regions[which];
    if (pieces > 1) {  // every other piece of the block, so that none are neighbours
      out.local_layout = Layout::strided(0, pieces, kBlockBytes / pieces, kBlockBytes / pieces / 2);
      out.remote_layout = Layout::contiguous(0, kBlockBytes / 2);
    }
    return out;
  }
  // How long they take, begun at once.
  Time run(const std::vector<TransferRequest>& requests) {
    const Time start = cluster.fabric.clock().now();
    std::vector<TransferId> ids;
    for (const TransferRequest& each : requests) ids.push_back(*cluster.worker(0).submit(each));
    EXPECT_TRUE(cluster.fabric.run_until(
        [&] {
          return std::all_of(ids.begin(), ids.end(),
                             [&](TransferId id) { return ended(*cluster.worker(0).state(id)); });
        },
        1s));
    for (const TransferId id : ids) {
      EXPECT_TRUE(cluster.worker(0).status(id).ok()) << cluster.worker(0).status(id);
      EXPECT_TRUE(cluster.worker(0).release(id).ok());
    }
    return cluster.fabric.clock().now() - start;
  }

  SimCluster cluster;
  std::unique_ptr<SimDevices> devices;
  std::vector<std::unique_ptr<internal::DeviceBuffer>> blocks;
  std::vector<MemoryRegion> regions;
  std::vector<PeerId> peers;
};

double times(Time a, Time b) {
  return static_cast<double>(a.count()) / static_cast<double>(b.count());
}

TEST(SimDevices, BytesMoveAndOnlyByCopies) {
  Rig rig;
  std::byte* const there = rig.devices->view(rig.blocks[0]->data(), kBlockBytes);
  for (size_t i = 0; i < kBlockBytes; ++i) there[i] = static_cast<std::byte>(i % 251);
  rig.run({rig.request(Op::kWrite, 0)});
  const auto& arrived = rig.cluster.members[1].memory;
  EXPECT_TRUE(std::equal(arrived.begin(), arrived.end(), there));
  std::fill(there, there + kBlockBytes, std::byte{0});
  rig.run({rig.request(Op::kRead, 0)});
  EXPECT_TRUE(std::equal(arrived.begin(), arrived.end(), there));
  EXPECT_EQ(rig.cluster.worker(0).stats().staged_transfers, 2u);
  EXPECT_EQ(rig.devices->lane(0, SimLane::kToHost).bytes, kBlockBytes);
  EXPECT_EQ(rig.devices->lane(0, SimLane::kToDevice).bytes, kBlockBytes);
  EXPECT_DEATH(static_cast<void>(*static_cast<volatile std::byte*>(rig.blocks[0]->data())), "");
}

TEST(SimDevices, TwoCopiesInOneDirectionContendAndTwoDirectionsDoNot) {
  Rig rig;
  const Time out = rig.run({rig.request(Op::kWrite, 0)});
  const Time in = rig.run({rig.request(Op::kRead, 1)});
  const Time alone = std::chrono::duration_cast<Time>(
      std::chrono::duration<double>(static_cast<double>(kBlockBytes) / kLaneRate));
  EXPECT_NEAR(times(out, alone), 1, 0.1);
  EXPECT_NEAR(times(in, alone), 1, 0.1);
  const Time both_out = rig.run({rig.request(Op::kWrite, 0), rig.request(Op::kWrite, 1)});
  EXPECT_NEAR(times(both_out, out), 2, 0.1) << "one lane";
  const Time both_ways = rig.run({rig.request(Op::kWrite, 0), rig.request(Op::kRead, 1)});
  EXPECT_NEAR(times(both_ways, std::max(in, out)), 1, 0.1) << "a lane each";
}

TEST(SimDevices, OneCopyEngineIsOneLaneForBothDirections) {
  Rig rig({.copy_engines = 1});
  const Time out = rig.run({rig.request(Op::kWrite, 0)});
  const Time both_ways = rig.run({rig.request(Op::kWrite, 0), rig.request(Op::kRead, 1)});
  EXPECT_NEAR(times(both_ways, out), 2, 0.15);
}

// What is packed waits for the model's kernels; what the copy engine moves does not.
TEST(SimDevices, PackingWaitsBehindKernelsAndPlainCopiesDoNot) {
  Rig rig;
  const Time plain = rig.run({rig.request(Op::kWrite, 0)});
  const Time packed = rig.run({rig.request(Op::kWrite, 0, 1024)});
  EXPECT_GT(rig.devices->lane(0, SimLane::kKernels).operations, 0u);
  EXPECT_LT(packed, plain);
  rig.devices->launch(0, 5ms);
  EXPECT_NEAR(times(rig.run({rig.request(Op::kWrite, 0)}), plain), 1, 0.05);
  rig.cluster.fabric.run_for(10ms);
  rig.devices->launch(0, 5ms);
  EXPECT_GT(rig.run({rig.request(Op::kWrite, 0, 1024)}), 5ms);
}

TEST(SimDevices, CopiesBetweenDevicesHaveALaneOfTheirOwn) {
  Rig rig({.devices = 2, .between = kLaneRate});
  const auto copies = *rig.devices->copies(0, true);
  const auto other = *rig.devices->allocate(1, kBlockBytes);
  rig.devices->view(rig.blocks[0]->data(), kBlockBytes)[7] = std::byte{42};
  const internal::DeviceRun run{other->data(), rig.blocks[0]->data(), kBlockBytes};
  const Time start = rig.cluster.fabric.clock().now();
  ASSERT_TRUE(copies->begin(0, {&run, 1}).ok());
  ASSERT_TRUE(copies->begin(1, {&run, 1}).ok());
  const Time transfer = rig.run({rig.request(Op::kWrite, 0)});
  EXPECT_NEAR(times(transfer, 839us), 1, 0.1) << "beside them";
  EXPECT_NE(rig.devices->view(other->data(), 8)[7], std::byte{42});
  Time first{};
  ASSERT_TRUE(rig.cluster.fabric.run_until(
      [&] {
        if (first == Time{} && copies->ended(0).has_value()) {
          first = rig.cluster.fabric.clock().now() - start;
        }
        return copies->ended(1).has_value();
      },
      1s));
  EXPECT_EQ(rig.devices->view(other->data(), 8)[7], std::byte{42});
  EXPECT_NEAR(times(rig.cluster.fabric.clock().now() - start, first), 2, 0.1);
}

TEST(SimDevices, EqualSeedsGiveEqualTimes) {
  const auto once = [] {
    Rig rig;
    const Time took = rig.run(
        {rig.request(Op::kWrite, 0, 512), rig.request(Op::kRead, 1), rig.request(Op::kWrite, 1)});
    return std::pair(took, rig.cluster.fabric.digest());
  };
  EXPECT_EQ(once(), once());
}

// The worker goes in the middle of copies: it waits for them, though no time passes.
TEST(SimDevices, AWorkerThatGoesDoesNotHang) {
  Rig rig;
  ASSERT_TRUE(rig.cluster.worker(0).submit(rig.request(Op::kWrite, 0)).ok());
  rig.cluster.fabric.run_for(100us);
  rig.cluster.stop(0);
}

TEST(SimDevices, WhatIsNoMemoryOfADeviceIsSaid) {
  Rig rig;
  EXPECT_EQ(rig.devices->allocate(7, 1).status().code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(rig.devices->place(rig.blocks[0]->data(), kBlockBytes + 1).status().code(),
            absl::StatusCode::kInvalidArgument);
  std::byte host{};
  EXPECT_EQ(rig.devices->place(&host, 1)->kind, MemoryKind::kHost);
  std::array<std::byte, 8> bytes{};
  EXPECT_EQ(rig.blocks[0]->put(kBlockBytes - 4, bytes).code(), absl::StatusCode::kOutOfRange);
}

}  // namespace
}  // namespace baton::sim
