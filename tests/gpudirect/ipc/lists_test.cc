// Lists of pages between devices that are mapped: of any shape, and stopped at any moment.
#include "tests/gpudirect/ipc/device_end.h"
#include "tests/std.h"

namespace baton {
namespace {

constexpr size_t kListBytes = 2 << 20;

// Two workers of this process, each with memory of the device.
class MappedLists : public testing::Test {
 protected:
  void begin(uint64_t seed, gpudirect::CopyWay way) {
    fake_.emplace(gpudirect::FakeOptions{.seed = seed},
                  gpudirect::CudaMemory::Options{.kernels = gpudirect::FakeDriver::image(),
                                                 .table = gpudirect::costs_that_favour(way),
                                                 .sums = std::nullopt,
                                                 .root = "/nowhere"});
    for (std::optional<End>* end : {&a_, &b_}) {
      end->emplace(*fake_, "shm");
      (*end)->make(0, kListBytes);
    }
    peer_ = *a_->worker->connect(b_->worker->address());
    until([&] { return a_->worker->peer_state(peer_) == PeerState::kUp; });
    // The mapping is made by the first one.
    ASSERT_TRUE(run(request(Op::kWrite, Layout::contiguous(0, 1), Layout::contiguous(0, 1))).ok());
    EXPECT_EQ(a_->worker->stats().staged_transfers, 0u);
  }
  void end() {
    a_.reset();
    b_.reset();
    fake_->expect_clean();
    fake_.reset();
  }
  void turn(int rounds) {
    for (int i = 0; i < rounds; ++i) {
      a_->worker->progress();
      if (b_) b_->worker->progress();
    }
  }
  template <typename Ready>
  void until(const Ready& ready, CallSite from = CallSite::here()) {
    baton::until(
        ready, [&] { turn(1); }, [&] { return state_of(a_->worker->stats(), "a"); }, from);
  }
  TransferRequest request(Op op, const Layout& near, const Layout& far) {
    return {.op = op,
            .peer = peer_,
            .local = a_->region,
            .local_layout = near,
            .remote = *b_->worker->remote_region(b_->region),
            .remote_layout = far};
  }
  absl::Status finish(TransferId id) {
    until([&] { return ended(*a_->worker->state(id)); });
    absl::Status status = a_->worker->status(id);
    EXPECT_TRUE(a_->worker->release(id).ok());
    return status;
  }
  absl::Status run(const TransferRequest& request) {
    auto id = a_->worker->submit(request);
    return id.ok() ? finish(*id) : id.status();
  }
  std::byte* view(const End& end) {
    return fake_->fake().view(reinterpret_cast<uintptr_t>(end.buffer->data()), kListBytes);
  }

  std::optional<gpudirect::InstalledFake> fake_;
  std::optional<End> a_;
  std::optional<End> b_;
  PeerId peer_;
};

// Pages in any order at both ends, of any size, next to each other, over each other at the source,
// and the same one several times at the target.
TEST_F(MappedLists, AnyShapeLandsWhereItBelongs) {
  for (const gpudirect::CopyWay way : {gpudirect::CopyWay::kKernel, gpudirect::CopyWay::kBatch}) {
    begin(1, way);
    std::mt19937_64 random(5);
    for (int round = 0; round < 4; ++round) {
      SCOPED_TRACE(testing::Message() << name_of(way) << " " << round);
      const size_t piece = 1 + random() % (round % 3 == 0 ? 17 : 5000);
      const size_t count = 1 + random() % (round % 4 == 0 ? 3000 : 300);
      const size_t stride = piece + random() % 40;
      const size_t most = std::min<size_t>(kListBytes / stride - 1, 1500);
      std::vector<uint32_t> from(count), to(count);
      for (uint32_t& page : from) page = static_cast<uint32_t>(random() % most);
      for (uint32_t& page : to) page = static_cast<uint32_t>(random() % most);
      const size_t narrow = 1 + random() % stride;  // sources over each other
      const size_t odd = random() % 16;
      const Op op = round % 2 == 0 ? Op::kWrite : Op::kRead;
      std::byte* const source = view(op == Op::kWrite ? *a_ : *b_);
      std::byte* const target = view(op == Op::kWrite ? *b_ : *a_);
      for (size_t i = 0; i < kListBytes; ++i) source[i] = static_cast<std::byte>(random());
      std::fill_n(target, kListBytes, std::byte{0});
      const Layout out = Layout::paged(odd, from, narrow, piece);
      const Layout in = Layout::paged(odd, to, stride, piece);
      const absl::Status status =
          run(op == Op::kWrite ? request(op, out, in) : request(op, in, out));
      ASSERT_TRUE(status.ok()) << status;
      std::vector<std::vector<const std::byte*>> meant_for(most);
      for (size_t i = 0; i < count; ++i)
        meant_for[to[i]].push_back(source + odd + from[i] * narrow);
      std::vector<bool> written(kListBytes);
      size_t wrong = 0;  // an assertion for each byte takes longer than all else
      for (size_t i = 0; i < count; ++i) {
        const std::byte* const there = target + odd + to[i] * stride;
        // Of those that are meant for one place one of them, byte by byte.
        const auto& meant = meant_for[to[i]];
        for (size_t byte = 0; byte < piece; ++byte) {
          wrong += std::none_of(meant.begin(), meant.end(),
                                [&](const std::byte* page) { return page[byte] == there[byte]; });
        }
        ASSERT_EQ(wrong, 0u) << "of page " << i;
        std::fill_n(written.begin() + static_cast<ptrdiff_t>(odd + to[i] * stride), piece, true);
      }
      for (size_t i = 0; i < kListBytes; ++i) wrong += !written[i] && target[i] != std::byte{0};
      ASSERT_EQ(wrong, 0u) << "beside the pages";
    }
    end();
  }
}

// Of a device that is lost in the middle the transfer ends so, and the host's memory moves on.
TEST_F(MappedLists, ADeviceThatIsLostAtAnyCallEndsThem) {
  constexpr uint32_t kPages = 900, kPage = 300;
  std::vector<uint32_t> from(kPages), to(kPages);
  std::iota(from.begin(), from.end(), 0u);
  std::iota(to.rbegin(), to.rend(), 0u);
  size_t lost = 0;
  for (uint64_t call = 1; call <= 24; ++call) {
    SCOPED_TRACE(call);
    begin(call, call % 2 == 0 ? gpudirect::CopyWay::kKernel : gpudirect::CopyWay::kBatch);
    const TransferRequest move =
        request(call % 4 < 2 ? Op::kWrite : Op::kRead, Layout::paged(0, from, kPage, kPage),
                Layout::paged(0, to, kPage, kPage));
    fake_->fake().fail_call_in(call, gpudirect::kAssert);
    const absl::Status status = run(move);
    lost += status.ok() ? 0 : 1;
    if (!status.ok()) {
      EXPECT_TRUE(absl::IsAborted(status)) << status;
      EXPECT_TRUE(absl::IsAborted(run(move))) << "a device that is lost stays lost";
    }
    std::vector<std::byte> here(5000, std::byte{3}), there(5000);
    TransferRequest hosts = request(Op::kWrite, Layout::contiguous(0, 5000), {});
    hosts.local = *a_->worker->register_memory(here.data(), here.size());
    hosts.remote =
        *b_->worker->remote_region(*b_->worker->register_memory(there.data(), there.size()));
    hosts.remote_layout = hosts.local_layout;
    EXPECT_EQ(run(hosts), absl::OkStatus());
    EXPECT_TRUE(here == there);
    a_.reset();
    b_.reset();
    fake_->fake().run_all();
    EXPECT_THAT(fake_->fake().violations(), testing::IsEmpty());
    fake_.reset();
    if (HasFailure()) return;
  }
  EXPECT_GT(lost, 5u);
}

TEST_F(MappedLists, StoppedAtAnyRoundNothingMovesAfterTheEnd) {
  constexpr size_t kPages = 6000, kPage = 300;
  std::vector<uint32_t> from(kPages), to(kPages);
  std::iota(from.begin(), from.end(), 0u);
  std::iota(to.begin(), to.end(), 0u);
  std::shuffle(from.begin(), from.end(), std::mt19937_64(1));
  std::shuffle(to.begin(), to.end(), std::mt19937_64(2));
  enum Stop { kCancel, kDeadline, kDisconnect, kDeregister, kPeerEnds, kStops };
  size_t stopped = 0;
  for (int round = 0; round < 40; ++round) {
    const auto stop = static_cast<Stop>(round % kStops);
    const Op op = round / kStops % 2 == 0 ? Op::kWrite : Op::kRead;
    SCOPED_TRACE(testing::Message() << "stop " << stop << ", round " << round);
    begin(1 + static_cast<uint64_t>(round),
          round % 3 == 0 ? gpudirect::CopyWay::kKernel : gpudirect::CopyWay::kBatch);
    TransferRequest move =
        request(op, Layout::paged(0, from, kPage, kPage), Layout::paged(0, to, kPage, kPage));
    if (stop == kDeadline) move.timeout = Time(1);
    const TransferId id = *a_->worker->submit(move);
    turn(round / kStops);
    switch (stop) {
      case kCancel:
        EXPECT_TRUE(a_->worker->cancel(id).ok());
        break;
      case kDisconnect:
        a_->worker->disconnect(peer_, Time::zero()).IgnoreError();
        break;
      case kDeregister:
        EXPECT_TRUE(b_->worker->deregister_memory(b_->region).ok());
        std::fill_n(view(*b_), kListBytes, std::byte{42});
        break;
      case kPeerEnds:
        b_->worker.reset();
        b_->buffer.reset();
        b_.reset();
        break;
      default:
        break;
    }
    const absl::Status status = finish(id);
    stopped += status.ok() ? 0 : 1;
    EXPECT_FALSE(absl::IsInternal(status)) << status;
    std::fill_n(view(*a_), kListBytes, std::byte{42});
    if (b_) std::fill_n(view(*b_), kListBytes, std::byte{42});
    turn(20);
    fake_->fake().run_all();
    turn(5);
    const auto untouched = [&](const End& end) {
      return std::all_of(view(end), view(end) + kListBytes,
                         [](std::byte byte) { return byte == std::byte{42}; });
    };
    EXPECT_TRUE(untouched(*a_));
    if (b_) {
      EXPECT_TRUE(untouched(*b_));
    }
    end();
    if (HasFailure()) return;
  }
  EXPECT_GT(stopped, 10u);
}

}  // namespace
}  // namespace baton
