// all_to_all_v among more ranks than there are slots for calls: call tables and executors of all
// ranks in one thread, over links that are queues.
#include "collectives/internal/call_table.h"
#include "tests/test.h"

namespace baton::collectives::internal {
namespace {

// Packets between two ranks, which read each other's memory: a packet waits until it is taken.
class QueueLink final : public executor::Link {
 public:
  void connect(QueueLink& other) { other_ = &other; }

  uint64_t send(uint32_t, const executor::Segments&, const executor::CallTag&) override {
    return 0;
  }
  bool delivered(uint32_t, uint64_t) override { return false; }
  bool peek(uint32_t, size_t, const executor::CallTag&, executor::Segments&,
            absl::Status&) override {
    return false;
  }
  bool consume(uint32_t) override { return false; }

  size_t most_behind() const override { return kMostBehind; }
  bool tell(const executor::Packet& packet, absl::Span<const std::byte> behind) override {
    if (other_->arrived_.size() == kAhead) return false;
    other_->arrived_.push_back({packet, {behind.begin(), behind.end()}});
    return true;
  }
  bool hear(executor::Packet& packet, absl::Span<const std::byte>& behind) override {
    if (arrived_.empty()) return false;
    packet = arrived_.front().packet;
    behind = arrived_.front().behind;
    return true;
  }
  void heard() override { arrived_.pop_front(); }
  bool reads() const override { return true; }
  bool show(const std::byte* data, size_t, Place& place) override {
    return place.set({reinterpret_cast<const std::byte*>(&data), sizeof data});
  }
  absl::StatusOr<const std::byte*> look(const Place& place, size_t) override {
    const std::byte* data = nullptr;
    std::memcpy(&data, place.bytes.data(), sizeof data);
    return data;
  }
  std::string route() const override { return "queue"; }

 private:
  static constexpr size_t kAhead = 2, kMostBehind = 64;
  struct Message {
    executor::Packet packet;
    std::vector<std::byte> behind;
  };
  QueueLink* other_ = nullptr;
  std::deque<Message> arrived_;
};

class Rank {
 public:
  Rank(uint32_t rank, uint32_t ranks)
      : rank_(rank), links_(ranks), recorder_(rank), tuner_({rank, ranks, kSlotBytes}, {}) {
    options_.slot_bytes = kSlotBytes;
    options_.timeout = kNever;
    for (uint32_t other = 0; other < ranks; ++other) {
      if (other != rank) links_[other] = std::make_unique<QueueLink>();
    }
  }
  void connect(std::vector<std::unique_ptr<Rank>>& all) {
    std::vector<executor::Link*> links;
    for (size_t other = 0; other < links_.size(); ++other) {
      if (other != rank_) links_[other]->connect(*all[other]->links_[rank_]);
      links.push_back(links_[other].get());
    }
    executor_ =
        std::make_unique<executor::Executor>(rank_, links, nullptr, Clock::steady(), &recorder_);
    calls_ = std::make_unique<CallTable>(
        CallTable::Needs{options_, rank_, static_cast<uint32_t>(links_.size()), Clock::steady(),
                         control_, tuner_, *executor_, recorder_});
  }
  // What `from` sends to `to`: nothing, a few elements, or several messages of them.
  static size_t count(uint32_t from, uint32_t to) {
    if ((from + to) % 3 == 0) return 0;
    return (from * 7 + to * 3) % 11 + (from == to + 1 ? 3 * kSlotBytes / sizeof(uint64_t) : 0);
  }
  static uint64_t value(uint32_t from, uint32_t to, size_t i) {
    return (uint64_t{from} << 40) | (uint64_t{to} << 20) | i;
  }

  void start() {
    const auto ranks = static_cast<uint32_t>(links_.size());
    for (uint32_t other = 0; other < ranks; ++other) {
      send_at_.push_back(in_.size());
      receive_at_.push_back(out_.size());
      send_.push_back(count(rank_, other));
      receive_.push_back(count(other, rank_));
      for (size_t i = 0; i < send_.back(); ++i) in_.push_back(value(rank_, other, i));
      out_.resize(out_.size() + receive_.back());
    }
    const Blocks send{send_, send_at_}, receive{receive_, receive_at_};
    ASSERT_TRUE(
        check_all_to_all_v(in_.data(), send, out_.data(), receive, DataType::kI64, rank_, ranks)
            .ok());
    work_ = must(calls_->start_all_to_all_v(reinterpret_cast<const std::byte*>(in_.data()), send,
                                            reinterpret_cast<std::byte*>(out_.data()), receive,
                                            DataType::kI64, {}));
  }
  // True when something has moved.
  bool advance() {
    const auto moved = executor_->advance();
    EXPECT_TRUE(moved.ok()) << moved.status();
    return moved.ok() && *moved;
  }
  void expect_everything() {
    calls_->finish();
    const auto ended = calls_->reap(work_);
    ASSERT_TRUE(ended.has_value()) << "rank " << rank_ << " still waits";
    ASSERT_TRUE(ended->ok()) << *ended;
    for (uint32_t other = 0; other < links_.size(); ++other) {
      for (size_t i = 0; i < receive_[other]; ++i) {
        ASSERT_EQ(out_[receive_at_[other] + i], value(other, rank_, i)) << other << " to " << rank_;
      }
    }
  }

 private:
  static constexpr size_t kSlotBytes = 64;
  const uint32_t rank_;
  CommunicatorOptions options_;
  std::vector<std::unique_ptr<QueueLink>> links_;  // by rank; none to itself
  executor::FlightRecorder recorder_;
  executor::ControlBlock control_;
  Tuner tuner_;
  std::unique_ptr<executor::Executor> executor_;
  std::unique_ptr<CallTable> calls_;
  std::vector<uint64_t> in_, out_;
  std::vector<size_t> send_, send_at_, receive_, receive_at_;
  Work work_;
};

// Promise(collectives): all_to_all_v takes any number of ranks | one call whatever its messages;
//   300 ranks are tried
TEST(AllToAllV, EverybodyGetsEverythingWhateverTheNumberOfRanks) {
  for (const uint32_t ranks : {1U, 2U, 3U, 128U, 129U, 300U}) {
    SCOPED_TRACE(ranks);
    std::vector<std::unique_ptr<Rank>> all;
    for (uint32_t rank = 0; rank < ranks; ++rank)
      all.push_back(std::make_unique<Rank>(rank, ranks));
    for (auto& rank : all) rank->connect(all);
    for (auto& rank : all) rank->start();
    if (testing::Test::HasFatalFailure()) return;
    for (bool any = true; any;) {
      any = false;
      for (auto& rank : all) any = rank->advance() || any;
    }
    for (auto& rank : all) rank->expect_everything();
  }
}

}  // namespace
}  // namespace baton::collectives::internal
