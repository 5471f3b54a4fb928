// What agents say to memory that is not what it is said to be, and where there are no devices.
#include "tests/gpudirect/agents/device_agents.h"
#include "tests/temporary_folder.h"
#include "tests/test.h"
#include "transport/base/unique_fd.h"

namespace baton::kvtransfer {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(MemoryKinds, MemoryOfAnotherKindOrDeviceIsRefusedWithTheRemedy) {
  gpudirect::CleanFake driver({.devices = 2});
  FakeDriver& fake = driver.fake();
  const gpudirect::DevicePointer device = fake.allocate(4096, 1);
  const gpudirect::DevicePointer managed = fake.allocate(4096, 0, true);
  const gpudirect::DevicePointer freed = fake.allocate(4096, 0);
  fake.free(freed);
  std::vector<std::byte> host(4096);
  const auto host_address = reinterpret_cast<uint64_t>(host.data());
  {
    const std::unique_ptr<Agent> agent = device_agent("alpha", "tcp");
    const auto refused = [&](const Descriptor& range, MemoryKind kind) {
      const absl::Status status = agent->register_memory({{host_address, 64, 0}, range}, kind);
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
      return std::string(status.message());
    };
    EXPECT_THAT(refused({device, 4096, 1}, MemoryKind::kDram),
                AllOf(HasSubstr("range 1 of 2"), HasSubstr("memory of CUDA device 1"),
                      HasSubstr("register them as VRAM, with device 1")));
    EXPECT_THAT(refused({managed, 4096, 0}, MemoryKind::kDram), HasSubstr("managed"));
    const auto alone = [&](const Descriptor& range) {
      const absl::Status status = agent->register_memory({range}, MemoryKind::kVram);
      EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
      return std::string(status.message());
    };
    EXPECT_THAT(alone({host_address, 4096, 0}), HasSubstr("register memory of the host as DRAM"));
    EXPECT_THAT(alone({device, 4096, 0}), HasSubstr("memory of CUDA device 1, not of device 0"));
    EXPECT_THAT(alone({managed, 4096, 0}), HasSubstr("managed"));
    EXPECT_FALSE(alone({freed, 4096, 0}).empty());
    EXPECT_FALSE(alone({device, 1 << 20, 1}).empty()) << "past its end";
    EXPECT_FALSE(alone({0, 0, 0}).empty());
    EXPECT_EQ(agent->stats().registered, 0u);
    // All or none, of those that are right too.
    EXPECT_FALSE(
        agent->register_memory({{device, 4096, 1}, {device, 64, 7}}, MemoryKind::kVram).ok());
    EXPECT_EQ(agent->stats().registered, 0u);
    ASSERT_TRUE(agent->register_memory({{device, 4096, 1}}, MemoryKind::kVram).ok());
    const std::vector<Descriptor> other = {{device, 64, 0}}, same = {{device, 64, 1}};
    EXPECT_TRUE(absl::IsNotFound(agent->prepare_local(other, MemoryKind::kVram).status()));
    EXPECT_TRUE(agent->prepare_local(same, MemoryKind::kVram).ok());
    EXPECT_THAT(agent->prepare_local(same).status().message(),
                HasSubstr("registered DRAM range of alpha"));
  }
  fake.free(device);
  fake.free(managed);
}

TEST(MemoryKinds, WithoutADeviceItIsSaidWhy) {
  const internal::DeviceMemory* const before = internal::device_memory();
  std::vector<std::byte> host(4096);
  const std::vector<Descriptor> range = {{reinterpret_cast<uint64_t>(host.data()), 4096, 0}};
  internal::use_device_memory(nullptr);
  const std::unique_ptr<Agent> agent = device_agent("alpha", "tcp");
  const absl::Status none = agent->register_memory(range, MemoryKind::kVram);
  EXPECT_TRUE(absl::IsUnimplemented(none)) << none;
  EXPECT_THAT(std::string(none.message()), HasSubstr("VRAM is memory of CUDA devices"));
  EXPECT_TRUE(absl::IsUnimplemented(memory_supported(MemoryKind::kVram)));
  internal::use_device_memory(before);
  EXPECT_TRUE(absl::IsNotFound(agent->prepare_local(range, MemoryKind::kVram).status()));
  EXPECT_FALSE(agent->has_remote("alpha", range, MemoryKind::kVram));
  EXPECT_TRUE(memory_supported(MemoryKind::kDram).ok());
  EXPECT_TRUE(memory_supported(MemoryKind::kFile).ok());
  EXPECT_TRUE(absl::IsUnimplemented(memory_supported(MemoryKind::kBlock)));
  EXPECT_TRUE(absl::IsInvalidArgument(memory_supported(static_cast<MemoryKind>(9))));
  InstalledFake driver;
  EXPECT_TRUE(memory_supported(MemoryKind::kVram).ok());
  driver.fake().fail_next("cuDeviceGetCount", gpudirect::kOutOfMemory);
  EXPECT_THAT(std::string(memory_supported(MemoryKind::kVram).message()),
              HasSubstr("CUDA_ERROR_OUT_OF_MEMORY"));
}

TEST(MemoryKinds, FilesAreNotReadIntoDevices) {
  gpudirect::CleanFake driver;
  const TemporaryFolder folder;
  const base::UniqueFd file(::open(folder.path("file").c_str(), O_RDWR | O_CREAT, 0600));
  ASSERT_EQ(ftruncate(file.get(), 4096), 0);
  const std::unique_ptr<Agent> agent = device_agent("alpha", "tcp");
  const Block block(Block::Of::kDevice, *agent, driver, 4096, 1);
  const std::vector<std::byte> before = block.bytes();
  const std::vector<Descriptor> range = {{0, 4096, static_cast<uint64_t>(file.get())}};
  ASSERT_TRUE(agent->register_memory(range, MemoryKind::kFile).ok());
  const std::vector<Descriptor> whole = {block.whole()};
  const auto local = agent->prepare_local(whole, MemoryKind::kVram);
  const auto remote = agent->prepare_remote("alpha", range, MemoryKind::kFile);
  for (const Op op : {Op::kRead, Op::kWrite}) {
    const absl::Status refused[] = {agent->make_transfer(op, *local, {0}, *remote, {0}).status(),
                                    agent
                                        ->make_transfer(op, {{block.whole()}}, range, "alpha", {},
                                                        MemoryKind::kFile, MemoryKind::kVram)
                                        .status()};
    for (const absl::Status& status : refused) {
      EXPECT_TRUE(absl::IsUnimplemented(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("not from VRAM"));
    }
  }
  EXPECT_TRUE(block.bytes() == before);
}

}  // namespace
}  // namespace baton::kvtransfer
