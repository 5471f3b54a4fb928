// Agents over the fake driver, with memory of the host and of devices, for tests. Nothing moves but
// when they are driven.
#pragma once

#include "tests/conformance/harness.h"
#include "tests/gpudirect/fake/installed_fake.h"
#include "tests/kvtransfer/agent_pair.h"
#include "tests/std.h"

namespace baton::kvtransfer {

using gpudirect::FakeDriver;
using gpudirect::InstalledFake;

// Memory of one kind, registered. Byte i is `seed` + i, in a pattern of 251.
class Block {
 public:
  enum class Of : uint8_t {
    kHost,
    kDevice,  // as cudaMalloc makes it: others open it by a handle
    kSlab,    // by virtual memory management: others map it by a descriptor
  };
  Block(Of of, Agent& agent, InstalledFake& driver, size_t bytes, int seed, int device = 0)
      : kind_(of == Of::kHost ? MemoryKind::kDram : MemoryKind::kVram),
        agent_(agent),
        fake_(driver.fake()) {
    const auto ordinal = static_cast<uint64_t>(device);
    if (of == Of::kHost) {
      host_.resize(bytes);
      whole_ = {reinterpret_cast<uint64_t>(host_.data()), bytes, 0};
      view_ = host_.data();
    } else if (of == Of::kSlab) {
      slab_ = *driver.memory().allocate(device, bytes);
      whole_ = {reinterpret_cast<uint64_t>(slab_->data()), bytes, ordinal};
    } else {
      // Whole pages of the device: what an adapter is given is rounded up to the host's.
      constexpr size_t kPage = 64 << 10;
      taken_ = fake_.allocate((bytes + kPage - 1) / kPage * kPage, device);
      whole_ = {taken_, bytes, ordinal};
    }
    if (view_ == nullptr) view_ = fake_.view(whole_.address, bytes);
    fill(seed);
    const absl::Status status = agent.register_memory({whole_}, kind_);
    EXPECT_TRUE(status.ok()) << status;
  }
  ~Block() {
    if (registered_) take_back();
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  // Deregisters it, and frees what is of a device.
  void take_back() {
    const absl::Status status = agent_.deregister_memory({whole_}, kind_);
    EXPECT_TRUE(status.ok()) << status;
    registered_ = false;
    slab_.reset();
    if (taken_ != 0) fake_.free(std::exchange(taken_, 0));
  }
  void fill(int seed) {
    for (size_t i = 0; i < whole_.bytes; ++i) view_[i] = std::byte((i * 7 + seed) % 251);
  }
  std::vector<std::byte> bytes() const { return {view_, view_ + whole_.bytes}; }
  // `count` pages, evenly spread.
  std::vector<Descriptor> pages(size_t page, size_t count) const {
    std::vector<Descriptor> out;
    for (size_t i = 0; i < count; ++i) {
      out.push_back({whole_.address + i * (whole_.bytes / count), page, whole_.device});
    }
    return out;
  }
  const Descriptor& whole() const { return whole_; }
  MemoryKind kind() const { return kind_; }

 private:
  const MemoryKind kind_;
  Agent& agent_;
  FakeDriver& fake_;
  std::vector<std::byte> host_;
  std::unique_ptr<internal::DeviceBuffer> slab_;
  gpudirect::DevicePointer taken_ = 0;
  Descriptor whole_;
  std::byte* view_ = nullptr;
  bool registered_ = true;
};

inline std::unique_ptr<Agent> device_agent(const std::string& name, const std::string& provider,
                                           Surroundings* around = nullptr) {
  AgentOptions options = agent_options(name, provider, false);
  options.worker.settings = {{"staging.ring_mib", "16"}, {"peer.redial_ms", "0"}};
  if (around != nullptr) {
    options.worker.providers.clear();
    options.worker.require.clear();
    around->prepare(options.worker);
  }
  return make_agent(std::move(options));
}

// How memory of devices goes from one agent to another.
struct DeviceWay {
  const char* name;
  const char* provider;
  Block::Of device;       // what memory of a device is
  const char* explained;  // how it goes, in explain()
};
inline const DeviceWay kDeviceWays[] = {
    {"ipc", "shm", Block::Of::kSlab, "CUDA IPC"},
    {"ipc_handles", "shm", Block::Of::kDevice, "CUDA IPC"},
    {"shm", "shm", Block::Of::kDevice, "staged through 16 MiB"},
    {"tcp", "tcp", Block::Of::kDevice, "staged through 16 MiB"},
    {"verbs", "verbs_fake", Block::Of::kDevice, "verbs fake0"}};  // by a dma-buf

class DeviceAgents : public testing::TestWithParam<DeviceWay> {
 protected:
  static constexpr size_t kBytes = 3 << 20;
  void start(gpudirect::FakeOptions options = {}) {
    if (adapters()) {
      adapters_ = fake_verbs_surroundings();
      if (adapters_ == nullptr) GTEST_SKIP() << "built without the headers of rdma-core";
    } else {
      options.attributes.erase(gpudirect::kDmaBufSupported);
    }
    options.ipc_handles = !std::string_view(GetParam().explained).starts_with("staged");
    driver_.emplace(std::move(options));
    a_ = device_agent("alpha", GetParam().provider, adapters_.get());
    b_ = device_agent("beta", GetParam().provider, adapters_.get());
  }
  void TearDown() override {
    a_.reset();
    b_.reset();
    driver_.reset();
    if (adapters_ != nullptr) adapters_->check();
    adapters_.reset();
  }
  static bool adapters() { return std::string_view(GetParam().provider) == "verbs_fake"; }
  std::unique_ptr<Block> block(bool device, Agent& agent, int seed, size_t bytes = kBytes,
                               int ordinal = 0) {
    return std::make_unique<Block>(device ? GetParam().device : Block::Of::kHost, agent, *driver_,
                                   bytes, seed, ordinal);
  }
  absl::Status run(AgentTransferId id) {
    if (absl::Status status = a_->post(id); !status.ok()) return status;
    run_agents(*a_, *b_, [&] { return *a_->state(id) != AgentTransferState::kRunning; });
    return a_->status(id);
  }
  // Until nothing of the driver's is queued, and long enough for what is on its way.
  void settle() {
    for (int i = 0; i < 100; ++i) {
      a_->progress();
      b_->progress();
      driver_->fake().run_all();
    }
  }

  std::unique_ptr<Surroundings> adapters_;
  std::optional<gpudirect::CleanFake> driver_;
  std::unique_ptr<Agent> a_, b_;
};

}  // namespace baton::kvtransfer
