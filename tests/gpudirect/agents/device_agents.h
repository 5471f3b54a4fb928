// Agents over the fake driver, with memory of the host and of devices, for tests. Nothing moves but
// when they are driven.
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "tests/conformance/harness.h"
#include "tests/gpudirect/fake/installed_fake.h"
#include "tests/kvtransfer/agent_pair.h"

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
      taken_ = fake_.allocate(bytes, device);
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
    free_it();
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
  void free_it() {
    slab_.reset();
    if (taken_ != 0) fake_.free(std::exchange(taken_, 0));
  }

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
                                           bool thread = false, const char* shape = nullptr,
                                           Surroundings* around = nullptr) {
  AgentOptions options = agent_options(name, provider, thread);
  if (shape != nullptr) options.worker.shape = *LinkShape::parse(shape);
  options.worker.settings = {{"staging.ring_mib", "16"}, {"peer.redial_ms", "0"}};
  if (around != nullptr) {
    options.worker.providers.clear();
    options.worker.require.clear();
    around->prepare(options.worker);
  }
  return make_agent(std::move(options));
}

}  // namespace baton::kvtransfer
