// Lists of pages between devices that are mapped: of any shape, and stopped at any moment.
#include "tests/gpudirect/ipc/device_end.h"
#include "tests/std.h"

namespace baton {
namespace {

constexpr size_t kListBytes = 2 << 20;

class MappedLists : public testing::Test {
 protected:
  void begin(uint64_t seed, gpudirect::CopyWay way) {
    fake_.emplace(gpudirect::FakeOptions{.seed = seed},
                  gpudirect::CudaMemory::Options{.kernels = gpudirect::FakeDriver::image(),
                                                 .table = gpudirect::costs_that_favour(way),
                                                 .sums = std::nullopt,
                                                 .root = "/nowhere"});
    pair_.emplace(*fake_, End::Settings{}, kListBytes);
    const Layout byte = Layout::contiguous(0, 1);  // the mapping is made by the first one
    ASSERT_TRUE(pair_->run(pair_->request(Op::kWrite, byte, byte)).ok());
    EXPECT_EQ(pair_->a.worker->stats().staged_transfers, 0u);
  }
  void end() {
    pair_.reset();
    fake_->expect_clean();
    fake_.reset();
  }
  void turn(int rounds) {
    for (int i = 0; i < rounds; ++i) pair_->turn();
  }
  std::byte* view(const End& end) {
    return fake_->fake().view(reinterpret_cast<uintptr_t>(end.buffer->data()), kListBytes);
  }

  std::optional<gpudirect::InstalledFake> fake_;
  std::optional<MappedPair> pair_;
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
      const auto& [a, b] = *pair_;
      std::byte* const source = view(op == Op::kWrite ? a : b);
      std::byte* const target = view(op == Op::kWrite ? b : a);
      for (size_t i = 0; i < kListBytes; ++i) source[i] = static_cast<std::byte>(random());
      std::fill_n(target, kListBytes, std::byte{0});
      const Layout out = Layout::paged(odd, from, narrow, piece);
      const Layout in = Layout::paged(odd, to, stride, piece);
      const absl::Status status =
          pair_->run(pair_->request(op, op == Op::kWrite ? out : in, op == Op::kWrite ? in : out));
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
        pair_->request(call % 4 < 2 ? Op::kWrite : Op::kRead, Layout::paged(0, from, kPage, kPage),
                       Layout::paged(0, to, kPage, kPage));
    fake_->fake().fail_call_in(call, gpudirect::kAssert);
    const absl::Status status = pair_->run(move);
    lost += status.ok() ? 0 : 1;
    if (!status.ok()) {
      EXPECT_TRUE(absl::IsAborted(status)) << status;
      EXPECT_TRUE(absl::IsAborted(pair_->run(move))) << "a device that is lost stays lost";
    }
    expect_host_moves(*pair_->a.worker, *pair_->b.worker);
    pair_.reset();
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
    auto& [a, b] = *pair_;
    TransferRequest move = pair_->request(op, Layout::paged(0, from, kPage, kPage),
                                          Layout::paged(0, to, kPage, kPage));
    if (stop == kDeadline) move.timeout = Time(1);
    const TransferId id = *a.worker->submit(move);
    turn(round / kStops);
    switch (stop) {
      case kCancel:
        EXPECT_TRUE(a.worker->cancel(id).ok());
        break;
      case kDisconnect:
        a.worker->disconnect(a.peer, Time::zero()).IgnoreError();
        break;
      case kDeregister:
        EXPECT_TRUE(b.worker->deregister_memory(b.region).ok());
        std::fill_n(view(b), kListBytes, std::byte{42});
        break;
      case kPeerEnds:
        b.worker.reset();
        b.buffer.reset();
        break;
      default:
        break;
    }
    const absl::Status status = pair_->finish(id);
    stopped += status.ok() ? 0 : 1;
    EXPECT_FALSE(absl::IsInternal(status)) << status;
    std::fill_n(view(a), kListBytes, std::byte{42});
    if (b.buffer) std::fill_n(view(b), kListBytes, std::byte{42});
    turn(20);
    fake_->fake().run_all();
    turn(5);
    const auto untouched = [&](const End& end) {
      return std::all_of(view(end), view(end) + kListBytes,
                         [](std::byte byte) { return byte == std::byte{42}; });
    };
    EXPECT_TRUE(untouched(a));
    if (b.buffer) {
      EXPECT_TRUE(untouched(b));
    }
    end();
    if (HasFailure()) return;
  }
  EXPECT_GT(stopped, 10u);
}

}  // namespace
}  // namespace baton
