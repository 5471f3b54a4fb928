// More allocations of a device than a process may have descriptors: what is left of them is for
// sockets and files. Those that nobody can map any more are staged, and memory of the host goes on.
#include "tests/gpudirect/ipc/device_end.h"
#include "tests/std.h"
#include "tests/used.h"

namespace baton {
namespace {

using testing::HasSubstr;

constexpr size_t kSlabs = 100;
constexpr size_t kSlabPage = 4096;

// For as long as it lives, so many descriptors more than are open.
class RoomForDescriptors {
 public:
  explicit RoomForDescriptors(size_t more) {
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &before_), 0);
    const rlimit now{entries_of("/proc/self/fd") + more, before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &now), 0);
  }
  ~RoomForDescriptors() { setrlimit(RLIMIT_NOFILE, &before_); }

 private:
  rlimit before_{};
};

class ManyAllocations : public testing::TestWithParam<bool> {};

// As somebody who registers them, and as somebody whose peer does: it has its own already.
TEST_P(ManyAllocations, LeaveDescriptorsForSockets) {
  CleanFake gpu({.memory_bytes = size_t{1} << 30});
  End here(gpu, "shm"), there(gpu, "shm");
  here.make();
  there.make();
  std::vector<std::byte> host(2 * kSlabPage);
  const MemoryRegion host_here = *here.worker->register_memory(host.data(), kSlabPage);
  const MemoryRegion host_there =
      *there.worker->register_memory(host.data() + kSlabPage, kSlabPage);
  std::vector<std::unique_ptr<internal::DeviceBuffer>> slabs;
  std::vector<MemoryRegion> regions;
  const auto add = [&] {
    const auto region = there.worker->register_memory(slabs[regions.size()]->data(), kSlabPage);
    ASSERT_TRUE(region.ok()) << regions.size() << ": " << region.status();
    regions.push_back(*region);
  };
  std::generate_n(std::back_inserter(slabs), kSlabs,
                  [] { return *internal::device_memory()->allocate(0, kSlabPage); });
  const auto register_all = [&] {
    while (regions.size() < kSlabs && !testing::Test::HasFatalFailure()) add();
  };
  if (GetParam()) register_all();
  const RoomForDescriptors room(kSlabs * 7 / 10);
  register_all();
  const PeerId peer = *here.worker->connect(there.worker->address());
  const auto write = [&](const MemoryRegion& from, const MemoryRegion& to) {
    const auto id = here.worker->submit({.peer = peer,
                                         .local = from,
                                         .local_layout = Layout::contiguous(0, kSlabPage),
                                         .remote = *there.worker->remote_region(to),
                                         .remote_layout = Layout::contiguous(0, kSlabPage)});
    here.until([&] {
      there.worker->progress();
      return ended(*here.worker->state(*id));
    });
    const absl::Status status = here.worker->status(*id);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_TRUE(here.worker->release(*id).ok());
  };
  std::fill_n(here.view(), kSlabPage, std::byte{7});
  for (const MemoryRegion& region : regions) {
    write(host_here, host_there);
    write(here.region, region);
    if (HasFailure()) break;
  }
  for (const auto& slab : slabs) {
    EXPECT_TRUE(gpu.fake().read(reinterpret_cast<uintptr_t>(slab->data()), kSlabPage) ==
                std::string(kSlabPage, 7));
  }
  // Either says it of what it would have kept.
  const PeerId other = there.worker->next_peer_event().value().peer;
  EXPECT_THAT(GetParam() ? here.worker->explain(peer) : there.worker->explain(other),
              HasSubstr(GetParam() ? "CUDA IPC: " : "over CUDA IPC; no CUDA IPC: "));
  EXPECT_THAT(here.worker->explain(peer), HasSubstr("raise `ulimit -n`"));
  for (const MemoryRegion& region : regions) {
    EXPECT_TRUE(there.worker->deregister_memory(region).ok());
  }
  slabs.clear();
  for (End* end : {&here, &there}) end->give_back();
  for (End* end : {&here, &there}) end->worker.reset();  // before the host's memory
}

INSTANTIATE_TEST_SUITE_P(AllSides, ManyAllocations, testing::Values(false, true),
                         [](const testing::TestParamInfo<bool>& each) {
                           return std::string(each.param ? "OfThePeer" : "OfOnesOwn");
                         });

}  // namespace
}  // namespace baton
