// What does not fit, is too much, or does not match: each is said with its remedy, and both sides
// go on.
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/fails_with.h"
#include "tests/transport/fading_memory.h"
#include "tests/verbs/verbs_pair.h"
#include "transport/address.h"
#include "transport/net/acceptor.h"
#include "verbs/device/message.h"

namespace baton {
namespace {

using testing::AllOf;
using testing::HasSubstr;

TEST(BadInput, APortThatIsDownIsNamedWithTheRemedyAndMayComeUpLater) {
  VerbsPair pair({}, {{"verbs.devices", "fake0:1"}});
  pair.fake->set_port(0, false);
  EXPECT_THAT(pair.refusal(), AllOf(HasSubstr("fake0:1 is down"), HasSubstr("ip link set")));
  pair.fake->set_port(0, true);
  pair.connect();
  EXPECT_TRUE(pair.run(pair.request(Op::kWrite)).ok());
}

TEST(BadInput, SidesOfDifferentMtuAgreeOnTheLesser) {
  VerbsPair pair({});
  pair.settings = {{"verbs.mtu", "1024"}};
  pair.start(pair.b, "b of another MTU");
  pair.connect();
  EXPECT_THAT(pair.a.worker->explain(pair.a.peer), HasSubstr("MTU 1024"));
  pair.fill(1);
  EXPECT_TRUE(pair.run(pair.request(Op::kWrite)).ok());
  EXPECT_TRUE(pair.a.memory == pair.b.memory);  // and the fake has seen no ends that differ
}

TEST(BadInput, AnotherVersionIsNamed) {
  std::string extra = verbs::encode_offers({verbs::PortOffer{}});
  ASSERT_TRUE(verbs::decode_offers(extra).ok());
  extra[0] = 77;
  EXPECT_THAT(verbs::decode_offers(extra).status(),
              fails_with(Code::kFailedPrecondition,
                         {"version 77", "install the same Baton on both sides"}));
}

TEST(BadInput, TooManyQueuePairsAreSaidHereAndOfThePeer) {
  for (const size_t room : {size_t{0}, size_t{1}}) {
    VerbsPair pair({.max_queue_pairs = room});
    EXPECT_THAT(pair.refusal(), AllOf(HasSubstr("no queue pair of depth"), HasSubstr("verbs.qps")));
    pair.fake->set_max_queue_pairs(2);
    pair.connect();
    EXPECT_TRUE(pair.run(pair.request(Op::kRead)).ok());
  }
}

TEST(BadInput, FewerQueuePairsThanAskedStillWork) {
  VerbsPair pair({.max_queue_pairs = 5}, {{"verbs.qps", "4"}});
  pair.connect();
  EXPECT_TRUE(pair.run(pair.request(Op::kWrite)).ok());
  EXPECT_EQ(pair.a.worker->peer_state(pair.a.peer), PeerState::kUp);
}

TEST(BadInput, TooManyRegionsAreSaid) {
  // Four for the sides' memory and messages.
  VerbsPair pair({.max_regions = 4});
  pair.connect();
  std::vector<std::byte> memory(64 << 10);
  std::vector<MemoryRegion> regions;
  absl::Status status;
  for (size_t i = 0; i < 4 && status.ok(); ++i) {
    auto region = pair.a.worker->register_memory(&memory[i * 4096], 4096);
    status = region.status();
    if (region.ok()) regions.push_back(*region);
  }
  EXPECT_THAT(status, fails_with(Code::kResourceExhausted, {"regions", "fake0"}));
  EXPECT_TRUE(pair.run(pair.request(Op::kWrite)).ok());
  for (const MemoryRegion& region : regions) {
    EXPECT_TRUE(pair.a.worker->deregister_memory(region).ok());
  }
  EXPECT_TRUE(pair.a.worker->register_memory(memory.data(), 4096).ok());
}

class DmaBuf : public testing::Test {
 protected:
  DmaBuf() : fd_(memfd_create("a stand-in for a dma-buf", MFD_CLOEXEC)) {
    EXPECT_EQ(ftruncate(fd_, kBytes), 0);
    data_ = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  }
  ~DmaBuf() override {
    munmap(data_, kBytes);
    close(fd_);
  }
  static constexpr size_t kBytes = 1 << 20;
  static constexpr size_t kOffset = 8192;
  int fd_;
  void* data_;
};

TEST_F(DmaBuf, MemoryIsRegisteredThroughIt) {
  VerbsPair pair({});
  pair.connect();
  char* const base = static_cast<char*>(data_) + kOffset;
  auto region = must(
      pair.b.worker->register_memory(base, kBytes - kOffset, Access::kRemoteReadWrite,
                                     BackingFile{.fd = fd_, .offset = kOffset, .dma_buf = true}));
  EXPECT_EQ(pair.fake->stats().dma_bufs, 1u);
  pair.fill(9);
  TransferRequest request = pair.request(Op::kWrite, kBytes - kOffset);
  request.remote = *pair.b.worker->remote_region(region);
  EXPECT_TRUE(pair.run(request).ok());
  EXPECT_EQ(memcmp(base, pair.a.memory.data(), kBytes - kOffset), 0);
  EXPECT_TRUE(pair.b.worker->deregister_memory(region).ok());
  // Beyond its end, and one that is closed.
  for (const BackingFile file : {BackingFile{fd_, kBytes, true}, BackingFile{-1, 0, true}}) {
    const absl::Status status =
        pair.b.worker->register_memory(base, 4096, Access::kRemoteReadWrite, file).status();
    EXPECT_FALSE(status.ok());
    EXPECT_THAT(std::string(status.message()), HasSubstr("fake0"));
  }
}

// Inline means that the processor copies the bytes into the work request: from memory of a device
// that is slow at best, and otherwise a crash.
TEST_F(DmaBuf, TheProcessorDoesNotReadIt) {
  VerbsPair pair({});
  pair.connect();
  const auto region = must(
      pair.a.worker->register_memory(data_, kBytes, Access::kLocal, BackingFile{fd_, 0, true}));
  ASSERT_TRUE(pair.run(pair.request(Op::kWrite, 100)).ok());
  const auto inlined = [&](const MemoryRegion& from) {
    const uint64_t before = pair.fake->stats().inlined;
    TransferRequest request = pair.request(Op::kWrite, 100);
    request.local = from;
    EXPECT_TRUE(pair.run(request).ok());
    return pair.fake->stats().inlined - before;
  };
  EXPECT_EQ(inlined(pair.a.region), 1u);
  memset(data_, 7, 100);
  EXPECT_EQ(inlined(region), 0u);
  EXPECT_EQ(memcmp(data_, pair.b.memory.data(), 100), 0);
}

// The same of memory that was unmapped while it was registered.
// Promise(rdma): Memory that is not mapped any more is never read inline by the CPU | both ends are
//   checked before inline sends
TEST(BadInput, TheProcessorDoesNotReadWhatIsNotMappedAnyMore) {
  for (const Fading how : {Fading::kUnmapped, Fading::kTruncated}) {
    VerbsPair pair({});
    pair.connect();
    const FadingMemory memory(8192, how);
    const auto region =
        must(pair.a.worker->register_memory(memory.data, memory.size, Access::kLocal, {}));
    memory.fade();
    const auto write = [&](size_t from) {
      TransferRequest request = pair.request(Op::kWrite, 100);
      request.local = region;
      request.local_layout = Layout::contiguous(from, 100);
      return pair.run(request);
    };
    EXPECT_FALSE(write(4096).ok());
    EXPECT_FALSE(write(4096 - 50).ok());
    pair.connect();
    EXPECT_TRUE(write(0).ok());
  }
}

TEST_F(DmaBuf, ADriverWithoutSaysSo) {
  VerbsPair pair({.dma_buf = false});
  const absl::Status status =
      pair.a.worker
          ->register_memory(data_, kBytes, Access::kRemoteReadWrite, BackingFile{fd_, 0, true})
          .status();
  EXPECT_THAT(status, fails_with(Code::kUnimplemented,
                                 {"no dma-buf", "fake0", "an adapter whose driver supports it"}));
}

}  // namespace
}  // namespace baton
