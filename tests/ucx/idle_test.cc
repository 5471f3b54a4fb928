// Rails with nothing to do: a round does not look at them, and they miss nothing.
#include "tests/test.h"
#include "tests/ucx/raw_peer.h"
#include "transport/ucx/provider.h"

namespace baton::ucx {
namespace {

using testing::HasSubstr;
using testing::SizeIs;

class UcxIdle : public testing::Test {
 protected:
  static constexpr size_t kPeers = 6;

  void SetUp() override {
    if (const absl::Status status = Engine::check(kLoopback); !status.ok()) GTEST_SKIP() << status;
    const auto address = node_.provider->listen();
    ASSERT_TRUE(address.ok()) << address.status();
    for (size_t i = 0; i < kPeers; ++i) {
      auto peer = std::make_unique<ProviderNode>(
          "ucx", "peer", ProviderNode::Settings{{"ucx.tls", "tcp"}}, "0123456789abcdef");
      ASSERT_TRUE(peer->provider->listen().ok());
      peer->provider->connect({.session = i + 1, .address = *address});
      until({&node_, peer.get()},
            [&] { return peer->rails.size() == 1 && node_.rails.size() == i + 1; });
      peers_.push_back(std::move(peer));
    }
    expect_idle();
  }
  // One after the other, while the rest goes on: UCX does not free what it was in the middle of.
  void TearDown() override {
    while (!peers_.empty()) {
      const size_t down = node_.down.size();
      for (const auto& rail : peers_.back()->rails) {
        rail->close(absl::CancelledError("the test is over"), *peers_.back());
      }
      until(all(), [&] { return node_.down.size() > down; });
      peers_.pop_back();
    }
  }
  std::vector<ProviderNode*> all() {
    std::vector<ProviderNode*> nodes{&node_};
    for (const auto& peer : peers_) nodes.push_back(peer.get());
    return nodes;
  }
  size_t active() const { return static_cast<UcxProvider&>(*node_.provider).active(); }
  void expect_idle() {
    until(all(), [&] { return active() == 0; });
  }
  // A notification of the node's, over its rail to the peer of that number.
  void tell(size_t to, std::string_view words) {
    TransferDescriptor& t = node_.transfer(Op::kWrite, nullptr, {}, {}, {});
    t.notify = words;
    ASSERT_TRUE(node_.rails[to]->post({.transfer = &t}, node_));
  }

  ProviderNode node_{"ucx", "node", {{"ucx.tls", "tcp"}}, "0123456789abcdef"};
  std::vector<std::unique_ptr<ProviderNode>> peers_;
};

TEST_F(UcxIdle, OnlyBusyEndpointsArePolled) {
  tell(3, "you");
  EXPECT_EQ(active(), 1U);
  until(all(), [&] { return !node_.done.empty(); });
  EXPECT_TRUE(node_.done.front().status.ok()) << node_.done.front().status;
  EXPECT_THAT(peers_[3]->notes, testing::ElementsAre("you"));
  expect_idle();
}

TEST_F(UcxIdle, TheySeeWhatComes) {
  TransferDescriptor& t = peers_[5]->transfer(Op::kWrite, nullptr, {}, {}, {});
  t.notify = "hello";
  ASSERT_TRUE(peers_[5]->rails.front()->post({.transfer = &t}, *peers_[5]));
  until(all(), [&] { return !peers_[5]->done.empty(); });
  EXPECT_THAT(node_.notes, testing::ElementsAre("hello"));
  expect_idle();
  // What is read from them they have to send.
  std::string memory = "whole words", read(memory.size(), ' ');
  auto region =
      node_.regions
          .add(reinterpret_cast<std::byte*>(memory.data()), memory.size(), Access::kRemoteRead, {})
          .value();
  const Layout all_of_it = Layout::contiguous(0, memory.size());
  TransferDescriptor& back = peers_[5]->transfer(Op::kRead, read.data(), all_of_it,
                                                 node_.regions.describe(*region), all_of_it);
  const Slice slice{.transfer = &back, .end = memory.size()};
  ASSERT_TRUE(peers_[5]->rails.front()->post(slice, *peers_[5]));
  until(all(), [&] { return peers_[5]->done.size() == 2; });
  EXPECT_EQ(read, memory);
  expect_idle();
}

TEST_F(UcxIdle, TheySeeThatTheirPeerHasGone) {
  peers_[2]->rails.clear();
  peers_.erase(peers_.begin() + 2);
  until(all(), [&] { return !node_.down.empty(); });
  EXPECT_THAT(std::string(node_.down.front().message()), HasSubstr("closed the connection"));
  EXPECT_THAT(node_.down, SizeIs(1));
  expect_idle();
  tell(2, "the others are there");  // the rail of the peer behind it
  until(all(), [&] { return !node_.done.empty(); });
  EXPECT_TRUE(node_.done.front().status.ok()) << node_.done.front().status;
}

}  // namespace
}  // namespace baton::ucx
