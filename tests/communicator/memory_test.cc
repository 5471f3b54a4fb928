// The memory of a communicator: which of it peers know, however much there is.
#include "collectives/executor/memory.h"
#include "tests/test.h"

namespace baton::collectives {
namespace {

TEST(Memory, CallersCannotUseUpTheRegionsThatPeersKnow) {
  constexpr size_t kSlab = 2 << 20;
  constexpr size_t kOfCallers = 3, kAll = 5;
  auto worker = must(Worker::create({.providers = {"shm"}}));
  auto memory = must(executor::Memory::create(
      *worker, {.slab_bytes = kSlab, .regions = kAll, .regions_of_callers = kOfCallers}));
  const auto known = [&](const Block& block) {
    return memory->find({block.data, block.size, 1, 0}) != nullptr;
  };
  std::vector<Block> blocks;
  for (size_t i = 0; i < 2 * kAll; ++i) {
    auto block = memory->allocate_for_caller(kSlab);  // a slab of its own
    ASSERT_TRUE(block.ok()) << i << ": " << block.status();
    EXPECT_EQ(known(*block), i < kOfCallers) << i;
    blocks.push_back(*block);
  }
  auto staging = must(memory->allocate(kSlab));
  EXPECT_TRUE(known(staging));
  // A block that a caller gave back may be used for staging: then peers must know it.
  memory->free(blocks.back());
  auto reused = must(memory->allocate(kSlab));
  EXPECT_EQ(reused.data, blocks.back().data);
  EXPECT_TRUE(known(reused));
  EXPECT_TRUE(absl::IsResourceExhausted(memory->allocate(kSlab).status()));
  EXPECT_EQ(memory->regions().size(), kAll);
  blocks.back() = reused;
  blocks.push_back(staging);
  for (const Block& block : blocks) memory->free(block);
}

}  // namespace
}  // namespace baton::collectives
