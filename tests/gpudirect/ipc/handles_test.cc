// Memory of cudaMalloc between two processes of one machine, by the driver's handles: opened once,
// closed when its owner takes it back, and staged where a handle does not open.
#include "gpudirect/contract/ipc_handles.h"
#include "tests/gpudirect/ipc/device_end.h"
#include "tests/std.h"

namespace baton {
namespace {

using gpudirect::DevicePointer;
using gpudirect::IpcHandle;
using gpudirect::kMiB;
using testing::HasSubstr;

// Offers memory of cudaMalloc.
void offer_malloced(const Pipe& down, const Pipe& up, gpudirect::FakeOptions options = {}) {
  offer(
      down, up, [](End& end) { end.make_by_malloc(); }, std::move(options));
}

// Has a peer's memory open, and stands still until it hears that word.
void keep_open(const Pipe& down, const Pipe& up, const char* word) {
  CleanFake fake;
  End end(fake, "shm");
  end.make();
  EXPECT_TRUE(end.exchange(down.hear()));
  up.say("open");
  EXPECT_EQ(down.hear(), word);
  end.until([&] { return end.worker->stats().peers_up == 0; });
  end.give_back();
}

// Promise(devices): `cudaMalloc` memory is open nowhere after `deregister_memory()` returns OK |
//   handles are marked before they are opened
TEST(CudaIpcHandles, MemoryOfCudaMallocIsOpenedOnceAndClosedWhenItIsTakenBack) {
  Child child([](const Pipe& down, const Pipe& up) { offer_malloced(down, up); });
  CleanFake fake;
  End here(fake, "shm");
  here.make_by_malloc();
  const std::string offered = child.up.hear();
  std::fill_n(here.view(), kSharedBytes, std::byte{7});
  EXPECT_TRUE(here.exchange(offered));
  EXPECT_TRUE(here.exchange(offered));
  EXPECT_EQ(here.view()[kSharedBytes - 1], std::byte{7});
  EXPECT_EQ(here.worker->stats().staged_transfers, 0u);
  EXPECT_THAT(here.worker->explain(here.peer),
              HasSubstr("CUDA IPC: 1 allocations mapped (1 of cudaMalloc, by its handles)"));
  EXPECT_EQ(fake.fake().calls_of("cuIpcOpenMemHandle"), 1u);
  EXPECT_EQ(fake.fake().calls_of("cuIpcCloseMemHandle"), 0u);
  take_back(child, here);
  EXPECT_EQ(fake.fake().calls_of("cuIpcCloseMemHandle"), 1u);
  EXPECT_FALSE(here.exchange(offered)) << "it is stale";
  here.give_back();
}

// Two workers of one process, and one of another: the driver opens it once.
TEST(CudaIpcHandles, AProcessOpensAHandleOnceHoweverManyWorkersMapIt) {
  Child child([](const Pipe& down, const Pipe& up) { offer_malloced(down, up); });
  CleanFake fake;
  End one(fake, "shm");
  End two(fake, "shm");
  one.make_by_malloc();
  two.make_by_malloc();
  const std::string offered = child.up.hear();
  EXPECT_TRUE(one.exchange(offered));
  EXPECT_TRUE(two.exchange(offered));
  EXPECT_EQ(fake.fake().calls_of("cuIpcOpenMemHandle"), 1u);
  one.give_back();
  one.worker.reset();
  EXPECT_EQ(fake.fake().calls_of("cuIpcCloseMemHandle"), 0u) << "the other one has it";
  EXPECT_TRUE(two.exchange(offered));
  take_back(child, two);
  EXPECT_EQ(fake.fake().calls_of("cuIpcCloseMemHandle"), 1u);
  two.give_back();
}

// A peer that has it open and does not look: who takes it back hears that, and which process it is.
TEST(CudaIpcHandles, APeerThatKeepsAMappingIsNamedAndDisconnected) {
  Child child([](const Pipe& down, const Pipe& up) { keep_open(down, up, "go on"); });
  CleanFake fake;
  End here(fake, "shm", {{"shm.fence_ms", "100"}});
  here.make_by_malloc();
  child.down.say(here.offer());
  await(child, here, "open");
  const absl::Status status = here.worker->deregister_memory(here.region);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("keeps device memory open"));
  EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(child.id())));
  child.down.say("go on");
  EXPECT_EQ(child.end(), 0);
  here.free();
}

// The connection is gone before the memory is taken back: what was opened over it counts.
TEST(CudaIpcHandles, ADisconnectingPeerIsWaitedForToo) {
  Child child([](const Pipe& down, const Pipe& up) { keep_open(down, up, "parted"); });
  CleanFake fake;
  End here(fake, "shm");
  here.make_by_malloc();
  child.down.say(here.offer());
  await(child, here, "open");
  std::optional<PeerEvent> event = here.worker->next_peer_event();
  ASSERT_TRUE(event.has_value());
  here.worker->begin_disconnect(event->peer, Time{0});
  here.until([&] { return here.worker->stats().peers_up == 0; });
  child.down.say("parted");
  here.give_back();  // closed by then: freeing it while it is open is against the fake's rules
}

// Both take back at once what the other one has open.
TEST(CudaIpcHandles, TwoThatTakeBackAtOnceDoNotWaitForEachOther) {
  const auto live = [](const Pipe& in, const Pipe& out) {
    CleanFake fake;
    End end(fake, "shm");
    end.make_by_malloc();
    out.say(end.offer());
    EXPECT_TRUE(end.exchange(in.hear()));
    EXPECT_EQ(end.worker->stats().staged_transfers, 0u);
    out.say("open");
    fcntl(in.ends[0], F_SETFL, O_NONBLOCK);
    end.until([&] { return in.hear() == "open"; });
    end.give_back();
    EXPECT_EQ(fake.fake().calls_of("cuIpcOpenMemHandle"), 1u);
  };
  Child child([&](const Pipe& down, const Pipe& up) { live(down, up); });
  live(child.up, child.down);
}

// Where the driver has no handles the transfer is staged, and explain() says why.
TEST(CudaIpcHandles, WhereNoHandleOpensItIsStagedAndTheReasonIsSaid) {
  struct Case {
    gpudirect::FakeOptions owner, other;
    const char* said;
  };
  const Case cases[] = {
      {{.ipc_handles = false}, {}, "staged"},
      {{.missing = {"cuIpcGetMemHandle"}}, {}, "staged"},
      {{}, {.ipc_handles = false}, "--ipc=host"},
      {{}, {.missing = {"cuIpcOpenMemHandle"}}, "no IPC handles for memory of cudaMalloc"},
  };
  for (const Case& each : cases) {
    Child child([&](const Pipe& down, const Pipe& up) { offer_malloced(down, up, each.owner); });
    CleanFake fake(each.other);
    End here(fake, "shm");
    here.make();
    const std::string offered = child.up.hear();
    EXPECT_TRUE(here.exchange(offered));
    EXPECT_EQ(here.worker->stats().staged_transfers, 2u);
    // The reason is with whoever has it: here, or at the owner, who shares nothing then.
    EXPECT_THAT(here.worker->explain(here.peer), HasSubstr(each.said));
    take_back(child, here);
    here.give_back();
  }
}

// The traps of the driver, at its calls: memory that was freed, and more than there is.
TEST(CudaIpcHandles, WhatIsNotBehindAHandleIsRefused) {
  for (const bool freed : {true, false}) {
    SCOPED_TRACE(freed);
    Child child([&](const Pipe& down, const Pipe& up) {
      CleanFake fake;
      DevicePointer at = fake.fake().allocate(kMiB);
      const auto shared = fake.memory().share(gpudirect::pointer_of<void>(at + 4096), kMiB - 4096);
      EXPECT_TRUE(shared.ok()) << shared.status();
      EXPECT_EQ(shared->offset, 4096u);
      EXPECT_EQ(shared->bytes, kMiB);
      if (freed) {
        fake.fake().free(at);
        at = fake.fake().allocate(kMiB);  // perhaps at the same address
      }
      up.say({reinterpret_cast<const char*>(shared->handle.data()), shared->handle.size()});
      EXPECT_EQ(down.hear(), "tried");
      fake.fake().free(at);
    });
    const std::string said = child.up.hear();
    CleanFake fake;
    DeviceExport memory{.bytes = kMiB + (freed ? 0 : 1), .by_handle = true};
    memory.device_uuid.fill(1);
    ASSERT_EQ(said.size(), memory.handle.size());
    std::copy(said.begin(), said.end(), memory.handle.begin());
    const absl::Status refused = fake.memory().map(memory).status();
    if (freed) {
      EXPECT_THAT(std::string(refused.message()), HasSubstr("opening the handle"));
    } else {
      EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument) << refused;
      memory.bytes = kMiB;
      EXPECT_TRUE(fake.memory().map(memory).ok());
    }
    memory.handle.fill(9);
    EXPECT_FALSE(fake.memory().map(memory).ok()) << "no handle at all";
    child.down.say("tried");
  }
}

// In one process nothing is opened: the memory is used where it lies, if it is still there.
TEST(CudaIpcHandles, InOneProcessItIsUsedWhereItLies) {
  CleanFake fake;
  End a(fake, "shm");
  End b(fake, "shm");
  a.make_by_malloc();
  b.make_by_malloc();
  EXPECT_TRUE(a.exchange(b.offer(), b.worker.get()));
  EXPECT_EQ(a.worker->stats().staged_transfers, 0u);
  EXPECT_EQ(fake.fake().calls_of("cuIpcOpenMemHandle"), 0u);

  auto shared = *fake.memory().share(b.address(), kSharedBytes);
  shared.same_process = true;
  EXPECT_TRUE(fake.memory().map(shared).ok());
  shared.allocation[1] += 1;  // another allocation was there then
  EXPECT_EQ(fake.memory().map(shared).status().code(), absl::StatusCode::kNotFound);
  a.give_back();
  b.give_back();
}

}  // namespace
}  // namespace baton
