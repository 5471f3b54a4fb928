// KV tiers below a cache in a device's memory: the engine sees whole blocks on the device, or none,
// and has its blocks back when nobody copies them any more.
#include "gpudirect/device_memory.h"
#include "kvtransfer/tiers/tier_store.h"
#include "tests/gpudirect/fake/installed_fake.h"
#include "tests/test.h"
#include "tests/until.h"

namespace baton::kvtransfer::tiers {
namespace {

using gpudirect::CleanFake;
using gpudirect::Device;
using gpudirect::DeviceSlab;

constexpr uint32_t kLayers = 3, kBlocks = 40;
constexpr size_t kBlockBytes = 4096;

class StagedTiersTest : public testing::Test {
 protected:
  void SetUp() override {
    store_ = must(TierStore::open({.cache = {.base = reinterpret_cast<std::byte*>(at(0, 0)),
                                             .layers = kLayers,
                                             .blocks = kBlocks,
                                             .block_bytes = kBlockBytes},
                                   .host_bytes = 16 << 20,
                                   .pinned_blocks = 2}));  // 2 places for saves, 4 for loads
  }

  const std::function<void()> wait_ = [this] { store_->wait(std::chrono::milliseconds(1), -1); };

  gpudirect::DevicePointer at(uint32_t layer, uint32_t block) const {
    return slab_->span().data + (size_t{layer} * kBlocks + block) * kBlockBytes;
  }
  static std::string text(uint32_t layer, uint32_t number) {
    return std::string(kBlockBytes, static_cast<char>('a' + (7 * layer + number) % 26));
  }
  std::string there(uint32_t layer, uint32_t block) {
    return driver_.fake().read(at(layer, block), kBlockBytes);
  }
  void fill(uint32_t block, const std::optional<uint32_t>& number) {
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      driver_.fake().write(at(layer, block), number.has_value() ? text(layer, *number)
                                                                : std::string(kBlockBytes, '-'));
    }
  }
  TierKey key(uint32_t number) const { return keys_.key(std::to_string(number)); }
  // Blocks 0.. are written over as soon as they are given back.
  void save(uint32_t count) {
    for (uint32_t block = 0; block < count; ++block) fill(block, block);
    uint32_t taken = 0, back = 0;
    until([&] { return back >= count; },
          [&] {
            if (taken < count) {
              const TierSave next{key(taken), taken};
              taken += static_cast<uint32_t>(store_->save({&next, 1}));
            }
            for (const uint32_t block : store_->unpinned()) {
              fill(block, std::nullopt);
              ++back;
            }
            if (back < count) store_->wait(std::chrono::milliseconds(1), -1);
          });
    EXPECT_FALSE(store_->has_pinned());
    store_->flush();
  }

  CleanFake driver_;
  const TierKeys keys_{{.weights = "w"}};
  const std::unique_ptr<Device> device_ = *Device::open(gpudirect::FakeDriver::driver(), 0);
  const std::unique_ptr<DeviceSlab> slab_ =
      *DeviceSlab::create(*device_, kLayers* kBlocks* kBlockBytes);
  std::unique_ptr<TierStore> store_;
};

TEST_F(StagedTiersTest, LayersAreThereWhenTheyAreSaidToBe) {
  save(10);
  for (const uint32_t count : {3u, 10u}) {  // in one piece, and in three
    std::vector<TierKey> wanted;
    std::vector<uint32_t> blocks;
    for (uint32_t i = 0; i < count; ++i) {
      wanted.push_back(key(i));
      blocks.push_back(39 - i);
      fill(39 - i, std::nullopt);
    }
    EXPECT_EQ(store_->find(wanted).blocks, count);
    const TierLoadId load = store_->load(wanted, blocks, std::chrono::seconds(60));
    for (uint32_t layers = 0; layers < kLayers;) {
      store_->wait(std::chrono::milliseconds(1), -1);
      layers = store_->layers_loaded(load);
      ASSERT_TRUE(store_->load_status(load).ok()) << store_->load_status(load);
      for (uint32_t layer = 0; layer < layers; ++layer) {
        for (uint32_t i = 0; i < count; ++i) {
          ASSERT_EQ(there(layer, 39 - i), text(layer, i)) << "layer " << layer << " of " << layers;
        }
      }
    }
    until([&] { return store_->end_load(load); }, wait_);
  }
  EXPECT_EQ(store_->stats().loaded, 13u);
}

TEST_F(StagedTiersTest, NothingIsWrittenBehindTheEndOfALoad) {
  save(8);
  for (int rounds = 0; rounds < 6; ++rounds) {
    std::vector<TierKey> wanted;
    std::vector<uint32_t> blocks;
    for (uint32_t i = 0; i < 8; ++i) {
      wanted.push_back(key(i));
      blocks.push_back(20 + i);
    }
    const TierLoadId load = store_->load(wanted, blocks, std::chrono::seconds(60));
    for (int i = 0; i < rounds * 3; ++i) store_->layers_loaded(load);
    until([&] { return store_->end_load(load); }, wait_);
    for (const uint32_t block : blocks) fill(block, std::nullopt);
    driver_.fake().run_all();
    store_->wait(std::chrono::milliseconds(1), -1);
    driver_.fake().run_all();
    for (const uint32_t block : blocks) {
      for (uint32_t layer = 0; layer < kLayers; ++layer) {
        ASSERT_EQ(there(layer, block), std::string(kBlockBytes, '-')) << rounds;
      }
    }
  }
}

TEST_F(StagedTiersTest, WhatIsNotThereIsAnErrorAndGivesItsPlacesBack) {
  save(2);
  const std::vector<TierKey> wanted = {key(0), key(77)};
  const std::vector<uint32_t> blocks = {10, 11};
  for (int i = 0; i < 4; ++i) {
    const TierLoadId load = store_->load(wanted, blocks, std::chrono::seconds(60));
    until([&] { return !store_->load_status(load).ok(); }, wait_);
    until([&] { return store_->end_load(load); }, wait_);
  }
  const TierLoadId load =
      store_->load({wanted.data(), 1}, {blocks.data(), 1}, std::chrono::seconds(60));
  until([&] { return store_->layers_loaded(load) >= kLayers; }, wait_);
  EXPECT_EQ(there(0, 10), text(0, 0));
  until([&] { return store_->end_load(load); }, wait_);
}

}  // namespace
}  // namespace baton::kvtransfer::tiers
