// Memory that goes away under a transfer: its slice fails with the reason, and nothing else does.
#include <gmock/gmock.h>
#include <sys/mman.h>

#include "tests/tcp/tcp_pair.h"

namespace baton::tcp {
namespace {

using ::testing::HasSubstr;

constexpr size_t kBytes = 8 << 20;
constexpr size_t kSlice = 1 << 20;

// Memory whose second half takes no more writes.
class HalfLocked {
 public:
  HalfLocked()
      : data(static_cast<char*>(
            mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {}
  ~HalfLocked() { munmap(data, kBytes); }
  HalfLocked(const HalfLocked&) = delete;
  HalfLocked& operator=(const HalfLocked&) = delete;
  void lock() { EXPECT_EQ(mprotect(data + kBytes / 2, kBytes / 2, PROT_READ), 0); }
  char* const data;
};

void expect_only_the_second_half_failed(const TcpNode& node) {
  for (const auto& done : node.done) {
    if (done.slice < kBytes / 2 / kSlice) {
      EXPECT_TRUE(done.status.ok()) << done.slice << ": " << done.status;
    } else {
      EXPECT_EQ(done.status.code(), absl::StatusCode::kFailedPrecondition) << done.status;
      EXPECT_THAT(std::string(done.status.message()), HasSubstr("not mapped for writing"));
    }
  }
}

TEST_F(TcpPair, WritesIntoMemoryThatIsGoneFailAlone) {
  TcpNode a("a", settings("2")), b("b", settings("2"));
  connect(a, b);
  std::vector<char> local = pattern(kBytes, 1), other(kBytes, 'x');
  HalfLocked target;
  const RemoteRegion region = b.regions.describe(**b.regions.add(
      reinterpret_cast<std::byte*>(target.data), kBytes, Access::kRemoteReadWrite, {}));
  target.lock();
  const Layout all = Layout::contiguous(0, kBytes);
  auto& t = a.transfer(Op::kWrite, local, all, region, all);
  Feeder feeder(a, t, kSlice);
  ASSERT_TRUE(run_until({&a, &b}, [&] {
    feeder.feed();
    return feeder.finished();
  }));
  expect_only_the_second_half_failed(a);
  EXPECT_EQ(std::memcmp(target.data, local.data(), kBytes / 2), 0);
  EXPECT_TRUE(a.down.empty() && b.down.empty()) << "a rail was lost over it";
  auto& next = a.transfer(Op::kWrite, local, all, b.share(other), all);
  EXPECT_TRUE(run(a, b, next, kSlice).ok());
  EXPECT_EQ(other, local);
}

TEST_F(TcpPair, ReadsIntoMemoryThatIsGoneFailAlone) {
  TcpNode a("a", settings("2")), b("b", settings("2"));
  connect(a, b);
  std::vector<char> remote = pattern(kBytes, 2), other(kBytes, 'x');
  HalfLocked local;
  local.lock();
  const Layout all = Layout::contiguous(0, kBytes);
  const RemoteRegion region = b.share(remote);
  auto& t = a.transfer(Op::kRead, other, all, region, all);
  t.local_base = reinterpret_cast<std::byte*>(local.data);
  Feeder feeder(a, t, kSlice);
  ASSERT_TRUE(run_until({&a, &b}, [&] {
    feeder.feed();
    return feeder.finished();
  }));
  expect_only_the_second_half_failed(a);
  EXPECT_EQ(std::memcmp(local.data, remote.data(), kBytes / 2), 0);
  EXPECT_TRUE(a.down.empty() && b.down.empty()) << "a rail was lost over it";
  auto& next = a.transfer(Op::kRead, other, all, region, all);
  EXPECT_TRUE(run(a, b, next, kSlice).ok());
  EXPECT_EQ(other, remote);
}

}  // namespace
}  // namespace baton::tcp
