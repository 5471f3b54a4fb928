// Memory that goes away under a transfer: its slice fails with the reason, and nothing else does.
#include "tests/test.h"
#include "tests/transport/fading_memory.h"
#include "tests/transport/provider_node.h"
#include "transport/ucx/engine.h"

namespace baton::ucx {
namespace {

using ::testing::HasSubstr;

constexpr size_t kPage = 4096;
constexpr size_t kMost = 64 * kPage;  // several messages

// What the payload is protected by, and how the second half of the memory goes away.
class UcxUnmapped : public ::testing::TestWithParam<std::tuple<const char*, Fading>> {
 protected:
  void SetUp() override {
    if (const absl::Status status = Engine::check({.tls = "tcp", .net_devices = "lo"});
        !status.ok()) {
      GTEST_SKIP() << status;
    }
    std::iota(good_.begin(), good_.end(), 1);
    std::memcpy(memory_.data, good_.data(), kMost);
    const auto address = b_.provider->listen();
    ASSERT_TRUE(address.ok() && a_.provider->listen().ok());
    a_.provider->connect({.session = 7, .address = *address});
    until({&a_, &b_}, [&] { return a_.rails.size() == 1 && b_.rails.size() == 1; });
  }
  void TearDown() override {
    EXPECT_TRUE(a_.down.empty() && b_.down.empty()) << "a rail was lost over it";
    for (const auto& rail : a_.rails) rail->close(absl::CancelledError("the test is over"), a_);
    if (!a_.rails.empty()) until({&a_, &b_}, [&] { return !b_.down.empty(); });
  }
  // An engine whose peer stands still while it ends is set aside, and closed when another ends: the
  // last two by these.
  static void TearDownTestSuite() {
    for (int i = 0; i < 10; ++i) {
      auto another = Engine::create({.tls = "tcp", .net_devices = "lo"}, [](std::string_view) {});
      if (another.ok()) Engine::end(*std::move(another));
    }
  }
  static ProviderNode::Settings settings() {
    ProviderNode::Settings out{{"ucx.tls", "tcp"}};
    const std::string which = std::get<0>(GetParam());
    if (which != "heads") out.emplace_back("ucx." + which, "on");
    return out;
  }
  static bool read_only() { return std::get<1>(GetParam()) == Fading::kReadOnly; }
  RemoteRegion share(std::byte* data, size_t bytes) {
    return b_.regions.describe(**b_.regions.add(data, bytes, Access::kRemoteReadWrite, {}));
  }
  // How these end, side by side.
  std::vector<absl::Status> run(const std::vector<TransferDescriptor*>& transfers) {
    a_.done.clear();
    for (TransferDescriptor* t : transfers) {
      EXPECT_TRUE(a_.rails.at(0)->post({t, 0, 0, t->bytes}, a_));
    }
    until({&a_, &b_}, [&] { return a_.done.size() == transfers.size(); });
    std::vector<absl::Status> out;
    for (TransferDescriptor* t : transfers) {
      for (const auto& done : a_.done) {
        if (done.transfer == t->id) out.push_back(done.status);
      }
    }
    return out;
  }
  static void expect_gone(const absl::Status& status, const char* what) {
    EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(what));
  }

  FadingMemory memory_{2 * kMost, std::get<1>(GetParam())};
  std::vector<char> good_ = std::vector<char>(kMost);
  ProviderNode a_{"ucx", "a", settings(), "0123456789abcdef"};
  ProviderNode b_{"ucx", "b", settings(), "0123456789abcdef"};
};

constexpr size_t kSizes[] = {1, 100, kPage, 3 * kPage + 5, kMost};

// Promise(memory): Over ucx, unmapped memory fails the transfer, not the process | a handler
//   of SIGSEGV and SIGBUS ends our own copies
TEST_P(UcxUnmapped, WritesIntoItFailAlone) {
  const RemoteRegion region = share(memory_.data, memory_.size);
  memory_.fade();
  for (const size_t bytes : kSizes) {
    const Layout all = Layout::contiguous(0, bytes);
    const auto at = [&](size_t offset) {
      return &a_.transfer(Op::kWrite, good_.data(), all, region, Layout::contiguous(offset, bytes));
    };
    b_.landed.clear();
    TransferDescriptor* const good = at(0);
    const auto ends = run({at(kMost), at(kMost - bytes / 2), good});
    expect_gone(ends.at(0), "no longer mapped for writing");
    expect_gone(ends.at(1), "no longer mapped for writing");
    EXPECT_TRUE(ends.at(2).ok()) << bytes << ": " << ends.at(2);
    EXPECT_EQ(std::memcmp(memory_.data, good_.data(), bytes), 0) << bytes;
    ASSERT_EQ(b_.landed.size(), 1u) << "what did not land was announced";
    EXPECT_TRUE(b_.landed[0].arrival.transfer == good->id);
  }
}

TEST_P(UcxUnmapped, ReadsIntoItFailAlone) {
  memory_.fade();
  const RemoteRegion region = share(reinterpret_cast<std::byte*>(good_.data()), kMost);
  for (const size_t bytes : kSizes) {
    const Layout all = Layout::contiguous(0, bytes);
    const auto to = [&](std::byte* local) {
      return &a_.transfer(Op::kRead, local, all, region, all);
    };
    std::memset(memory_.data, 0, bytes);
    const auto ends = run({to(memory_.half()), to(memory_.data)});
    expect_gone(ends.at(0), "no longer mapped for writing");
    EXPECT_TRUE(ends.at(1).ok()) << bytes << ": " << ends.at(1);
    EXPECT_EQ(std::memcmp(memory_.data, good_.data(), bytes), 0) << bytes;
  }
}

TEST_P(UcxUnmapped, WritesOutOfItFailAlone) {
  if (read_only()) return;  // it can be read
  memory_.fade();
  std::vector<char> remote(kMost);
  const RemoteRegion region = share(reinterpret_cast<std::byte*>(remote.data()), kMost);
  for (const size_t bytes : kSizes) {
    const Layout all = Layout::contiguous(0, bytes);
    const auto from = [&](std::byte* local) {
      TransferDescriptor& t = a_.transfer(Op::kWrite, local, all, region, all);
      t.notify = "it is there";
      return &t;
    };
    b_.landed.clear();
    TransferDescriptor* const good = from(memory_.data);
    const auto ends = run({from(memory_.half()), from(memory_.half() - bytes / 2), good});
    expect_gone(ends.at(0), "no longer mapped");
    expect_gone(ends.at(1), "no longer mapped");
    EXPECT_TRUE(ends.at(2).ok()) << bytes << ": " << ends.at(2);
    EXPECT_EQ(std::memcmp(remote.data(), good_.data(), bytes), 0) << bytes;
    ASSERT_EQ(b_.landed.size(), 1u) << "what was not sent was announced";
    EXPECT_TRUE(b_.landed[0].arrival.transfer == good->id);
  }
}

TEST_P(UcxUnmapped, ReadsOutOfItFailAlone) {
  if (read_only()) return;  // it can be read
  const RemoteRegion region = share(memory_.data, memory_.size);
  memory_.fade();
  std::vector<char> first(kMost), second(kMost), local(kMost);
  for (const size_t bytes : kSizes) {
    const Layout all = Layout::contiguous(0, bytes);
    const auto at = [&](std::vector<char>& to, size_t offset) {
      return &a_.transfer(Op::kRead, to.data(), all, region, Layout::contiguous(offset, bytes));
    };
    const auto ends = run({at(first, kMost), at(second, kMost - bytes / 2), at(local, 0)});
    expect_gone(ends.at(0), "no longer mapped");
    expect_gone(ends.at(1), "no longer mapped");
    EXPECT_TRUE(ends.at(2).ok()) << bytes << ": " << ends.at(2);
    EXPECT_EQ(std::memcmp(local.data(), good_.data(), bytes), 0) << bytes;
  }
}

INSTANTIATE_TEST_SUITE_P(
    Memory, UcxUnmapped,
    ::testing::Combine(::testing::Values("heads", "encrypt"),
                       ::testing::Values(Fading::kUnmapped, Fading::kReadOnly, Fading::kTruncated)),
    [](const auto& each) { return std::get<0>(each.param) + name_of(std::get<1>(each.param)); });

}  // namespace
}  // namespace baton::ucx
