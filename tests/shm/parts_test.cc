// The parts of the shm provider by themselves: copy kernels, the ring, messages, memory files.
#include "tests/test.h"
#include "transport/base/child.h"
#include "transport/base/copies/copy_kernel.h"
#include "transport/shm/cma.h"
#include "transport/shm/memory_file.h"
#include "transport/shm/notify_ring.h"
#include "transport/shm/packet_socket.h"
#include "transport/shm/peer_memory.h"

namespace baton::shm {
namespace {

TEST(CopyKernel, CopiesEveryByteAndNoOther) {
  constexpr size_t kMargin = 64;
  std::vector<std::byte> from(80 << 10);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<std::byte>(i * 7 + i / 251);
  std::vector<std::byte> to(from.size() + 2 * kMargin);
  for (size_t bytes :
       {0u, 1u, 63u, 64u, 65u, 255u, 256u, 1000u, 4096u, 16383u, 16384u, 16385u, 40000u, 65536u}) {
    for (size_t to_shift : {0u, 1u, 31u, 63u}) {
      for (size_t from_shift : {0u, 3u, 64u}) {
        std::fill(to.begin(), to.end(), std::byte{0xee});
        base::stream_copy(to.data() + kMargin + to_shift, from.data() + from_shift, bytes);
        base::stream_fence();
        std::vector<std::byte> want(to.size(), std::byte{0xee});
        if (bytes != 0) {
          std::memcpy(want.data() + kMargin + to_shift, from.data() + from_shift, bytes);
        }
        ASSERT_EQ(to, want) << bytes << " bytes, shifts " << to_shift << " and " << from_shift;
      }
    }
  }
}

struct RingPair {
  std::unique_ptr<Lane> lane = std::make_unique<Lane>();
  RingWriter writer{*lane};
  RingReader reader{*lane};
};

TEST(NotifyRing, RefusesWhatAHostileSenderWrites) {
  Arrival arrival;
  {
    RingPair ring;  // more bytes than the ring holds
    ring.lane->tail.store(Lane::kRingBytes + 8);
    EXPECT_FALSE(ring.reader.next(arrival).ok());
  }
  {
    RingPair ring;  // less than a header
    ring.lane->tail.store(4);
    EXPECT_FALSE(ring.reader.next(arrival).ok());
  }
  for (const auto& [bytes, kind] : std::vector<std::pair<uint32_t, uint32_t>>{
           {16, 1}, {UINT32_MAX, 1}, {kMaxNotification + 1000, 1}, {8, 2}, {8, 99}}) {
    RingPair ring;
    std::memcpy(ring.lane->ring, &bytes, 4);
    std::memcpy(ring.lane->ring + 4, &kind, 4);
    ring.lane->tail.store(16);
    EXPECT_FALSE(ring.reader.next(arrival).ok()) << bytes << " bytes of kind " << kind;
  }
}

TEST(MemoryFile, MapsOnlyWhatCannotShrink) {
  using Protection = MappedFile::Protection;
  const base::UniqueFd open_file(memfd_create("t", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  ASSERT_EQ(ftruncate(open_file.get(), 8192), 0);
  auto map = MappedFile::map(open_file.get(), 4096, Protection::kReadWrite, "file");
  EXPECT_EQ(map.status().code(), absl::StatusCode::kInvalidArgument) << map.status();
  ASSERT_TRUE(shareable(open_file.get()));  // seals it
  map = MappedFile::map(open_file.get(), 4096, Protection::kReadWrite, "file");
  ASSERT_TRUE(map.ok()) << map.status();
  EXPECT_EQ(map->size(), 8192u);
  EXPECT_FALSE(MappedFile::map(open_file.get(), 8193, Protection::kReadWrite, "file").ok());

  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  const base::UniqueFd in(ends[0]);
  const base::UniqueFd out(ends[1]);
  EXPECT_FALSE(MappedFile::map(in.get(), 1, Protection::kReadOnly, "file").ok());
  EXPECT_FALSE(shareable(in.get()));
}

TEST(MemoryFile, AControlSegmentIsWritableByItsOwnerOnly) {
  auto file = must(create_file("t", 4096));
  forbid_new_writers(file.fd.get());
  using Protection = MappedFile::Protection;
  EXPECT_FALSE(MappedFile::map(file.fd.get(), 4096, Protection::kReadWrite, "file").ok());
  auto map = MappedFile::map(file.fd.get(), 4096, Protection::kReadOnly, "file").value();
  file.mapping.data()[7] = std::byte{42};
  EXPECT_EQ(map.data()[7], std::byte{42});
}

TEST(MemoryFile, PopulatesInSteps) {
  auto file = create_file("t", 64 << 10).value();
  int steps = 0;
  while (file.mapping.populate(16 << 10)) ASSERT_LT(++steps, 5);
  EXPECT_TRUE(file.mapping.populated());
}

// The sender pushes, looks whether the lane is closed, has the record as done, and then says that
// there is one: who closes in between reads it all the same.
// Promise(lost): Over shm, what a sender has as done is delivered although it was stopped before it
//   could wake the target | closing reads the ring to its end
TEST(NotifyRing, PushedDataIsReadAfterAnUnannouncedClose) {
  auto lane = std::make_unique<Lane>();
  RingWriter writer(*lane);
  RingReader reader(*lane);
  Arrival arrival;
  writer.push({.transfer = {1, 1}, .notify = "one"});
  lane->activity.fetch_add(1);
  ASSERT_TRUE(reader.look());
  ASSERT_TRUE(*reader.next(arrival));
  ASSERT_FALSE(*reader.next(arrival));
  EXPECT_TRUE(reader.quiet());

  writer.push({.transfer = {2, 1}, .notify = "two"});
  EXPECT_EQ(lane->closed.load(), 0u) << "so the sender has it as done";
  reader.close();
  EXPECT_EQ(lane->closed.load(), 1u);
  EXPECT_FALSE(reader.look());
  ASSERT_TRUE(reader.pending());
  ASSERT_TRUE(*reader.next(arrival));
  EXPECT_EQ(arrival.notify, "two");
  ASSERT_FALSE(*reader.next(arrival));
  EXPECT_FALSE(reader.pending());
}

// A process that has ended is no reason to look for one in another namespace.
TEST(Cma, APeerThatHasEndedIsUnavailable) {
  const auto gate = must(Gate::create());
  CmaPeer peer{.pid = getpid(), .gate = gate.address(), .nonce = gate.nonce()};
  EXPECT_TRUE(probe_cma(peer).ok()) << probe_cma(peer);
  const pid_t child = base::fork_child();
  ASSERT_GE(child, 0);
  if (child == 0) _exit(0);
  ASSERT_EQ(waitpid(child, nullptr, 0), child);
  peer.pid = child;
  const absl::Status gone = probe_cma(peer);
  peer.pid = 0;
  const absl::Status elsewhere = probe_cma(peer);
  EXPECT_TRUE(absl::IsUnavailable(gone)) << gone;
  EXPECT_TRUE(absl::IsFailedPrecondition(elsewhere)) << elsewhere;

  // And so is memory of its that is no pool's.
  for (const absl::Status& cma : {gone, elsewhere}) {
    auto control = create_file("control", sizeof(ControlSegment)).value();
    SharedRegion& row = control.mapping.as<ControlSegment>()->regions[3];
    row.generation = 1;
    row.key = 7;
    row.size = 4096;
    row.access = static_cast<uint32_t>(Access::kRemoteReadWrite);
    TransferDescriptor read;
    read.op = Op::kRead;
    read.remote = {.key = 7, .size = 4096, .index = 3, .generation = 1};
    read.remote_layout = Layout::contiguous(0, 4096);
    PeerMemory::Target target;
    const PeerMemory memory(std::move(control.mapping), peer, cma);
    EXPECT_EQ(memory.resolve(read, target).code(), cma.code());
  }
}

}  // namespace
}  // namespace baton::shm
