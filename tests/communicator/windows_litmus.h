// The order that signals of windows promise, in virtual time, over a network that loses, repeats
// and overtakes. tests/seeds.h says which seeds run.
#pragma once

#include "collectives/window.h"
#include "tests/communicator/sim_nodes.h"
#include "tests/sanitized.h"
#include "tests/seeds.h"

namespace baton {

// Makes windows without blocking.
class SteppedWindow {
 public:
  static absl::StatusOr<std::unique_ptr<Window>> begin(Communicator& comm, size_t bytes,
                                                       const WindowOptions& options, Work& work) {
    return Window::begin(comm, nullptr, bytes, true, options, work);
  }
  static absl::Status finish(Window& window) { return window.finish(); }
};

// What a rank signals with.
enum class Signals { kCounters, kWords, kWeakWords };

// Each rank puts ever higher words to cells of the others, and now and then signals there. Whoever
// sees a signal looks whether all is there that was put before it with its tag.
class Litmus : public SimGroup {
 public:
  static constexpr size_t kNodes = 3;
  static constexpr size_t kTags = 2;
  static constexpr size_t kCells = 32;
  static constexpr uint64_t kSteps = 1000;  // of each rank
  static constexpr size_t kCellWords = 4096;

  Litmus(uint64_t seed, Signals signals)
      : Litmus(seed, signals, std::mt19937_64(seed * 7919 + 3)) {}
  virtual ~Litmus() {
    drive_for(std::chrono::milliseconds(20));
    windows_.clear();
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
        std::chrono::seconds(20));
    ASSERT_TRUE(over) << "an access hangs: " << state(steps);
  }
  std::string state(const std::array<uint64_t, kNodes>& steps) const {
    std::ostringstream out;
    for (size_t from = 0; from < kNodes; ++from) {
      out << "rank " << from << ", step " << steps[from] << ", " << comms_[from]->status() << ", "
          << endpoints_[from]->worker().stats().open_transfers << " transfers;";
      for (size_t to = 0; to < kNodes; ++to) {
        for (const Way& way : ways_[from][to]) {
          out << " to " << to << " " << way.seen << " of " << way.at_signal.size() << ";";
        }
      }
    }
    return out.str();
  }
  uint64_t signals() const { return signals_; }
  uint64_t early() const { return early_; }  // that were seen before what was put before them

 protected:
  // What one rank has done to one other with one tag.
  struct Way {
    std::array<uint64_t, kCells> cells{};                 // the last word of each
    std::array<uint64_t, kCells> writing{};               // the put under way, of each, or 0
    std::vector<std::array<uint64_t, kCells>> at_signal;  // what was put before each signal
    uint64_t seen = 0;                                    // signals, by the target
  };

  Litmus(uint64_t seed, Signals signals, std::mt19937_64 random)
      : SimGroup({.seed = seed,
                  .nodes = kNodes,
                  .rails = 1 + random() % 2,
                  .link = {.bytes_per_second = 1e9,
                           .loss = static_cast<double>(random() % 2) * 0.01,
                           .duplicate = 0.01,
                           .reorder = 0.3}}),
        kind_(signals),
        random_(random) {}

  size_t pick(size_t below) { return std::uniform_int_distribution<size_t>(0, below - 1)(random_); }
  virtual void make_windows() {
    windows_ = make((kNodes * kTags * kCells * kCellWords + kWords) * sizeof(uint64_t));
  }
  std::vector<std::shared_ptr<Window>> make(size_t bytes) {
    std::array<Work, kNodes> works;
    std::vector<std::shared_ptr<Window>> windows;
    const WindowOptions options{.signals = kTags, .words = kind_ != Signals::kCounters};
    for (size_t node = 0; node < kNodes; ++node) {
      windows.push_back(must(SteppedWindow::begin(*comms_[node], bytes, options, works[node])));
    }
    std::array<std::optional<absl::Status>, kNodes> made;
    EXPECT_TRUE(drive(
        [&] {
          bool all = true;
          for (size_t node = 0; node < kNodes; ++node) {
            if (!made[node]) made[node] = comms_[node]->test(works[node]);
            all &= made[node].has_value();
          }
          return all;
        },
        std::chrono::seconds(5)));
    for (size_t node = 0; node < kNodes; ++node) {
      EXPECT_EQ(*made[node], absl::OkStatus());
      EXPECT_EQ(SteppedWindow::finish(*windows[node]), absl::OkStatus());
    }
    return windows;
  }

  static size_t words_of(size_t cell) { return cell % 3 == 0 ? kCellWords : 1; }
  static size_t place(size_t from, size_t tag, size_t cell) {
    return ((from * kTags + tag) * kCells + cell) * kCellWords + kWords;
  }
  static constexpr size_t kWords = kNodes * kTags;  // at the beginning of a window
  static size_t word(size_t from, size_t tag) { return from * kTags + tag; }

  // Starts a put of `words`, and a signal behind it where it is wanted, and names it.
  virtual absl::StatusOr<uint64_t> start(size_t node, int to, size_t tag, const void* data,
                                         size_t words, size_t offset, bool signals) {
    Window& window = *windows_[node];
    const auto slot = static_cast<uint32_t>(tag);
    const size_t bytes = words * sizeof(uint64_t);
    CallOptions options;
    options.tag = static_cast<int32_t>(tag);
    absl::StatusOr<Work> work;
    if (!signals) {
      work = window.put(data, bytes, to, offset, options);
    } else if (kind_ == Signals::kCounters) {
      work = words == 0 ? window.signal(to, slot, 1, options)
                        : window.put_signal(data, bytes, to, offset, slot, 1, options);
    } else {
      work = window.put_add(data, bytes, to, offset,
                            {.window = window,
                             .offset = word(node, tag) * sizeof(uint64_t),
                             .behind_earlier_puts = kind_ == Signals::kWords},
                            options);
    }
    if (!work.ok()) return work.status();
    return work->sequence;
  }
  virtual std::optional<absl::Status> ended(size_t node, uint64_t name) {
    return comms_[node]->test(Work{name});
  }

  // False: not now.
  bool step(size_t node) {
    auto& alone = alone_[node];
    while (!alone.empty()) {
      const auto over = ended(node, alone.front());
      if (!over.has_value()) break;
      EXPECT_EQ(*over, absl::OkStatus());
      alone.pop_front();
    }
    const size_t to = (node + 1 + pick(kNodes - 1)) % kNodes;
    const size_t tag = pick(kTags);
    Way& way = ways_[node][to][tag];
    const size_t cell = pick(kCells);
    const size_t words = pick(4) == 0 ? 0 : words_of(cell);
    const bool signals = words == 0 || pick(3) == 0;
    // Two puts to one place are not ordered: the one before must have ended.
    if (words > 0 && way.writing[cell] != 0) {
      const auto over = ended(node, way.writing[cell]);
      if (!over.has_value()) return false;
      EXPECT_EQ(*over, absl::OkStatus());
      way.writing[cell] = 0;
    }
    const size_t offset = place(node, tag, cell) * sizeof(uint64_t);
    auto& data = data_[node][to][tag][cell];
    if (words > 0) data.assign(kCellWords, way.cells[cell] + 1);
    const auto begun = start(node, static_cast<int>(to), tag, data.data(), words, offset, signals);
    if (absl::IsResourceExhausted(begun.status())) return false;
    const auto name = must(begun);
    if (words > 0) {
      way.writing[cell] = name;
      ++way.cells[cell];
    } else {
      alone.push_back(name);
    }
    if (signals) {
      way.at_signal.push_back(way.cells);
      ++signals_;
    }
    return true;
  }

  void look() {
    for (size_t from = 0; from < kNodes; ++from) {
      for (size_t to = 0; to < kNodes; ++to) {
        for (size_t tag = 0; tag < kTags && from != to; ++tag) look(from, to, tag);
      }
    }
  }
  void look(size_t from, size_t to, size_t tag) {
    Way& way = ways_[from][to][tag];
    const auto* words = reinterpret_cast<const uint64_t*>(windows_[to]->data());
    const uint64_t value =
        kind_ == Signals::kCounters
            ? *windows_[to]->signal_value(static_cast<int>(from), static_cast<uint32_t>(tag))
            : words[word(from, tag)];
    ASSERT_LE(value, way.at_signal.size());
    if (value == way.seen) return;
    way.seen = value;
    // Signals commute: of `value` that are here, those first sent are the least they stand for.
    for (size_t cell = 0; cell < kCells; ++cell) {
      const uint64_t* at = words + place(from, tag, cell);
      if (std::min(at[0], at[words_of(cell) - 1]) >= way.at_signal[value - 1][cell]) continue;
      ++early_;
      ASSERT_EQ(kind_, Signals::kWeakWords)
          << "signal " << value << " of rank " << from << " is at rank " << to
          << " before what was put to cell " << cell << " with tag " << tag;
    }
  }
  bool all_seen() const {
    for (const auto& from : ways_) {
      for (const auto& to : from) {
        for (const Way& way : to) {
          if (way.seen != way.at_signal.size()) return false;
        }
      }
    }
    return true;
  }

  const Signals kind_;
  std::mt19937_64 random_;
  std::vector<std::shared_ptr<Window>> windows_;
  std::array<std::array<std::array<Way, kTags>, kNodes>, kNodes> ways_;
  using Data = std::array<std::array<std::vector<uint64_t>, kCells>, kTags>;
  std::array<std::array<Data, kNodes>, kNodes> data_;
  std::array<std::deque<uint64_t>, kNodes> alone_;  // signals without a put
  uint64_t signals_ = 0, early_ = 0;
};

struct Seen {
  uint64_t signals = 0, early = 0;
};
// Sums over so many seeds, or as many as tests/seeds.h says.
template <typename Kind>
Seen signals_of(Signals signals, uint64_t usually) {
  const Seeds seeds(kSanitized ? (usually + 4) / 5 : usually);
  Seen seen;
  for (uint64_t seed = seeds.begin; seed < seeds.end; ++seed) {
    SCOPED_TRACE(testing::Message() << "BATON_SEED=" << seed);
    Kind litmus(seed, signals);
    litmus.run();
    if (testing::Test::HasFailure()) break;
    seen.signals += litmus.signals();
    seen.early += litmus.early();
  }
  std::printf("%llu signals, %llu early\n", static_cast<unsigned long long>(seen.signals),
              static_cast<unsigned long long>(seen.early));
  return seen;
}

}  // namespace baton
