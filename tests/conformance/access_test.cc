// Every remote access is checked against key, generation, bounds and rights before a byte moves.
// The error names the cause; nobody else notices.
#include "tests/conformance/harness.h"
#include "tests/fails_with.h"

namespace baton {
namespace {

using testing::HasSubstr;

class Accesses : public Conformance {
 protected:
  // The access fails with this code and a message containing `cause`, nothing at the target
  // changes, and transfers around it are not disturbed.
  void expect_refused(const TransferRequest& bad, absl::StatusCode code, const std::string& cause) {
    std::fill_n(b_.data(), kBlockBytes, kPoison);
    fill(a_.data(), kBlockBytes, 1);
    std::vector<TransferId> innocent;
    const size_t half = kBlockBytes / 2;
    const auto good = [&](size_t i) {
      return request(Op::kWrite, a_, b_, half + i * 100'000, 100'000);
    };
    for (size_t i = 0; i < 10; ++i) innocent.push_back(submit(a_, good(i)));
    auto id = a_.worker->submit(bad);
    for (size_t i = 10; i < 20; ++i) innocent.push_back(submit(a_, good(i)));
    const absl::Status status = id.ok() ? finish(a_, *id) : id.status();
    EXPECT_EQ(status.code(), code) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(cause));
    for (TransferId other : innocent) {
      EXPECT_EQ(finish(a_, other), absl::OkStatus());
    }
    EXPECT_EQ(memcmp(a_.data() + half, b_.data() + half, 20 * 100'000), 0);
    EXPECT_TRUE(holds(b_.data(), half, kPoison)) << "the refused access wrote";
    EXPECT_EQ(a_.worker->peer_state(a_.peer), PeerState::kUp);
  }
};

TEST_P(Accesses, AWrongKeyIsRefused) {
  for (Op op : {Op::kWrite, Op::kRead}) {
    TransferRequest bad = request(op, a_, b_, 0, 50'000);
    bad.remote.key ^= uint64_t{1} << 17;
    expect_refused(bad, absl::StatusCode::kPermissionDenied, "key");
  }
}

TEST_P(Accesses, AStaleGenerationIsRefused) {
  for (Op op : {Op::kWrite, Op::kRead}) {
    TransferRequest bad = request(op, a_, b_, 0, 50'000);
    bad.remote.generation += 1;
    expect_refused(bad, absl::StatusCode::kNotFound, "stale");
  }
  TransferRequest bad = request(Op::kWrite, a_, b_, 0, 50'000);
  bad.remote.index = 4000;
  expect_refused(bad, absl::StatusCode::kNotFound, "stale");
  bad.remote.index = 4'000'000;
  expect_refused(bad, absl::StatusCode::kNotFound, "stale");
}

TEST_P(Accesses, OutOfBoundsIsRefusedHereAndThere) {
  for (Op op : {Op::kWrite, Op::kRead}) {
    TransferRequest bad = request(op, a_, b_, 0, 50'000);
    bad.remote_layout = Layout::contiguous(b_.block.region.size - 49'999, 50'000);
    expect_refused(bad, absl::StatusCode::kOutOfRange, "remote");
    // A peer that lies about the size to its own side.
    bad.remote.size = SIZE_MAX / 2;
    expect_refused(bad, absl::StatusCode::kOutOfRange, "region");
    bad.remote_layout = Layout::contiguous(SIZE_MAX / 2 - 100'000, 50'000);
    expect_refused(bad, absl::StatusCode::kOutOfRange, "region");
    bad = request(op, a_, b_, 0, 50'000);
    bad.local_layout = Layout::contiguous(a_.block.region.size - 1, 50'000);
    expect_refused(bad, absl::StatusCode::kOutOfRange, "local");
  }
}

TEST_P(Accesses, AWorkerOfAnotherClusterIsRefused) {
  if (sim()) GTEST_SKIP() << "the simulated network has one cluster";
  cluster_key_ = "the secret of another cluster";
  Side stranger;
  make_side(stranger, "stranger", 2, kBlockBytes);
  if (HasFatalFailure()) return;
  for (const bool calls : {true, false}) {
    SCOPED_TRACE(calls ? "it connects" : "it is connected to");
    Side& from = calls ? stranger : a_;
    const auto peer = from.worker->connect((calls ? a_ : stranger).worker->address()).value();
    until([&] {
      stranger.worker->progress();
      return from.worker->peer_state(peer) == PeerState::kDown;
    });
    EXPECT_THAT(from.worker->peer_status(peer),
                fails_with(Code::kPermissionDenied, {"cluster key"}));
  }
  EXPECT_EQ(a_.worker->stats().handshakes_refused, 1u);
  EXPECT_TRUE(run(a_, request(Op::kWrite, a_, b_, 0, 1000)).ok());
  stranger.pool.reset();
}

TEST_P(Accesses, MissingRightsAreRefused) {
  auto readable = b_.worker->register_memory(b_.address(), 100'000, Access::kRemoteRead);
  auto writable = b_.worker->register_memory(b_.address(), 100'000, Access::kRemoteWrite);
  auto local = b_.worker->register_memory(b_.address(), 100'000, Access::kLocal);
  ASSERT_TRUE(readable.ok() && writable.ok() && local.ok());
  EXPECT_EQ(b_.worker->remote_region(*local).status().code(),
            absl::StatusCode::kFailedPrecondition);
  for (Op op : {Op::kWrite, Op::kRead}) {
    auto remote = must(b_.worker->remote_region(op == Op::kWrite ? *readable : *writable));
    TransferRequest bad = request(op, a_, b_, 0, 50'000);
    bad.remote = remote;
    bad.remote_layout = Layout::contiguous(0, 50'000);
    expect_refused(bad, absl::StatusCode::kPermissionDenied, "remote");
    bad.remote.access = Access::kRemoteReadWrite;  // claimed, not granted
    expect_refused(bad, absl::StatusCode::kPermissionDenied, "allow");
  }
}

TEST_P(Accesses, AnotherWorkersRegionIsRefused) {
  TransferRequest bad = request(Op::kWrite, a_, b_, 0, 1000);
  bad.remote = a_.remote;
  bad.remote_layout = bad.local_layout;
  expect_refused(bad, absl::StatusCode::kInvalidArgument, "another worker");
}

// Promise(transfers): Malformed requests are errors: unequal sizes, ranges outside a region,
//   unknown operations | every field is checked in `submit()`
TEST_P(Accesses, MalformedRequestsAreRefusedBySubmit) {
  const TransferRequest good = request(Op::kWrite, a_, b_, 0, 1000);
  const auto code = [&](const TransferRequest& r) { return a_.worker->submit(r).status().code(); };
  TransferRequest bad = good;
  bad.remote_layout = Layout::contiguous(0, 999);
  EXPECT_EQ(code(bad), absl::StatusCode::kInvalidArgument);
  bad = good;
  bad.local = MemoryRegion{};
  EXPECT_EQ(code(bad), absl::StatusCode::kInvalidArgument);
  bad = good;
  bad.remote = RemoteRegion{};
  EXPECT_EQ(code(bad), absl::StatusCode::kInvalidArgument);
  bad = request(Op::kRead, a_, b_, 0, 1000);
  bad.notify = "x";
  EXPECT_EQ(code(bad), absl::StatusCode::kInvalidArgument);
  for (size_t bytes : {size_t{8}, size_t{1000}}) {  // the smallest have a way of their own
    bad = request(static_cast<Op>(2), a_, b_, 0, bytes);
    EXPECT_EQ(code(bad), absl::StatusCode::kInvalidArgument);
  }
  bad = good;
  bad.local_layout = bad.remote_layout = Layout::strided(0, SIZE_MAX / 2, 8, 4);
  EXPECT_NE(code(bad), absl::StatusCode::kOk);
  // A region that is not registered any more is found out when the transfer starts, at the latest.
  auto region = a_.worker->register_memory(a_.address(), 1000).value();
  ASSERT_TRUE(a_.worker->deregister_memory(region).ok());
  bad = good;
  bad.local = region;
  bad.local_layout = Layout::contiguous(0, 1000);
  EXPECT_EQ(run(a_, bad).code(), absl::StatusCode::kNotFound);
  EXPECT_EQ(a_.worker->deregister_memory(region).code(), absl::StatusCode::kNotFound);
}

TEST_P(Accesses, DeregisteringWaitsForTheOwnersTransfers) {
  auto region = a_.worker->register_memory(a_.address(), 4 << 20).value();
  TransferRequest r = request(Op::kWrite, a_, b_, 0, 4 << 20);
  r.local = region;
  r.local_layout = Layout::contiguous(0, 4 << 20);
  const TransferId id = submit(a_, r);
  const absl::Status busy = a_.worker->deregister_memory(region);
  EXPECT_EQ(busy.code(), absl::StatusCode::kFailedPrecondition) << busy;
  EXPECT_TRUE(finish(a_, id).ok());
  EXPECT_TRUE(a_.worker->deregister_memory(region).ok());
}

TEST_P(Accesses, DeregisteringFencesThePeersAccesses) {
  std::mt19937_64 random(5);
  for (int round = 0, all = rounds(30); round < all; ++round) {
    SCOPED_TRACE(testing::Message() << "round " << round);
    const Op op = round % 2 ? Op::kRead : Op::kWrite;
    auto region = b_.worker->register_memory(b_.address(), 4 << 20).value();
    fill((op == Op::kWrite ? a_ : b_).data(), 4 << 20, static_cast<uint64_t>(round));
    TransferRequest r = request(op, a_, b_, 0, 4 << 20);
    r.remote = *b_.worker->remote_region(region);
    r.remote_layout = Layout::contiguous(0, 4 << 20);
    std::vector<TransferId> ids;
    for (int i = 0; i < 4; ++i) ids.push_back(submit(a_, r));
    nudge(random() % (sim() ? 400 : 60));
    ASSERT_TRUE(b_.worker->deregister_memory(region).ok());
    // From here on the memory belongs to b alone.
    std::fill_n(b_.data(), 4 << 20, kPoison);
    for (TransferId id : ids) {
      const absl::Status status = finish(a_, id);
      EXPECT_TRUE(status.ok() || absl::IsNotFound(status)) << status;
    }
    settle();
    ASSERT_TRUE(holds(b_.data(), 4 << 20, kPoison)) << "touched after the fence";
    EXPECT_EQ(run(a_, r).code(), absl::StatusCode::kNotFound);
    ASSERT_TRUE(run(a_, request(op, a_, b_, 0, 100'000)).ok());
  }
}

INSTANTIATE_TEST_SUITE_P(Conformance, Accesses, testing::ValuesIn(all_variants()),
                         testing::PrintToStringParamName());

}  // namespace
}  // namespace baton
