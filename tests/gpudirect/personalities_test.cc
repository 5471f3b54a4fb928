// Drivers and devices that lack something: memory of a device moves all the same, by the next best
// way and with one clear line about the better ones; and the host's memory knows nothing of it.
#include <string>

#include "tests/gpudirect/ipc/device_end.h"

namespace baton {
namespace {

using gpudirect::Attributes;
using testing::HasSubstr;

struct Personality {
  const char* name;
  gpudirect::FakeOptions options;
  const char* said;   // of memory that is staged
  bool maps = false;  // shm copies between devices
};

std::vector<Personality> personalities() {
  Attributes old = gpudirect::h100();
  old.erase(gpudirect::kHostAllocDmaBuf);
  old.erase(gpudirect::kDmaBufSupported);
  Attributes two = gpudirect::h100();
  two[gpudirect::kAsyncEngineCount] = 2;
  return {
      {"WSL",
       {.attributes = gpudirect::wsl(), .ipc_handles = false, .rdma_access = false},
       "gives no IPC handle"},
      {"without virtual memory management",
       {.attributes = gpudirect::without_virtual_memory(), .ipc_handles = false},
       "gives no IPC handle"},
      {"one copy engine", {.attributes = gpudirect::one_copy_engine()}, "", true},
      {"two copy engines", {.attributes = two}, "", true},
      {"too little BAR1", {.window_bytes = 4096}, "no dma-buf: exporting", true},
      {"an old driver",
       {.attributes = old, .version = 11030, .missing = {"cuIpcOpenMemHandle", "cuDeviceGetUuid"}},
       "no dma-buf: the CUDA driver is older than 11.7"},
  };
}

class Personalities : public testing::TestWithParam<const char*> {};

// Promise(devices): Whatever the driver lacks, memory moves by the next best way, with one line of
//   why | each way has its probe and reason
TEST_P(Personalities, MemoryOfADeviceMovesAndTheReasonIsOneLine) {
  for (const Personality& each : personalities()) {
    SCOPED_TRACE(each.name);
    CleanFake fake(each.options);
    End a(fake, GetParam());
    End b(fake, GetParam());
    a.make_by_malloc();
    b.make_by_malloc();
    std::fill_n(a.view(), kSharedBytes, std::byte{7});
    EXPECT_TRUE(a.exchange(b.offer(), b.worker.get()));
    EXPECT_EQ(b.view()[kSharedBytes - 1], std::byte{7});
    const bool direct = each.maps && std::string_view(GetParam()) == "shm";
    EXPECT_EQ(a.worker->stats().staged_transfers, direct ? 0u : 2u);
    const std::string text = a.worker->explain(a.peer);
    EXPECT_THAT(text, HasSubstr(each.said));
    EXPECT_THAT(text, testing::Not(HasSubstr("\n")));

    // The host's goes on, and nothing of it is staged.
    expect_host_moves(*a.worker, *b.worker);
    EXPECT_EQ(a.worker->stats().staged_transfers, direct ? 0u : 2u);
    a.give_back();
    b.give_back();
  }
}

INSTANTIATE_TEST_SUITE_P(Over, Personalities, testing::Values("shm", "tcp"),
                         [](const auto& each) { return std::string(each.param); });

// Slabs of ours are made without what the driver only says it has.
TEST(LackingDrivers, MemoryIsCreatedWithoutRdmaWhereTheDriverLacksIt) {
  CleanFake fake({.rdma_access = false});
  const auto buffer = must(internal::device_memory()->allocate(0, 1 << 20));
  std::array<std::byte, 4> bytes{std::byte{1}, std::byte{2}, std::byte{3}, std::byte{4}};
  EXPECT_TRUE(buffer->put(0, bytes).ok());
}

}  // namespace
}  // namespace baton
