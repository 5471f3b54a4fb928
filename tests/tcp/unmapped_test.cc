// Memory that goes away under a transfer: its slice fails with the reason, and nothing else does.
#include "tests/tcp/tcp_pair.h"
#include "tests/test.h"
#include "tests/transport/fading_memory.h"
#include "transport/tcp/rx_stream.h"

namespace baton::tcp {
namespace {

using ::testing::HasSubstr;

constexpr size_t kMappedBytes = 8 << 20;
constexpr size_t kMappedSlice = 1 << 20;

// Memory whose second half takes no more writes.
class HalfLocked {
 public:
  HalfLocked()
      : data(static_cast<char*>(mmap(nullptr, kMappedBytes, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {}
  ~HalfLocked() { munmap(data, kMappedBytes); }
  HalfLocked(const HalfLocked&) = delete;
  HalfLocked& operator=(const HalfLocked&) = delete;
  void lock() { EXPECT_EQ(mprotect(data + kMappedBytes / 2, kMappedBytes / 2, PROT_READ), 0); }
  char* const data;
};

void expect_only_the_second_half_failed(const TcpNode& node) {
  for (const auto& done : node.done) {
    if (done.slice < kMappedBytes / 2 / kMappedSlice) {
      EXPECT_TRUE(done.status.ok()) << done.slice << ": " << done.status;
    } else {
      EXPECT_EQ(done.status.code(), absl::StatusCode::kFailedPrecondition) << done.status;
      EXPECT_THAT(std::string(done.status.message()), HasSubstr("no longer mapped for writing"));
    }
  }
}

// Promise(memory): Over tcp, memory that is unmapped under a transfer fails that transfer only |
//   the kernel reports `EFAULT`; the rest of the slice is drained
TEST_F(TcpPair, WritesIntoMemoryThatIsGoneFailAlone) {
  TcpNode a("a", settings("2")), b("b", settings("2"));
  connect(a, b);
  std::vector<char> local = pattern(kMappedBytes, 1), other(kMappedBytes, 'x');
  HalfLocked target;
  const RemoteRegion region = b.regions.describe(**b.regions.add(
      reinterpret_cast<std::byte*>(target.data), kMappedBytes, Access::kRemoteReadWrite, {}));
  target.lock();
  const Layout all = Layout::contiguous(0, kMappedBytes);
  auto& t = a.transfer(Op::kWrite, local, all, region, all);
  Feeder feeder(a, t, kMappedSlice);
  until({&a, &b}, [&] {
    feeder.feed();
    return feeder.finished();
  });
  expect_only_the_second_half_failed(a);
  EXPECT_EQ(std::memcmp(target.data, local.data(), kMappedBytes / 2), 0);
  EXPECT_TRUE(a.down.empty() && b.down.empty()) << "a rail was lost over it";
  auto& next = a.transfer(Op::kWrite, local, all, b.share(other), all);
  EXPECT_TRUE(run(a, b, next, kMappedSlice).ok());
  EXPECT_EQ(other, local);
}

// The kernel moves what is before the hole, and says so: that is neither a full buffer nor an empty
// one, and there may be no other edge. All is here before it is read.
TEST_F(TcpPair, AWriteThatLandsHalfWayFailsWithoutMoreComing) {
  TcpNode::Settings patient_ones = settings();
  patient_ones.emplace_back("tcp.stall_ms", "3600000");
  TcpNode a("a", patient_ones), b("b", patient_ones);
  connect(a, b);
  std::vector<char> local = pattern(kMappedSlice, 1);
  HalfLocked target;
  const RemoteRegion region = b.regions.describe(**b.regions.add(
      reinterpret_cast<std::byte*>(target.data), kMappedBytes, Access::kRemoteReadWrite, {}));
  target.lock();
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

TEST_F(TcpPair, ReadsIntoMemoryThatIsGoneFailAlone) {
  TcpNode a("a", settings("2")), b("b", settings("2"));
  connect(a, b);
  std::vector<char> remote = pattern(kMappedBytes, 2), other(kMappedBytes, 'x');
  HalfLocked local;
  local.lock();
  const Layout all = Layout::contiguous(0, kMappedBytes);
  const RemoteRegion region = b.share(remote);
  auto& t = a.transfer(Op::kRead, other, all, region, all);
  t.local_base = reinterpret_cast<std::byte*>(local.data);
  Feeder feeder(a, t, kMappedSlice);
  until({&a, &b}, [&] {
    feeder.feed();
    return feeder.finished();
  });
  expect_only_the_second_half_failed(a);
  EXPECT_EQ(std::memcmp(local.data, remote.data(), kMappedBytes / 2), 0);
  EXPECT_TRUE(a.down.empty() && b.down.empty()) << "a rail was lost over it";
  auto& next = a.transfer(Op::kRead, other, all, region, all);
  EXPECT_TRUE(run(a, b, next, kMappedSlice).ok());
  EXPECT_EQ(other, remote);
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

// Small payload comes in together with its head, and is copied to where it belongs. `protections`:
// what was done to the memory; sizes: one page, part of one, several pages, the largest.
class SmallUnmapped : public TcpPair,
                      public ::testing::WithParamInterface<std::tuple<const char*, int>> {
 protected:
  static constexpr size_t kPage = 4096;
  static constexpr size_t kMost = 15 * kPage;
  // Good memory, then as much that is gone.
  SmallUnmapped()
      : memory_(static_cast<char*>(mmap(nullptr, 2 * kMost, PROT_READ | PROT_WRITE,
                                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {}
  ~SmallUnmapped() override { munmap(memory_, 2 * kMost); }
  TcpNode::Settings protected_settings() const {
    TcpNode::Settings out = settings();
    const std::string which = std::get<0>(GetParam());
    if (which != "heads") out.emplace_back("tcp." + which, "on");
    return out;
  }
  void lose() { ASSERT_EQ(mprotect(memory_ + kMost, kMost, std::get<1>(GetParam())), 0); }
  static void expect_gone(const absl::Status& status) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("no longer mapped for writing"));
  }
  char* const memory_;
};

TEST_P(SmallUnmapped, WritesFailAlone) {
  TcpNode a("a", protected_settings()), b("b", protected_settings());
  connect(a, b);
  std::vector<char> local = pattern(kMost, 1);
  const RemoteRegion region = b.regions.describe(**b.regions.add(
      reinterpret_cast<std::byte*>(memory_), 2 * kMost, Access::kRemoteReadWrite, {}));
  lose();
  for (const size_t bytes : {size_t{1}, size_t{100}, kPage, 3 * kPage + 5, kMost}) {
    const Layout all = Layout::contiguous(0, bytes);
    auto& bad = a.transfer(Op::kWrite, local, all, region, Layout::contiguous(kMost, bytes));
    auto& half =
        a.transfer(Op::kWrite, local, all, region, Layout::contiguous(kMost - bytes / 2, bytes));
    auto& good = a.transfer(Op::kWrite, local, all, region, Layout::contiguous(0, bytes));
    Feeder first(a, bad, kMost), second(a, half, kMost), third(a, good, kMost);
    b.landed.clear();
    until({&a, &b}, [&] {
      for (Feeder* each : {&first, &second, &third}) each->feed();
      return first.finished() && second.finished() && third.finished();
    });
    expect_gone(first.result());
    expect_gone(second.result());
    EXPECT_TRUE(third.result().ok()) << bytes << ": " << third.result();
    EXPECT_EQ(std::memcmp(memory_, local.data(), bytes), 0) << bytes;
    ASSERT_EQ(b.landed.size(), 1u) << "what did not land was announced";
    EXPECT_TRUE(b.landed[0].arrival.transfer == good.id);
  }
  EXPECT_TRUE(a.down.empty() && b.down.empty()) << "a rail was lost over it";
}

TEST_P(SmallUnmapped, ScatteredWritesFailAlone) {
  TcpNode a("a", protected_settings()), b("b", protected_settings());
  connect(a, b);
  std::vector<char> local = pattern(kMost, 1);
  const RemoteRegion region = b.regions.describe(**b.regions.add(
      reinterpret_cast<std::byte*>(memory_), 2 * kMost, Access::kRemoteReadWrite, {}));
  lose();
  const Layout all = Layout::contiguous(0, 4 * 1024);
  const std::vector<uint32_t> good = {12, 3, 7, 1}, bad = {12, 3, 61, 1};  // of 1 KiB
  auto& fails = a.transfer(Op::kWrite, local, all, region, Layout::paged(0, bad, 1024, 1024));
  auto& lands = a.transfer(Op::kWrite, local, all, region, Layout::paged(0, good, 1024, 1024));
  expect_gone(run(a, b, fails, kMost));
  EXPECT_TRUE(run(a, b, lands, kMost).ok());
  for (size_t i = 0; i < good.size(); ++i) {
    EXPECT_EQ(std::memcmp(memory_ + good[i] * 1024, local.data() + i * 1024, 1024), 0) << i;
  }
  EXPECT_TRUE(a.down.empty() && b.down.empty()) << "a rail was lost over it";
}

TEST_P(SmallUnmapped, ReadsFailAlone) {
  TcpNode a("a", protected_settings()), b("b", protected_settings());
  connect(a, b);
  std::vector<char> remote = pattern(kMost, 2), other(kMost, 'x');
  lose();
  const RemoteRegion region = b.share(remote);
  for (const size_t bytes : {size_t{1}, size_t{100}, kPage, 3 * kPage + 5, kMost}) {
    const Layout all = Layout::contiguous(0, bytes);
    auto& bad = a.transfer(Op::kRead, other, all, region, all);
    bad.local_base = reinterpret_cast<std::byte*>(memory_ + kMost);
    auto& good = a.transfer(Op::kRead, other, all, region, all);
    good.local_base = reinterpret_cast<std::byte*>(memory_);
    Feeder first(a, bad, kMost), second(a, good, kMost);
    until({&a, &b}, [&] {
      for (Feeder* each : {&first, &second}) each->feed();
      return first.finished() && second.finished();
    });
    expect_gone(first.result());
    EXPECT_TRUE(second.result().ok()) << bytes << ": " << second.result();
    EXPECT_EQ(std::memcmp(memory_, remote.data(), bytes), 0) << bytes;
  }
  EXPECT_TRUE(a.down.empty() && b.down.empty()) << "a rail was lost over it";
}

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
  void read_fails_alone(const TcpNode::Settings& with);
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

// Where payload has tags, they are made before anything is promised.
TEST_P(SourceGone, AnEncryptedWriteFailsAlone) {
  TcpNode::Settings encrypted = settings("2");
  encrypted.emplace_back("tcp.encrypt", "on");
  TcpNode a("a", encrypted), b("b", encrypted);
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
  auto& good = a.transfer(Op::kWrite, local, all, region, all);
  EXPECT_TRUE(run(a, b, good, kMappedSlice).ok());
  EXPECT_EQ(std::memcmp(remote.data(), local.data(), GetParam()), 0);
  EXPECT_TRUE(a.down.empty() && b.down.empty()) << "a rail was lost over it";
}

TEST_P(SourceGone, AReadFailsAlone) { read_fails_alone(settings("2")); }
TEST_P(SourceGone, AnEncryptedReadFailsAlone) {
  TcpNode::Settings encrypted = settings("2");
  encrypted.emplace_back("tcp.encrypt", "on");
  read_fails_alone(encrypted);
}

void SourceGone::read_fails_alone(const TcpNode::Settings& with) {
  TcpNode a("a", with), b("b", with);
  connect(a, b);
  std::vector<char> local(kMappedBytes, 'x');
  lose();
  const RemoteRegion region = b.regions.describe(**b.regions.add(
      reinterpret_cast<std::byte*>(memory_), kMappedBytes, Access::kRemoteReadWrite, {}));
  const Layout all = Layout::contiguous(0, GetParam());
  auto& bad = a.transfer(Op::kRead, local, all, region, Layout::contiguous(4096, GetParam()));
  expect_gone(run(a, b, bad, kMappedSlice));
  const Layout page = Layout::contiguous(0, 4096);
  auto& good = a.transfer(Op::kRead, local, page, region, page);
  EXPECT_TRUE(run(a, b, good, kMappedSlice).ok());
  EXPECT_EQ(std::memcmp(local.data(), memory_, 4096), 0);
  EXPECT_TRUE(a.down.empty() && b.down.empty()) << "a rail was lost over it";
}

INSTANTIATE_TEST_SUITE_P(Sizes, SourceGone, ::testing::Values(1, 5000, 70000, 1 << 20));

INSTANTIATE_TEST_SUITE_P(Memory, SmallUnmapped,
                         ::testing::Combine(::testing::Values("heads", "integrity", "encrypt"),
                                            ::testing::Values(PROT_READ, PROT_NONE)));

}  // namespace
}  // namespace baton::tcp
