// Windows over every provider: what is put is there, a signal is behind it, and whatever goes wrong
// ends in one clear error.
#include <numeric>

#include "tests/communicator/over_providers.h"
#include "tests/test.h"
#include "tests/until.h"

namespace baton {
namespace {

using testing::HasSubstr;

class Windows : public OverProviders {};

// --- against a model -----------------------------------------------------------------------------

// What one rank does to the windows of all. Each has a part of every window for itself, so that the
// order between ranks plays no role.
struct PlannedAccess {
  enum Kind { kPut, kPutSignal, kSignal, kGet } kind = kPut;
  int to = 0;
  size_t offset = 0, bytes = 0;  // in the part
  uint32_t slot = 0;
  uint64_t add = 0;
  unsigned char value = 0;  // of the first byte
};
constexpr size_t kPart = 300000;
constexpr uint32_t kSlots = 3;

std::vector<PlannedAccess> plan_of(int rank, int ranks, uint64_t seed) {
  std::mt19937_64 random(seed * 1000 + static_cast<uint64_t>(rank));
  const auto below = [&](uint64_t n) { return random() % n; };
  std::vector<PlannedAccess> plan;
  for (int i = 0; i < 150; ++i) {
    PlannedAccess access;
    access.kind = static_cast<PlannedAccess::Kind>(below(4));
    access.to = static_cast<int>(below(static_cast<uint64_t>(ranks)));
    const size_t most[] = {1, 9, 5000, kPart};
    access.bytes = below(most[below(4)] + 1);
    access.offset = below(kPart - access.bytes + 1);
    access.slot = static_cast<uint32_t>(below(kSlots));
    access.add = 1 + below(3) * below(1000);
    access.value = static_cast<unsigned char>(below(256));
    plan.push_back(access);
  }
  return plan;
}
void fill(const PlannedAccess& access, std::byte* out) {
  for (size_t i = 0; i < access.bytes; ++i) {
    out[i] = static_cast<std::byte>((access.value + i * 7) & 255);
  }
}

// Does what was planned, with many works in flight. What overlaps is kept apart by a flush.
void carry_out(Communicator& comm, Window& window, uint64_t seed) {
  const auto place = [&](const PlannedAccess& access) {
    return static_cast<size_t>(comm.rank()) * kPart + access.offset;
  };
  const int ranks = comm.ranks();
  std::vector<std::vector<std::byte>> model(ranks, std::vector<std::byte>(kPart));
  std::vector<std::vector<std::pair<size_t, size_t>>> written(ranks);
  struct Open {
    Work work;
    PlannedAccess access;
    std::unique_ptr<std::byte[]> memory;
    std::vector<std::byte> wanted;  // of a get
  };
  std::deque<Open> open;
  const auto finish = [&](Open& one) {
    ASSERT_EQ(comm.wait(one.work), absl::OkStatus());
    if (one.access.kind != PlannedAccess::kGet) return;
    ASSERT_TRUE(std::equal(one.wanted.begin(), one.wanted.end(), one.memory.get()))
        << "get of " << one.access.bytes << " bytes from " << one.access.to;
  };
  must(comm.allocate(kPart));
  for (const PlannedAccess& access : plan_of(comm.rank(), ranks, seed)) {
    auto& dirty = written[access.to];
    const bool overlaps = std::any_of(dirty.begin(), dirty.end(), [&](const auto& range) {
      return range.first < access.offset + access.bytes && access.offset < range.second;
    });
    if (overlaps && access.kind != PlannedAccess::kSignal) {
      ASSERT_EQ(ended(comm, window.flush(access.to)), absl::OkStatus());
      dirty.clear();
    }
    while (open.size() > 40) {
      finish(open.front());
      open.pop_front();
    }
    Open one{{}, access, std::make_unique<std::byte[]>(access.bytes), {}};
    std::byte* memory = one.memory.get();
    std::byte* in_model = model[access.to].data() + access.offset;
    absl::StatusOr<Work> work;
    switch (access.kind) {
      case PlannedAccess::kPut:
      case PlannedAccess::kPutSignal:
        fill(access, memory);
        std::copy(memory, memory + access.bytes, in_model);
        dirty.emplace_back(access.offset, access.offset + access.bytes);
        work = access.kind == PlannedAccess::kPut
                   ? window.put(memory, access.bytes, access.to, place(access))
                   : window.put_signal(memory, access.bytes, access.to, place(access), access.slot,
                                       access.add);
        break;
      case PlannedAccess::kSignal:
        work = window.signal(access.to, access.slot, access.add);
        break;
      case PlannedAccess::kGet:
        one.wanted.assign(in_model, in_model + access.bytes);
        dirty.emplace_back(access.offset, access.offset + access.bytes);
        work = window.get(memory, access.bytes, access.to, place(access));
        break;
    }
    ASSERT_TRUE(work.ok()) << work.status();
    one.work = *work;
    open.push_back(std::move(one));
  }
  for (Open& one : open) finish(one);
}

// Promise(collectives): What ranks put into windows is there when their signals are, a get reads it
//   and counters have exactly what was added, over every provider | random accesses of all ranks
//   beside a model
TEST_P(Windows, RandomAccessesAgreeWithAModel) {
  const Seeds seeds(kSanitized ? 1 : 3);
  for (uint64_t seed = seeds.begin; seed < seeds.end; ++seed) {
    SCOPED_TRACE(testing::Message() << "BATON_SEED=" << seed);
    run_group(3, options(), [&](Communicator& comm) {
      const int ranks = comm.ranks();
      const size_t bytes = kPart * static_cast<size_t>(ranks);
      // Every other rank brings memory of its own, and some more.
      std::vector<std::byte> own(comm.rank() % 2 == 0 ? 0 : bytes + 100);
      auto window =
          must(own.empty() ? Window::allocate(comm, bytes, {.signals = kSlots})
                           : Window::create(comm, own.data(), own.size(), {.signals = kSlots}));
      EXPECT_EQ(window->bytes(1), bytes + 100);
      carry_out(comm, *window, seed);
      // What the others have done here, by their plans.
      std::vector<std::byte> wanted(bytes);
      for (int from = 0; from < ranks; ++from) {
        std::array<uint64_t, kSlots> signals{};
        for (const PlannedAccess& access : plan_of(from, ranks, seed)) {
          if (access.to != comm.rank()) continue;
          if (access.kind == PlannedAccess::kPut || access.kind == PlannedAccess::kPutSignal) {
            fill(access, wanted.data() + static_cast<size_t>(from) * kPart + access.offset);
          }
          if (access.kind == PlannedAccess::kPutSignal || access.kind == PlannedAccess::kSignal) {
            signals[access.slot] += access.add;
          }
        }
        for (uint32_t slot = 0; slot < kSlots; ++slot) {
          ASSERT_EQ(ended(comm, window->wait_signal(from, slot, signals[slot])), absl::OkStatus());
          EXPECT_EQ(*window->signal_value(from, slot), signals[slot]);
        }
      }
      ASSERT_EQ(comm.barrier(), absl::OkStatus());
      EXPECT_TRUE(std::equal(wanted.begin(), wanted.end(), window->data()));
      ASSERT_EQ(comm.barrier(), absl::OkStatus());
    });
  }
}

TEST_P(Windows, ASignalIsSeenBehindEveryEarlierPut) {
  constexpr uint64_t kRounds = 200;
  constexpr size_t kWords = 20000;
  run_group(2, options(), [&](Communicator& comm) {
    auto window = window_of(comm, 2 * kWords * sizeof(uint64_t));
    ASSERT_NE(window, nullptr);
    const auto* words = reinterpret_cast<const uint64_t*>(window->data());
    for (uint64_t round = 1; round <= kRounds; ++round) {
      if (comm.rank() == 0) {
        // A long one, then a short one, and the signal with the short one.
        const std::vector<uint64_t> data(kWords, round);
        CallOptions detached;
        detached.detached = true;
        ASSERT_TRUE(window->put(data.data(), kWords * sizeof(uint64_t), 1, 0, detached).ok());
        const auto last =
            window->put_signal(&round, sizeof round, 1, (kWords + 5) * sizeof round, 0, 1);
        ASSERT_EQ(ended(comm, last), absl::OkStatus());
        ASSERT_EQ(ended(comm, window->wait_signal(1, 0, round)), absl::OkStatus());
      } else {
        ASSERT_EQ(ended(comm, window->wait_signal(0, 0, round)), absl::OkStatus());
        ASSERT_EQ(std::count(words, words + kWords, round), static_cast<ptrdiff_t>(kWords));
        ASSERT_EQ(words[kWords + 5], round);
        ASSERT_EQ(ended(comm, window->signal(0, 0, 1)), absl::OkStatus());
      }
    }
    ASSERT_EQ(comm.barrier(), absl::OkStatus());
  });
}

TEST_P(Windows, ATargetThatDoesNotCallIsServedByItsBackgroundThread) {
  CommunicatorOptions own = options();
  own.background = true;
  std::atomic<bool> done{false};
  run_group(2, own, [&](Communicator& comm) {
    auto window = window_of(comm, 1 << 20);
    ASSERT_NE(window, nullptr);
    if (comm.rank() == 1) {
      until([&] { return done.load(); });
      EXPECT_EQ(*window->signal_value(0, 0), 1u);
    } else {
      std::vector<std::byte> sent(1 << 20, std::byte{5}), back(1 << 20);
      EXPECT_EQ(ended(comm, window->put_signal(sent.data(), sent.size(), 1, 0, 0, 1)),
                absl::OkStatus());
      EXPECT_EQ(ended(comm, window->get(back.data(), back.size(), 1, 0)), absl::OkStatus());
      EXPECT_TRUE(sent == back);
      done = true;
    }
    EXPECT_EQ(comm.barrier(), absl::OkStatus());
  });
}

// Promise(collectives): What a put adds to a word is there behind its bytes, once | three ranks add
//   to words of each other's and of their own memory, over every provider
TEST_P(Windows, HaveWordsThatPutsAddTo) {
  constexpr size_t kShare = 100'000;  // of each rank's part, behind three words
  constexpr size_t kWordBytes = 3 * sizeof(uint64_t);
  run_group(3, options(), [](Communicator& comm) {
    std::vector<uint64_t> own((kWordBytes + 3 * kShare) / sizeof(uint64_t));
    auto* const bytes = reinterpret_cast<std::byte*>(own.data());
    auto window = must(Window::create(comm, own.data(), own.size() * sizeof(uint64_t),
                                      {.signals = 0, .words = true}));
    const auto rank = static_cast<size_t>(comm.rank());
    const std::vector<std::byte> sent(kShare, static_cast<std::byte>(rank + 1));
    const WindowWord word{.window = *window, .offset = rank * sizeof(uint64_t), .add = rank + 5};
    std::vector<Work> works;
    for (int to = 0; to < 3; ++to) {
      CallOptions options;
      options.more = to == 1;
      const auto put =
          window->put_add(sent.data(), kShare, to, kWordBytes + rank * kShare, word, options);
      const auto signal = window->put_add(nullptr, 0, to, 0, word);
      ASSERT_TRUE(put.ok() && signal.ok()) << put.status() << signal.status();
      works.insert(works.end(), {*put, *signal});
    }
    for (size_t from = 0; from < 3; ++from) {
      const std::atomic_ref<uint64_t> now(own[from]);
      until([&] { return now.load() == 2 * (from + 5); }, [&] { comm.progress(); });
      const std::byte* const part = bytes + kWordBytes + from * kShare;
      EXPECT_TRUE(std::all_of(part, part + kShare, [&](std::byte one) {
        return one == static_cast<std::byte>(from + 1);
      }));
    }
    for (const Work& work : works) EXPECT_EQ(comm.wait(work), absl::OkStatus());
    EXPECT_EQ(comm.barrier(), absl::OkStatus());
  });
}

TEST_P(Windows, AreReadInPlaceWhereTheyCanBeMapped) {
  run_group(2, options(), [&](Communicator& comm) {
    auto window = window_of(comm, 1000);
    std::vector<std::byte> memory(1000);
    auto own = Window::create(comm, memory.data(), memory.size());
    ASSERT_TRUE(window != nullptr && own.ok()) << own.status();
    window->data()[999] = static_cast<std::byte>(7 + comm.rank());
    ASSERT_EQ(comm.barrier(), absl::OkStatus());
    const int other = 1 - comm.rank();
    if (GetParam() == "shm") {
      absl::StatusOr<RemoteView> view;
      until([&] { return !absl::IsUnavailable((view = window->view(other)).status()); },
            [&] { comm.progress(); });
      ASSERT_TRUE(view.ok()) << view.status();
      ASSERT_EQ(view->size, 1000u);
      EXPECT_EQ(view->data[999], static_cast<std::byte>(7 + other));
    } else {
      const auto view = window->view(other);
      EXPECT_TRUE(absl::IsUnimplemented(view.status())) << view.status();
    }
    const auto view = (*own)->view(other);
    EXPECT_THAT(view.status(),
                fails_with(Code::kUnimplemented, {"rank " + std::to_string(other), "get()"}));
    EXPECT_EQ(window->view(comm.rank())->data, window->data());
    ASSERT_EQ(comm.barrier(), absl::OkStatus());
  });
}

// --- what goes wrong -----------------------------------------------------------------------------

// Promise(collectives): An access outside of a window, or to what is not there, is refused before a
//   byte moves, and breaks nothing | it is checked against what that rank told when it made it
TEST_P(Windows, RefuseWhatMakesNoSense) {
  run_group(2, options(), [](Communicator& comm) {
    auto window = window_of(comm, comm.rank() == 0 ? 100 : 50, 2);
    ASSERT_NE(window, nullptr);
    char data[200] = {};
    struct Case {
      const char* says;
      std::function<absl::StatusOr<Work>()> start;
    };
    Window& w = *window;
    const Case cases[] = {
        {"rank 2: there are 2 ranks", [&] { return w.put(data, 1, 2, 0); }},
        {"rank -1: there are 2 ranks", [&] { return w.signal(-1, 0, 1); }},
        {"window has 50 bytes", [&] { return w.put(data, 51, 1, 0); }},
        {"window has 50 bytes", [&] { return w.get(data, 1, 1, 50); }},
        {"window has 100 bytes", [&] { return w.put_signal(data, 2, 0, SIZE_MAX, 0, 1); }},
        {"window has 100 bytes", [&] { return w.put(data, SIZE_MAX, 0, 2); }},
        {"local memory is null", [&] { return w.get(nullptr, 1, 0, 0); }},
        {"the window has 2 signals", [&] { return w.signal(0, 2, 1); }},
        {"the window has 2 signals", [&] { return w.wait_signal(0, 2, 1); }},
        {"the window has 2 signals", [&] { return w.put_signal(data, 1, 0, 0, 7, 1); }},
        {"adds 1 at least", [&] { return w.signal(0, 0, 0); }},
        {"adds 1 at least", [&] { return w.put_signal(data, 1, 0, 0, 0, 0); }},
        {"2^48 - 1", [&] { return w.signal(0, 0, uint64_t{1} << 48); }},
    };
    for (const Case& c : cases) {
      EXPECT_THAT(c.start().status(), fails_with(Code::kInvalidArgument, {c.says}));
    }
    auto words = must(Window::allocate(comm, 16, {.signals = 0, .words = true}));
    const auto add = [&](const Window& to, size_t offset) {
      return w.put_add(data, 1, 1 - comm.rank(), 0, {.window = to, .offset = offset}).status();
    };
    EXPECT_TRUE(absl::IsInvalidArgument(add(*words, 9)));
    EXPECT_TRUE(absl::IsInvalidArgument(add(*words, 16)));
    EXPECT_TRUE(absl::IsInvalidArgument(add(*words, SIZE_MAX - 7)));
    EXPECT_TRUE(absl::IsFailedPrecondition(add(w, 0)));
    EXPECT_TRUE(absl::IsInvalidArgument(words->signal(0, 0, 1).status()));
    EXPECT_TRUE(absl::IsInvalidArgument(w.signal_value(5, 0).status()));
    EXPECT_TRUE(absl::IsInvalidArgument(w.view(5).status()));
    for (const uint32_t signals : {0U, Window::kMostSignals + 1}) {
      EXPECT_TRUE(
          absl::IsInvalidArgument(Window::allocate(comm, 1, {.signals = signals}).status()));
    }
    // Nothing of it counts.
    EXPECT_EQ(*w.signal_value(1 - comm.rank(), 0), 0u);
    EXPECT_EQ(comm.barrier(), absl::OkStatus());
  });
}

// Memory that only one rank cannot bring: all hear who it was, and go on.
TEST_P(Windows, AllRanksHearOfOneThatCannotMakeItsPart) {
  run_group(3, options(), [](Communicator& comm) {
    std::vector<std::byte> memory(100);
    for (int round = 0; round < 2; ++round) {
      const bool odd = comm.rank() == 1;
      void* bad = round == 0 ? nullptr : reinterpret_cast<void*>(4096);  // not mapped
      const auto window = Window::create(comm, odd ? bad : memory.data(), memory.size());
      EXPECT_TRUE(absl::IsInvalidArgument(window.status())) << window.status();
      if (!odd) {
        EXPECT_THAT(text(window.status()), HasSubstr("rank 1"));
      }
    }
    auto none = must(Window::create(comm, nullptr, 0));
    EXPECT_EQ(ended(comm, none->signal((comm.rank() + 1) % 3, 0, 2)), absl::OkStatus());
    EXPECT_EQ(ended(comm, none->wait_signal((comm.rank() + 2) % 3, 0, 2)), absl::OkStatus());
    EXPECT_EQ(comm.barrier(), absl::OkStatus());
  });
}

TEST_P(Windows, RanksThatMakeOthersAreTold) {
  for (const bool other_call : {false, true}) {
    run_group(2, options(), [&](Communicator& comm) {
      absl::Status status;
      if (comm.rank() == 0) {
        status = Window::allocate(comm, 100).status();
      } else {
        status = other_call ? comm.barrier() : Window::allocate(comm, 100, {.signals = 2}).status();
      }
      if (status.ok()) status = comm.barrier();
      EXPECT_THAT(status, fails_with(Code::kInvalidArgument, {"disagree"})) << comm.rank();
    });
  }
}

TEST_P(Windows, OneThatIsDestroyedEndsItsWorks) {
  run_group(2, options(), [](Communicator& comm) {
    auto window = window_of(comm, 64 << 20);
    auto other = window_of(comm, 100);
    ASSERT_TRUE(window != nullptr && other != nullptr);
    if (comm.rank() == 0) {
      std::vector<std::byte> data(64 << 20);
      const auto put = window->put(data.data(), data.size(), 1, 0);
      const auto wait = window->wait_signal(1, 0, 1);
      const auto kept = other->wait_signal(1, 0, 1);
      ASSERT_TRUE(put.ok() && wait.ok() && kept.ok());
      window.reset();
      data = {};
      const absl::Status moved = comm.wait(*put);  // it may have been there before
      EXPECT_TRUE(moved.ok() || absl::IsAborted(moved)) << moved;
      EXPECT_THAT(comm.wait(*wait), fails_with(Code::kAborted, {"wait for signal 0 of rank 1",
                                                                "the window was destroyed"}));
      EXPECT_EQ(comm.barrier(), absl::OkStatus());
      EXPECT_EQ(ended(comm, kept), absl::OkStatus());
    } else {
      EXPECT_EQ(comm.barrier(), absl::OkStatus());
      EXPECT_EQ(ended(comm, other->signal(0, 0, 1)), absl::OkStatus());
    }
    EXPECT_EQ(comm.barrier(), absl::OkStatus());
  });
}

// Promise(collectives): A put to a window that its rank has destroyed fails, and so does every
//   signal behind it, while other windows and calls go on | its memory has a key that is gone
TEST_P(Windows, APutToOneThatIsGoneFailsAndSoDoSignalsBehindIt) {
  run_group(2, options(), [](Communicator& comm) {
    auto window = window_of(comm, 100);
    auto other = window_of(comm, 100);
    ASSERT_TRUE(window != nullptr && other != nullptr);
    if (comm.rank() == 1) window.reset();
    ASSERT_EQ(comm.barrier(), absl::OkStatus());
    if (comm.rank() == 0) {
      const int data = 1;
      CallOptions detached;
      detached.detached = true;
      ASSERT_TRUE(window->put(&data, sizeof data, 1, 0, detached).ok());
      const auto signal = window->signal(1, 0, 1);
      EXPECT_THAT(ended(comm, window->flush()),
                  fails_with(Code::kFailedPrecondition,
                             {"put of 4 bytes at 0 to rank 1", "has destroyed its window"}));
      EXPECT_THAT(text(ended(comm, signal)), HasSubstr("an earlier access has failed"));
      EXPECT_EQ(ended(comm, other->put_signal(&data, sizeof data, 1, 0, 0, 1)), absl::OkStatus());
    } else {
      EXPECT_EQ(ended(comm, other->wait_signal(0, 0, 1)), absl::OkStatus());
    }
    EXPECT_EQ(comm.barrier(), absl::OkStatus());
  });
}

TEST_P(Windows, AWaitWhoseTimeIsOverEndsAlone) {
  ManualClock clock;
  CommunicatorOptions own = options();
  own.worker.clock = &clock;
  run_group(2, own, [&](Communicator& comm) {
    auto window = window_of(comm, 100);
    ASSERT_NE(window, nullptr);
    if (comm.rank() == 0) {
      CallOptions hasty;
      hasty.timeout = std::chrono::seconds(1);
      const auto work = must(window->wait_signal(1, 0, 3, hasty));
      EXPECT_EQ(comm.test(work), std::nullopt);
      clock.advance(std::chrono::seconds(2));
      EXPECT_THAT(comm.wait(work),
                  fails_with(Code::kDeadlineExceeded, {"rank 1", "to be 3", "it is 0"}));
    }
    EXPECT_EQ(comm.barrier(), absl::OkStatus());
  });
}

TEST_P(Windows, AnAbortEndsWhatIsUnderWay) {
  std::atomic<int> over{0};
  run_group(2, options(), [&](Communicator& comm) {
    auto window = window_of(comm, 32 << 20);
    ASSERT_NE(window, nullptr);
    std::vector<std::byte> data(32 << 20);
    const int other = 1 - comm.rank();
    const auto wait = window->wait_signal(other, 0, 1);
    const auto put = window->put(data.data(), data.size(), other, 0);
    const auto flush = window->flush();
    if (comm.rank() == 0) comm.abort(absl::InternalError("enough"));
    for (const auto& work : {wait, put, flush}) {
      const absl::Status status = ended(comm, work);
      if (status.ok() && work->sequence != wait->sequence) continue;  // it was over before
      EXPECT_THAT(status, fails_with(Code::kInternal, {"enough"}));
    }
    data = {};
    EXPECT_THAT(text(window->signal(other, 0, 1).status()), HasSubstr("enough"));
    ++over;
    // The other one has yet to hear of it, and a put to a window that is gone would say that.
    until([&] { return over == 2; }, [&] { comm.progress(); });
  });
}

// A put that the wire does not let go of would take the connection, and all groups, with it.
TEST_P(Windows, AnAbortTakesPutsBackAndOtherGroupsGoOn) {
  if (GetParam() != "tcp") GTEST_SKIP() << "elsewhere what is under way completes first";
  std::atomic<int> over{0};
  run_group(2, options(), [&](Communicator& comm) {
    auto part = must(comm.split(0, comm.rank()));
    auto window = window_of(*part, 64 << 20);
    ASSERT_NE(window, nullptr);
    std::vector<std::byte> data(64 << 20);
    if (comm.rank() == 0) {
      const auto put = window->put(data.data(), data.size(), 1, 0);
      part->abort(absl::InternalError("enough"));
      EXPECT_TRUE(absl::IsInternal(ended(*part, put)));
      data = {};
    }
    ++over;
    until([&] { return over == 2; }, [&] { comm.progress(); });
    EXPECT_EQ(comm.barrier(), absl::OkStatus());
  });
}

TEST_P(Windows, AreOfNoUseBehindTheirGroup) {
  run_group(2, options(), [](Communicator& comm) {
    auto window = window_of(comm, 100);
    ASSERT_NE(window, nullptr);
    std::unique_ptr<Window> of_part;
    {
      auto part = must(comm.split(0, comm.rank()));
      of_part = window_of(*part, 100);
      ASSERT_NE(of_part, nullptr);
    }
    EXPECT_TRUE(absl::IsFailedPrecondition(of_part->signal(0, 0, 1).status()));
    EXPECT_THAT(text(of_part->view(0).status()), HasSubstr("communicator was destroyed"));
    ASSERT_EQ(comm.barrier(), absl::OkStatus());
    const auto again = comm.reconfigure(comm.handles(), 77, patient(std::chrono::seconds(30)));
    ASSERT_EQ(ended(comm, again), absl::OkStatus());
    EXPECT_THAT(window->signal(1, 0, 1).status(),
                fails_with(Code::kFailedPrecondition, {"reconfigure()"}));
    auto fresh = window_of(comm, 100);
    EXPECT_EQ(ended(comm, fresh->signal(1 - comm.rank(), 0, 1)), absl::OkStatus());
    EXPECT_EQ(ended(comm, fresh->wait_signal(1 - comm.rank(), 0, 1)), absl::OkStatus());
    EXPECT_EQ(comm.barrier(), absl::OkStatus());
  });
}

TEST_P(Windows, ARankThatLeavesIsNamed) {
  run_group(2, options(), [](Communicator& comm) {
    auto window = window_of(comm, 100);
    ASSERT_NE(window, nullptr);
    ASSERT_EQ(comm.barrier(), absl::OkStatus());
    if (comm.rank() == 1) {
      EXPECT_EQ(ended(comm, window->signal(0, 0, 1)), absl::OkStatus());
      return;
    }
    // What came before the goodbye counts.
    EXPECT_EQ(ended(comm, window->wait_signal(1, 0, 1)), absl::OkStatus());
    EXPECT_THAT(ended(comm, window->wait_signal(1, 0, 2)),
                fails_with(Code::kUnavailable, {"rank 1", "has left the group"}));
    const absl::Status later = ended(comm, window->signal(1, 0, 1));
    EXPECT_TRUE(absl::IsUnavailable(later)) << later;
  });
}

TEST_P(Windows, LeaveNothingBehind) {
  run_group(2, options(), [](Communicator& comm) {
    std::set<std::byte*> places;
    for (int i = 0; i < 40; ++i) {
      auto window = window_of(comm, 10000, Window::kMostSignals);
      ASSERT_NE(window, nullptr);
      places.insert(window->data());
      const int data = i;
      EXPECT_EQ(ended(comm, window->put_signal(&data, sizeof data, 1 - comm.rank(), 0, 5, 1)),
                absl::OkStatus());
      EXPECT_EQ(ended(comm, window->wait_signal(1 - comm.rank(), 5, 1)), absl::OkStatus());
      ASSERT_EQ(comm.barrier(), absl::OkStatus());
    }
    EXPECT_LT(places.size(), 10u) << "the memory of windows is not given back";
  });
}

INSTANTIATE_TEST_SUITE_P(Providers, Windows, testing::Values("shm", "tcp", "ucx", "verbs_fake"),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace baton
