// The order that windows promise, in virtual time, over a network that loses, repeats and
// overtakes.
//
// tests/seeds.h says which seeds run.
#include "collectives/window.h"
#include "tests/communicator/group.h"
#include "tests/sanitized.h"
#include "tests/seeds.h"
#include "tests/sim/fabric/fabric.h"
#include "tests/test.h"

namespace baton {

// Makes windows without blocking.
class SteppedWindow {
 public:
  static absl::StatusOr<std::unique_ptr<Window>> begin(Communicator& comm, size_t bytes,
                                                       Work& work) {
    return Window::begin(comm, nullptr, bytes, true, {}, work);
  }
  static absl::Status finish(Window& window) { return window.finish(); }
};

namespace {

using std::chrono::seconds;

// Each rank puts ever higher words to cells of the others, and now and then raises its signal
// there. Whoever sees a signal looks whether all is there that was put before it.
class Litmus {
 public:
  static constexpr size_t kNodes = 3;
  static constexpr size_t kCells = 64;
  static constexpr uint64_t kSteps = 1000;  // of each rank
  static constexpr size_t kCellWords = 4096;

  explicit Litmus(uint64_t seed)
      : random_(seed * 7919 + 3),
        fabric_({.seed = seed,
                 .nodes = kNodes,
                 .rails = 1 + pick(2),
                 .link = {.bytes_per_second = 1e9,
                          .loss = static_cast<double>(pick(2)) * 0.01,
                          .duplicate = 0.01,
                          .reorder = 0.3}}) {
    std::vector<Handle> handles;
    for (size_t node = 0; node < kNodes; ++node) {
      EndpointOptions options;
      options.worker.require = "sim";
      options.worker.key = test_key();
      options.worker.clock = &fabric_.clock();
      options.worker.extra_providers = {fabric_.provider_factory(node)};
      options.slab_bytes = 2 << 20;
      auto endpoint = Endpoint::open(options);
      EXPECT_TRUE(endpoint.ok()) << endpoint.status();
      endpoints_.push_back(*std::move(endpoint));
      handles.push_back(endpoints_.back()->handle());
      fabric_.attach(endpoints_.back()->worker(), node);
    }
    for (const auto& endpoint : endpoints_) {
      GroupOptions options;
      options.uuid = 1;
      options.slot_bytes = 64 << 10;
      auto comm = Communicator::create(endpoint, handles, options);
      EXPECT_TRUE(comm.ok()) << comm.status();
      comms_.push_back(*std::move(comm));
    }
  }
  ~Litmus() {
    drive([&] { return false; }, std::chrono::milliseconds(20));
    windows_.clear();
    comms_.clear();
    drive([&] { return false; }, std::chrono::milliseconds(20));
    for (size_t node = 0; node < kNodes; ++node) fabric_.detach(endpoints_[node]->worker());
    endpoints_.clear();
  }

  void run() {
    make_windows();
    std::array<uint64_t, kNodes> steps{};
    const auto all_done = [&] {
      return std::all_of(steps.begin(), steps.end(), [](uint64_t n) { return n == kSteps; });
    };
    const bool over = drive(
        [&] {
          bool any = false;
          for (size_t turn = 0; turn < 2 * kNodes && !any; ++turn) {  // time needs a step
            const size_t node = turn % kNodes;
            if (steps[node] == kSteps || (turn < kNodes && pick(2) == 0) || !step(node)) continue;
            ++steps[node];
            any = turn >= kNodes;
          }
          look();
          return testing::Test::HasFailure() || (all_done() && all_seen());
        },
        seconds(20));
    ASSERT_TRUE(over) << "an access hangs: " << state(steps);
  }
  std::string state(const std::array<uint64_t, kNodes>& steps) const {
    std::ostringstream out;
    for (size_t from = 0; from < kNodes; ++from) {
      out << "rank " << from << ", step " << steps[from] << ", " << comms_[from]->status() << ", "
          << endpoints_[from]->worker().stats().open_transfers << " transfers;";
      for (size_t to = 0; to < kNodes; ++to) {
        const Way& way = ways_[from][to];
        out << " to " << to << " " << way.seen << " of " << way.at_signal.size() << ";";
      }
    }
    return out.str();
  }
  uint64_t signals() const { return signals_; }

 private:
  // What one rank has done to one other.
  struct Way {
    std::array<uint64_t, kCells> cells{};                 // the last word of each
    std::array<Work, kCells> writing{};                   // the put under way, of each
    std::vector<std::array<uint64_t, kCells>> at_signal;  // what was put before each signal
    uint64_t seen = 0;                                    // signals, by the target
  };

  size_t pick(size_t below) { return std::uniform_int_distribution<size_t>(0, below - 1)(random_); }
  bool drive(const std::function<bool()>& ready, Time timeout) {
    return fabric_.run_until(
        [&] {
          for (const auto& endpoint : endpoints_) {
            while (endpoint->progress()) {
            }
          }
          return ready();
        },
        timeout);
  }

  void make_windows() {
    std::array<Work, kNodes> works;
    constexpr size_t kWindowBytes = kNodes * kCells * kCellWords * sizeof(uint64_t);
    for (size_t node = 0; node < kNodes; ++node) {
      auto window = SteppedWindow::begin(*comms_[node], kWindowBytes, works[node]);
      ASSERT_TRUE(window.ok()) << window.status();
      windows_.push_back(*std::move(window));
    }
    std::array<std::optional<absl::Status>, kNodes> ended;
    ASSERT_TRUE(drive(
        [&] {
          bool all = true;
          for (size_t node = 0; node < kNodes; ++node) {
            if (!ended[node]) ended[node] = comms_[node]->test(works[node]);
            all &= ended[node].has_value();
          }
          return all;
        },
        seconds(5)));
    for (size_t node = 0; node < kNodes; ++node) {
      ASSERT_EQ(*ended[node], absl::OkStatus());
      ASSERT_EQ(SteppedWindow::finish(*windows_[node]), absl::OkStatus());
    }
  }

  static size_t words_of(size_t cell) { return cell % 3 == 0 ? kCellWords : 1; }
  static size_t place(size_t from, size_t cell) { return (from * kCells + cell) * kCellWords; }

  // False: not now.
  bool step(size_t node) {
    const size_t to = (node + 1 + pick(kNodes - 1)) % kNodes;
    Way& way = ways_[node][to];
    Window& window = *windows_[node];
    const bool alone = pick(4) == 0;
    if (alone) {
      CallOptions detached;
      detached.detached = true;
      const auto work = window.signal(static_cast<int>(to), 0, 1, detached);
      if (absl::IsResourceExhausted(work.status())) return false;
      EXPECT_TRUE(work.ok()) << work.status();
      way.at_signal.push_back(way.cells);
      ++signals_;
      return true;
    }
    const size_t cell = pick(kCells);
    // Two puts to one place are not ordered: the one before must have ended.
    if (way.writing[cell].sequence != 0) {
      const auto ended = comms_[node]->test(way.writing[cell]);
      if (!ended.has_value()) return false;
      EXPECT_EQ(*ended, absl::OkStatus());
      way.writing[cell] = {};
    }
    const size_t words = words_of(cell);
    auto& data = data_[node][to][cell];
    data.assign(kCellWords, way.cells[cell] + 1);
    const size_t offset = place(node, cell) * sizeof(uint64_t);
    const bool signals = pick(3) == 0;
    const auto work =
        signals ? window.put_signal(data.data(), words * sizeof(uint64_t), static_cast<int>(to),
                                    offset, 0, 1)
                : window.put(data.data(), words * sizeof(uint64_t), static_cast<int>(to), offset);
    if (absl::IsResourceExhausted(work.status())) return false;
    EXPECT_TRUE(work.ok()) << work.status();
    way.writing[cell] = *work;
    ++way.cells[cell];
    if (signals) {
      way.at_signal.push_back(way.cells);
      ++signals_;
    }
    return true;
  }

  void look() {
    for (size_t from = 0; from < kNodes; ++from) {
      for (size_t to = 0; to < kNodes; ++to) {
        Way& way = ways_[from][to];
        if (from == to) continue;
        const uint64_t value = *windows_[to]->signal_value(static_cast<int>(from), 0);
        ASSERT_LE(value, way.at_signal.size());
        if (value == way.seen) continue;
        way.seen = value;
        const auto* words = reinterpret_cast<const uint64_t*>(windows_[to]->data());
        // Signals commute: of `value` that are here, those first sent are the least they stand for.
        for (size_t cell = 0; cell < kCells; ++cell) {
          const uint64_t* at = words + place(from, cell);
          ASSERT_GE(std::min(at[0], at[words_of(cell) - 1]), way.at_signal[value - 1][cell])
              << "signal " << value << " of rank " << from << " is at rank " << to
              << " before what was put to cell " << cell;
        }
      }
    }
  }
  bool all_seen() const {
    for (const auto& from : ways_) {
      for (const Way& way : from) {
        if (way.seen != way.at_signal.size()) return false;
      }
    }
    return true;
  }

  std::mt19937_64 random_;
  sim::SimFabric fabric_;
  std::vector<std::shared_ptr<Endpoint>> endpoints_;
  std::vector<std::unique_ptr<Communicator>> comms_;
  std::vector<std::unique_ptr<Window>> windows_;
  std::array<std::array<Way, kNodes>, kNodes> ways_;
  std::array<std::array<std::array<std::vector<uint64_t>, kCells>, kNodes>, kNodes> data_;
  uint64_t signals_ = 0;
};

// Promise(collectives): A signal is never seen before a byte of an earlier put of that rank to that
//   target | random puts and signals over a network that loses, repeats and overtakes, in virtual
//   time
TEST(SimWindows, NoSignalOvertakesAPut) {
  const Seeds seeds(kSanitized ? 4 : 20);
  uint64_t signals = 0;
  for (uint64_t seed = seeds.begin; seed < seeds.end; ++seed) {
    SCOPED_TRACE(testing::Message() << "BATON_SEED=" << seed);
    Litmus litmus(seed);
    litmus.run();
    if (testing::Test::HasFailure()) return;
    signals += litmus.signals();
  }
  std::printf("%llu signals\n", static_cast<unsigned long long>(signals));
}

}  // namespace
}  // namespace baton
