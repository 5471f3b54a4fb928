// Two agents over tcp, of which one requantises on a device, for tests of what goes wrong.
#pragma once

#include <memory>
#include <utility>

#include "tests/gpudirect/agents/device_cache.h"

namespace baton::kvtransfer {

// Of a write, alpha has a cache of bf16, and beta one of fp8; of a read the other way round.
struct DevicePair {
  explicit DevicePair(InstalledFake& driver, uint64_t staging_bytes = 128 << 10,
                      Op operation = Op::kWrite, Block::Of near = Block::Of::kDevice)
      : a(device_agent("alpha", "tcp", false, nullptr, nullptr, staging_bytes)),
        b(device_agent("beta", "tcp")),
        op(operation),
        of(random_pair(1)),
        source(writes() ? *a : *b, driver, of.source, writes() ? near : Block::Of::kHost),
        target(writes() ? *b : *a, driver, of.target, writes() ? Block::Of::kHost : near) {
    source.fill(1);
    introduce(*a, *b);
  }
  bool writes() const { return op == Op::kWrite; }
  DeviceCache& mine() { return writes() ? source : target; }
  DeviceCache& theirs() { return writes() ? target : source; }
  absl::StatusOr<AgentKvPlan> plan(const KvPlacement& local) {
    return AgentKvPlan::make_requantising(*a, op, local, "beta", theirs().place, of.blocks.share);
  }
  absl::Status status(const KvPlacement& local) { return plan(local).status(); }
  AgentKvRequest request() const { return request_of(op, of.blocks); }
  bool running(AgentTransferId id) const { return *a->state(id) == AgentTransferState::kRunning; }
  absl::Status run() { return run(mine().place); }
  absl::Status run(const KvPlacement& local) {
    const auto made = plan(local);
    if (!made.ok()) return made.status();
    const auto id = made->make_transfer(*a, request());
    if (!id.ok()) return id.status();
    absl::Status status = a->post(*id);
    if (status.ok()) {
      run_agents(*a, *b, [&] { return !running(*id); });
      status = a->status(*id);
    }
    EXPECT_TRUE(a->release(*id).ok());
    return status;
  }
  CacheBytes want() const {
    return requantised(of.source, source.bytes(), of.target, target.bytes(), of.blocks);
  }

  std::unique_ptr<Agent> a, b;
  const Op op;
  const RequantisedPair of;
  DeviceCache source, target;
};

// What lies in several allocations has no dma-buf, and the fake says who asks.
inline gpudirect::FakeOptions without_dma_buf(gpudirect::FakeOptions options = {}) {
  options.attributes.erase(gpudirect::kDmaBufSupported);
  return options;
}

inline gpudirect::CudaMemory::Options with_kernels() {
  gpudirect::CudaMemory::Options options = gpudirect::options_of_this_test();
  options.kernels = FakeDriver::image();
  return options;
}

}  // namespace baton::kvtransfer
