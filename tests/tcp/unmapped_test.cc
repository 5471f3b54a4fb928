// Memory that goes away under a transfer, where tcp differs from others
// (tests/conformance/unmapped_test.cc): what was promised before it was gone, sockets that tell no
// more.
#include "tests/tcp/tcp_pair.h"
#include "tests/test.h"
#include "tests/transport/fading_memory.h"
#include "transport/tcp/rx_stream.h"

namespace baton::tcp {
namespace {

using ::testing::HasSubstr;

constexpr size_t kMappedBytes = 8 << 20;
constexpr size_t kMappedSlice = 1 << 20;

// The kernel moves what is before the hole, and says so: that is neither a full buffer nor an empty
// one, and there may be no other edge. All is here before it is read.
TEST_F(TcpPair, AWriteThatLandsHalfWayFailsWithoutMoreComing) {
  TcpNode::Settings patient_ones = settings();
  patient_ones.emplace_back("tcp.stall_ms", "3600000");
  TcpNode a("a", patient_ones), b("b", patient_ones);
  connect(a, b);
  std::vector<char> local = pattern(kMappedSlice, 1);
  const FadingMemory target(kMappedBytes, Fading::kReadOnly);
  const RemoteRegion region =
      b.regions.describe(**b.regions.add(target.data, target.size, Access::kRemoteReadWrite, {}));
  target.fade();
  auto& t = a.transfer(Op::kWrite, local, Layout::contiguous(0, kMappedSlice), region,
                       Layout::contiguous((kMappedBytes - kMappedSlice) / 2, kMappedSlice));
  Feeder feeder(a, t, kMappedSlice);
  feeder.feed();
  int rounds = 0;
  until({&a}, [&] { return ++rounds > 100; });
  until({&a, &b}, [&] { return feeder.finished(); });
  EXPECT_EQ(feeder.result().code(), absl::StatusCode::kFailedPrecondition) << feeder.result();
  EXPECT_TRUE(a.down.empty() && b.down.empty()) << "a rail was lost over it";
}

// Where payload has a tag the processor reads what the kernel has put there, and memory may go
// between the two.
class GoneBeforeItIsOpened : public testing::TestWithParam<std::tuple<net::Protection, Fading>> {};

TEST_P(GoneBeforeItIsOpened, EndsItsPayloadAlone) {
  const auto [protection, how] = GetParam();
  net::Opener opener(net::Key32{}, protection);
  FileBuffers buffers(RxStream::kBufferBytes);
  RxStream::Memory lent(buffers);
  std::vector<char> nowhere(RxStream::kNowhereBytes);
  RxStream rx(nowhere.data(), opener);
  rx.lend(&lent);
  const FadingMemory memory(kMappedSlice, how);
  opener.start_payload(1);
  rx.start_payload(kMappedSlice);
  rx.add_piece(memory.data, kMappedSlice);
  msghdr message;
  rx.fill(message);
  memory.fade();
  EXPECT_TRUE(rx.received(kMappedSlice / 2));
  const bool only_read = protection == net::Protection::kIntegrity && how == Fading::kReadOnly;
  EXPECT_EQ(rx.received(kMappedSlice / 2), only_read);
  EXPECT_EQ(rx.payload_left(), 0u) << "the stream goes on";
}

INSTANTIATE_TEST_SUITE_P(
    Each, GoneBeforeItIsOpened,
    testing::Combine(testing::Values(net::Protection::kIntegrity, net::Protection::kEncrypt),
                     testing::Values(Fading::kUnmapped, Fading::kReadOnly, Fading::kTruncated)),
    [](const auto& each) {
      return std::string(net::name(std::get<0>(each.param))) + name_of(std::get<1>(each.param));
    });

// Buffers in a file of memory, and where this process may not have one: what is gone is told either
// way.
class Buffers : public testing::TestWithParam<std::tuple<rlim_t, Fading>> {};

TEST_P(Buffers, TellWhatIsGone) {
  const auto [limit, how] = GetParam();
  constexpr size_t kPage = 4096;
  const FadingMemory memory(4 * kPage, how);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit within{limit, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &within), 0);  // SIGXFSZ would end this test
  FileBuffers buffers(4 * kPage);
  const FileBuffers::Buffer buffer = buffers.take();
  ASSERT_NE(buffer.data, nullptr);
  const iovec whole{memory.data, memory.size};
  EXPECT_TRUE(buffers.readable(whole));
  memory.fade();
  const bool readable = how == Fading::kReadOnly;
  EXPECT_EQ(buffers.readable(whole), readable);
  std::memset(buffer.data, 7, memory.size);
  const std::array<iovec, 2> halves = {iovec{memory.data, memory.size / 2},
                                       iovec{memory.half(), memory.size / 2}};
  EXPECT_EQ(buffers.copy_out(buffer, buffer.data, halves.data(), 2), memory.size / 2);
  EXPECT_EQ(memory.data[memory.size / 2 - 1], std::byte{7});
  EXPECT_TRUE(buffers.copy_in(buffer, buffer.data, memory.data, memory.size / 2));
  EXPECT_EQ(buffers.copy_in(buffer, buffer.data, memory.half(), kPage), readable);
  buffers.give_back(buffer);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
}

INSTANTIATE_TEST_SUITE_P(Each, Buffers,
                         testing::Combine(testing::Values(rlim_t{RLIM_INFINITY}, rlim_t{0}),
                                          testing::Values(Fading::kUnmapped, Fading::kReadOnly,
                                                          Fading::kTruncated)),
                         [](const auto& each) {
                           return std::string(std::get<0>(each.param) == 0 ? "anonymous" : "file") +
                                  name_of(std::get<1>(each.param));
                         });

// The other way round: what is to be sent is gone.
class SourceGone : public TcpPair, public ::testing::WithParamInterface<size_t> {
 protected:
  SourceGone()
      : memory_(static_cast<char*>(mmap(nullptr, kMappedBytes, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {}
  ~SourceGone() override { munmap(memory_, kMappedBytes); }
  // All but the first page.
  void lose() { ASSERT_EQ(mprotect(memory_ + 4096, kMappedBytes - 4096, PROT_NONE), 0); }
  static void expect_gone(const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("no longer mapped"));
  }
  char* const memory_;
};

// Promise(memory): Over tcp, memory that is gone before it was sent fails its transfer and
//   announces nothing | promised frames end their socket, answers are withdrawn
TEST_P(SourceGone, AWriteFailsAndCostsOneConnection) {
  TcpNode a("a", settings("2")), b("b", settings("2"));
  connect(a, b);
  std::vector<char> local = pattern(kMappedBytes, 1), remote(kMappedBytes, 'x');
  lose();
  const RemoteRegion region = b.share(remote);
  const Layout all = Layout::contiguous(0, GetParam());
  auto& bad = a.transfer(Op::kWrite, local, all, region, all);
  bad.local_base = reinterpret_cast<std::byte*>(memory_ + 4096);
  bad.notify = "not true";
  expect_gone(run(a, b, bad, kMappedSlice));
  EXPECT_TRUE(b.landed.empty()) << "what was not sent was announced";
  ASSERT_EQ(a.rails.size(), 1u);
  auto& good = a.transfer(Op::kWrite, local, all, region, all);
  EXPECT_TRUE(run(a, b, good, kMappedSlice).ok());
  EXPECT_EQ(std::memcmp(remote.data(), local.data(), GetParam()), 0);
}

// What is before the hole is sent; nothing makes the socket tell more.
TEST_P(SourceGone, AWriteOfWhichHalfIsGoneFailsAtOnce) {
  TcpNode::Settings patient_ones = settings("2");
  patient_ones.emplace_back("tcp.stall_ms", "3600000");
  TcpNode a("a", patient_ones), b("b", patient_ones);
  connect(a, b);
  std::vector<char> local(kMappedBytes), remote(kMappedBytes, 'x');
  ASSERT_EQ(mprotect(memory_ + kMappedBytes / 2, kMappedBytes / 2, PROT_NONE), 0);
  const RemoteRegion region = b.share(remote);
  const Layout all = Layout::contiguous(0, GetParam());
  auto& bad = a.transfer(Op::kWrite, local, all, region, all);
  bad.local_base = reinterpret_cast<std::byte*>(memory_ + kMappedBytes / 2 - GetParam() / 2);
  bad.notify = "not true";
  expect_gone(run(a, b, bad, kMappedSlice));
  EXPECT_TRUE(b.landed.empty()) << "what was not sent was announced";
}

INSTANTIATE_TEST_SUITE_P(Sizes, SourceGone, ::testing::Values(1, 5000, 70000, 1 << 20));

}  // namespace
}  // namespace baton::tcp
