// Memory that goes away under a transfer: that fails with the reason, and nothing else does.
#include "tests/shm/shm_node.h"
#include "tests/test.h"
#include "tests/transport/fading_memory.h"

namespace baton::shm {
namespace {

using ::testing::HasSubstr;

constexpr size_t kMost = 1 << 20;

// Whether the peer's memory is from a pool, so that it is mapped here, and what becomes of the
// second half of ours.
class ShmUnmapped : public ::testing::TestWithParam<std::tuple<bool, Fading>> {
 protected:
  void SetUp() override {
    connect_nodes(a_, b_);
    for (size_t i = 0; i < kMost; ++i) memory_.data[i] = static_cast<std::byte>(i * 31 + i / 4096);
    remote_ = b_.share(far_);
    auto entry = a_.regions.add(memory_.data, memory_.size, Access::kRemoteReadWrite, {});
    ASSERT_TRUE(entry.ok() && a_.provider->add_region(**entry).ok());
    region_ = (*entry)->index;
  }
  absl::Status move(Op op, std::byte* local, size_t bytes) {
    const Layout all = Layout::contiguous(0, bytes);
    const size_t before = a_.done.size();
    TransferDescriptor& t = static_cast<ProviderNode&>(a_).transfer(op, local, all, remote_, all);
    t.local_region = region_;
    if (op == Op::kWrite) t.notify = "it is there";
    if (!a_.post(t)) return absl::InternalError("the rail is full");
    until({&a_, &b_}, [&] { return a_.done.size() > before; });
    return a_.done.back().status;
  }
  static void expect_gone(const absl::Status& status, size_t bytes) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << bytes << ": " << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("no longer mapped"));
  }

  FadingMemory memory_{2 * kMost, std::get<1>(GetParam())};
  TestMemory far_{kMost, std::get<0>(GetParam())};
  ShmNode a_{"a"};
  ShmNode b_{"b"};
  RemoteRegion remote_;
  uint32_t region_ = 0;
};

constexpr size_t kSizes[] = {1, 100, 4096, 20000, 300 << 10, kMost};

// Promise(memory): Over shm, unmapped memory fails the transfer, not the process | a handler of
//   SIGSEGV and SIGBUS ends our own copies (`BATON_CATCH_FAULTS=no`: none)
TEST_P(ShmUnmapped, WritesOutOfItFailAlone) {
  memory_.fade();
  const bool readable = std::get<1>(GetParam()) == Fading::kReadOnly;
  for (const size_t bytes : kSizes) {
    b_.landed.clear();
    const absl::Status all = move(Op::kWrite, memory_.half(), bytes);
    const absl::Status half = move(Op::kWrite, memory_.half() - bytes / 2, bytes);
    if (readable) {
      EXPECT_TRUE(all.ok() && half.ok()) << all << half;
    } else {
      expect_gone(all, bytes);
      expect_gone(half, bytes);
      EXPECT_TRUE(b_.landed.empty()) << "what did not land was announced";
    }
    const absl::Status good = move(Op::kWrite, memory_.data, bytes);
    EXPECT_TRUE(good.ok()) << bytes << ": " << good;
    EXPECT_EQ(std::memcmp(far_.data, memory_.data, bytes), 0) << bytes;
  }
  EXPECT_TRUE(a_.down.empty() && b_.down.empty()) << "a rail was lost over it";
}

TEST_P(ShmUnmapped, ReadsIntoItFailAlone) {
  memory_.fade();
  far_.fill(7);
  for (const size_t bytes : kSizes) {
    expect_gone(move(Op::kRead, memory_.half(), bytes), bytes);
    expect_gone(move(Op::kRead, memory_.half() - bytes / 2, bytes), bytes);
    std::memset(memory_.data, 0, bytes);
    const absl::Status good = move(Op::kRead, memory_.data, bytes);
    EXPECT_TRUE(good.ok()) << bytes << ": " << good;
    EXPECT_EQ(std::memcmp(far_.data, memory_.data, bytes), 0) << bytes;
  }
  EXPECT_TRUE(a_.down.empty() && b_.down.empty()) << "a rail was lost over it";
}

// The other way round: what the peer registered is gone. It cannot be from a pool.
TEST_P(ShmUnmapped, WhatThePeerLostFailsAlone) {
  auto entry = b_.regions.add(memory_.data, memory_.size, Access::kRemoteReadWrite, {});
  ASSERT_TRUE(entry.ok() && b_.provider->add_region(**entry).ok());
  const RemoteRegion theirs = b_.regions.describe(**entry);
  memory_.fade();
  const bool readable = std::get<1>(GetParam()) == Fading::kReadOnly;
  TestMemory local(kMost, std::get<0>(GetParam()));
  for (const size_t bytes : kSizes) {
    const Layout all = Layout::contiguous(0, bytes);
    const auto end_of = [&](Op op, size_t offset) {
      const size_t before = a_.done.size();
      a_.post(a_.transfer(op, local, all, theirs, Layout::contiguous(offset, bytes)));
      until({&a_, &b_}, [&] { return a_.done.size() > before; });
      return a_.done.back().status;
    };
    expect_gone(end_of(Op::kWrite, kMost), bytes);
    expect_gone(end_of(Op::kWrite, kMost - bytes / 2), bytes);
    if (!readable) expect_gone(end_of(Op::kRead, kMost), bytes);
    EXPECT_TRUE(end_of(Op::kWrite, 0).ok());
    EXPECT_TRUE(end_of(Op::kRead, 0).ok());
  }
  EXPECT_TRUE(a_.down.empty() && b_.down.empty()) << "a rail was lost over it";
}

INSTANTIATE_TEST_SUITE_P(Memory, ShmUnmapped,
                         ::testing::Combine(::testing::Bool(),
                                            ::testing::Values(Fading::kUnmapped, Fading::kReadOnly,
                                                              Fading::kTruncated)),
                         [](const auto& each) {
                           return (std::get<0>(each.param) ? "Mapped" : "Cma") +
                                  name_of(std::get<1>(each.param));
                         });

}  // namespace
}  // namespace baton::shm
