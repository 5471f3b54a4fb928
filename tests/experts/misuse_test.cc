// What experts refuse: one clear error, and the call can be made again.
#include "collectives/experts.h"

#include "collectives/experts/routing.h"
#include "tests/communicator/over_providers.h"
#include "tests/experts/mixture.h"
#include "tests/gpudirect/fake/installed_fake.h"

namespace baton {
namespace {

using testing::HasSubstr;

using collectives::experts::Geometry;
using collectives::experts::ListHeader;

class ExpertsMisuse : public OverProviders {};

ExpertsOptions small() {
  ExpertsOptions options{.experts = 4, .top_k = 2, .hidden = 8, .max_tokens = 4};
  options.type = DataType::kF32;
  return options;
}

// Promise(collectives): Nothing that two ranks of Experts write, or of two rounds that are open,
//   lies in one place | every run of bytes of random options, sorted by where it begins
TEST(ExpertsGeometry, RunsOfTheWindowsStayApart) {
  std::mt19937_64 random(11);
  for (int i = 0; i < 2'000 && !HasFailure(); ++i) {
    const int ranks = 1 + i % 5;
    const ExpertsOptions options = random_options(random, ranks);
    const Geometry g(options, i % ranks, ranks);
    using Runs = std::vector<std::pair<size_t, size_t>>;
    Runs window = {{0, sizeof(uint32_t) * g.ranks}}, returned;
    const auto add = [](Runs& to, size_t begin, size_t bytes) {
      to.emplace_back(begin, begin + bytes);
    };
    const size_t list = g.list_bytes(g.most_rows), rows = g.most_rows * g.row_stride;
    for (uint32_t place = 0; place < static_cast<uint32_t>(options.in_flight); ++place) {
      add(window, g.outputs(place), g.slots * g.value_bytes);
      for (uint32_t rank = 0; rank < g.ranks; ++rank) {
        add(window, g.rows_at(place, rank) - list, list + rows);
        add(window, g.table(place, rank), g.most_pairs * sizeof(uint32_t));
        add(window, g.sent_rows(place, rank) - list, list + std::min(g.packed_bytes, rows));
        add(returned, g.returned(place, rank), g.most_pairs * g.value_bytes);
        // What is read as rows, by number, is where it was written.
        EXPECT_EQ(g.received(place) + g.row_number(rank, 1) * g.row_stride,
                  g.rows_at(place, rank) + g.row_stride);
      }
    }
    for (auto& [runs, bytes] :
         {std::pair<Runs&, size_t>{window, g.window_bytes}, {returned, g.returned_window_bytes}}) {
      std::sort(runs.begin(), runs.end());
      for (size_t n = 1; n < runs.size(); ++n) EXPECT_LE(runs[n - 1].second, runs[n].first);
      EXPECT_LE(runs.back().second, bytes);
    }
  }
}

// Two tokens of rank 0 for both experts of rank 1, damaged.
TEST(ExpertsLists, ThatNoRankWritesAreRefused) {
  ExpertsOptions options = small();
  options.capacity = 2;
  const Geometry geometry(options, 1, 2);
  collectives::experts::Routing routing;
  ASSERT_TRUE(routing.set(Geometry(options, 0, 2), 4, 2, {2, 3, 3, 2}).ok());
  struct List {
    ListHeader header;
    std::array<std::array<int16_t, 2>, 5> experts;
  };
  List good{};
  routing.write(geometry, 1, 7, reinterpret_cast<std::byte*>(&good));
  collectives::experts::Slots slots;
  const auto add = [&](uint32_t source, const List& list, size_t rows) {
    // It ends where its rows begin.
    const auto* const begin = reinterpret_cast<const std::byte*>(&list);
    return slots.add(geometry, source, 7, rows, begin + geometry.list_bytes(rows));
  };
  const auto refused = [&](const char* what, const std::function<void(List&, size_t&)>& damage) {
    List list = good;
    size_t rows = 2;
    damage(list, rows);
    slots.begin(geometry);
    EXPECT_THAT(add(0, list, rows), fails_with(Code::kDataLoss, {what}));
  };
  const auto four = [](int16_t first, int16_t second) {
    const uint32_t pairs = second < 0 ? 4 : 8;
    return List{{7, 4, pairs},
                {{{first, second}, {first, second}, {first, second}, {first, second}}}};
  };
  slots.begin(geometry);
  EXPECT_EQ(add(0, good, 2), absl::OkStatus());
  refused("another round", [](List& list, size_t&) { ++list.header.round; });
  refused("another length", [](List& list, size_t&) { ++list.header.rows; });
  refused("more rows than", [](List& list, size_t& rows) { rows = list.header.rows = 5; });
  refused("do not ascend", [](List& list, size_t&) { list.experts[0] = {1, 0}; });
  refused("do not ascend", [](List& list, size_t&) { list.experts[1] = {1, 1}; });
  refused("do not ascend", [](List& list, size_t&) { list.experts[1] = {0, 2}; });
  refused("do not ascend", [](List& list, size_t&) { list.experts[0] = {-2, 0}; });
  refused("for no expert", [](List& list, size_t&) { list.experts[1] = {-1, 0}; });
  refused("another number of experts", [](List& list, size_t&) { ++list.header.pairs; });
  refused("another number of experts", [](List& list, size_t&) { --list.header.pairs; });
  refused("another number of experts",
          [&](List& list, size_t& rows) { list = four(0, 1), rows = 4; });
  slots.begin(geometry);
  EXPECT_EQ(add(0, four(0, -1), 4), absl::OkStatus());
  EXPECT_THAT(text(add(1, four(0, -1), 4)), HasSubstr("than its capacity"));
}

TEST_P(ExpertsMisuse, OptionsThatNoRankCanHave) {
  run_group(2, options(), [](Communicator& comm) {
    const auto refused = [&](const std::function<void(ExpertsOptions&)>& change,
                             const std::string& what) {
      ExpertsOptions changed = small();
      if (comm.rank() == 1) change(changed);
      EXPECT_THAT(Experts::create(comm, changed).status(),
                  fails_with(Code::kInvalidArgument, {what, "rank 1"}));
    };
    refused([](auto& o) { o.experts = 5; }, "experts is 5");
    refused([](auto& o) { o.experts = -2; }, "experts is -2");
    refused([](auto& o) { o.experts = 2 * 32768; }, "experts is 65536");
    refused([](auto& o) { o.top_k = 0; }, "top_k is 0");
    refused([](auto& o) { o.top_k = 5; }, "top_k is 5");
    refused([](auto& o) { o.experts = 80, o.top_k = 65; }, "top_k is 65");
    refused([](auto& o) { o.hidden = -1; }, "hidden is -1");
    refused([](auto& o) { o.max_tokens = 0; }, "max_tokens is 0");
    refused([](auto& o) { o.type = DataType::kI32; }, "type is i32");
    refused([](auto& o) { o.capacity = -1; }, "capacity is -1");
    refused([](auto& o) { o.in_flight = 5; }, "in_flight is 5");
    refused([](auto& o) { o.in_flight = 0; }, "in_flight is 0");
    refused([](auto& o) { o.hidden = 1, o.max_tokens = 1 << 30; }, "more than memory can hold");
    refused([](auto& o) { o.hidden = 1 << 23, o.max_tokens = 1 << 20; },
            "more than memory can hold");
    refused([](auto& o) { o.max_tokens = INT_MAX; }, "more than memory can hold");
    refused([](auto& o) { o.capacity = INT_MAX; }, "more than memory can hold");
    refused([](auto& o) { o.rank_timeout = std::chrono::seconds(-1); }, "rank_timeout is -1 s");
    // And what differs.
    refused([](auto& o) { o.experts = 8; }, "experts is 4 at rank 0 and 8 at rank 1");
    refused([](auto& o) { o.top_k = 1; }, "top_k is 2 at rank 0 and 1 at rank 1");
    refused([](auto& o) { o.hidden = 16; }, "hidden is 8 at rank 0 and 16 at rank 1");
    refused([](auto& o) { o.type = DataType::kBF16; }, "type is f32 at rank 0 and bf16 at rank 1");
    refused([](auto& o) { o.fp8 = true; }, "fp8 is 0 at rank 0 and 1 at rank 1");
    refused([](auto& o) { o.max_tokens = 5; }, "max_tokens is 4 at rank 0 and 5 at rank 1");
    refused([](auto& o) { o.capacity = 1; }, "capacity is 0 at rank 0 and 1 at rank 1");
    refused([](auto& o) { o.in_flight = 2; }, "in_flight is 1 at rank 0 and 2 at rank 1");
    EXPECT_EQ(comm.barrier(), absl::OkStatus()) << "the communicator goes on";
  });
}

TEST_P(ExpertsMisuse, CallsThatAreRefusedChangeNothing) {
  run_group(2, options(), [](Communicator& comm) {
    ExpertsOptions options = small();
    options.capacity = 2;
    auto made = must(Experts::create(comm, options));
    Experts& experts = *made;
    const std::vector<float> rows(4 * 8, 1);
    const std::vector<float> weights(4 * 2, 0.5f);
    std::vector<float> out(4 * 8);
    const auto refused = [&](const void* data, int tokens, const std::vector<int32_t>& chosen,
                             absl::StatusCode code, const std::string& what) {
      EXPECT_THAT(experts.dispatch(data, tokens, chosen).status(), fails_with(code, {what}));
    };
    refused(rows.data(), -1, {}, Code::kInvalidArgument, "-1 tokens: 0 to 4");
    refused(rows.data(), 5, std::vector<int32_t>(10), Code::kInvalidArgument, "0 to 4");
    refused(rows.data(), 1, {0}, Code::kInvalidArgument, "1 choices: there are 2");
    refused(rows.data(), 1, {0, 4}, Code::kInvalidArgument, "choice 1 of token 0 is expert 4");
    refused(rows.data(), 1, {0, -2}, Code::kInvalidArgument, "expert -2");
    refused(rows.data(), 1, {3, 3}, Code::kInvalidArgument, "names expert 3 twice");
    refused(nullptr, 1, {0, 1}, Code::kInvalidArgument, "rows is null");
    refused(rows.data(), 3, {0, 1, 1, 2, 3, 1}, Code::kResourceExhausted, "expert 1 has more than");
    EXPECT_EQ(experts.wait(Work{}).code(), Code::kInvalidArgument);
    EXPECT_EQ(experts.wait(Work{1}).code(), Code::kInvalidArgument);
    EXPECT_EQ(experts.combine({}, weights, out.data(), out.size() * 4).code(),
              Code::kFailedPrecondition);

    // The round that follows is as if none of that had been.
    const std::vector<int32_t> chosen = {0, 3, 2, 1, -1, 3, -1, -1};
    const auto received = must(experts.dispatch(rows.data(), 4, chosen));
    EXPECT_EQ(experts.dispatch(rows.data(), 4, chosen).status().code(), Code::kFailedPrecondition);
    EXPECT_EQ(experts.wait(received.work).code(), Code::kInvalidArgument) << "it is over";
    for (const ExpertGroup& group : received.groups) {
      for (int slot = group.first; slot < group.first + group.count; ++slot) {
        std::fill_n(reinterpret_cast<float*>(received.output(slot)), 8, float(group.expert));
      }
    }
    const auto combine = [&](size_t some, size_t bytes) {
      return experts.combine(received, absl::MakeSpan(weights).first(some), out.data(), bytes);
    };
    EXPECT_EQ(combine(7, out.size() * 4).code(), Code::kInvalidArgument);
    EXPECT_EQ(combine(8, out.size() * 4 - 1).code(), Code::kInvalidArgument);
    EXPECT_EQ(experts.combine(received, weights, nullptr, out.size() * 4).code(),
              Code::kInvalidArgument);
    EXPECT_EQ(combine(8, out.size() * 4), absl::OkStatus());
    EXPECT_EQ(combine(8, out.size() * 4).code(), Code::kFailedPrecondition) << "a second time";
    EXPECT_EQ(out[0], 1.5f);
    EXPECT_EQ(out[8], 1.5f);
    EXPECT_EQ(out[16], 1.5f);
    EXPECT_EQ(out[24], 0.0f);
  });
}

TEST_P(ExpertsMisuse, CallsOutOfOrderAreErrors) {
  run_group(2, options(), [](Communicator& comm) {
    ExpertsOptions options = small();
    options.in_flight = 2;
    auto made = must(Experts::create(comm, options));
    Experts& experts = *made;
    const std::vector<float> rows(8, 1), weights(2, 1);
    std::vector<float> out(8);
    if (comm.rank() == 1) {
      ASSERT_EQ(comm.barrier(), absl::OkStatus());
    }
    const auto dispatch = must(experts.dispatch_async(rows.data(), 1, {0, 3}));
    const auto later = [&](uint64_t calls) { return Work{dispatch.sequence + calls}; };
    const auto no_dispatch = [&](Work work, const char* what) {
      EXPECT_EQ(experts.received(work).status().code(), Code::kFailedPrecondition) << what;
      EXPECT_EQ(experts.combine_async(work, weights, out.data(), 32).status().code(),
                Code::kFailedPrecondition)
          << what;
    };
    if (comm.rank() == 0) {  // the other has not begun
      no_dispatch(dispatch, "it runs");
      EXPECT_THAT(experts.wait(dispatch, Time(1)),
                  fails_with(Code::kDeadlineExceeded, {"still runs"}));
      EXPECT_EQ(experts.test(dispatch), std::nullopt);
      ASSERT_EQ(comm.barrier(), absl::OkStatus());
    }
    ASSERT_EQ(experts.wait(dispatch, patient(std::chrono::seconds(30))), absl::OkStatus());
    no_dispatch(Work{}, "no work");
    no_dispatch(later(1), "a combine");
    no_dispatch(later(2), "a round that has not begun");
    no_dispatch(later(4), "one in the same place");
    for (const Work work : {Work{}, dispatch, later(1), later(2), later(4)}) {
      EXPECT_EQ(experts.wait(work).code(), Code::kInvalidArgument) << work.sequence;
      EXPECT_EQ(experts.test(work)->code(), Code::kInvalidArgument) << work.sequence;
    }
    const auto received = must(experts.received(dispatch));
    Mixture(options, 2).answer(received);
    const auto combine = must(experts.combine_async(dispatch, weights, out.data(), 32));
    no_dispatch(combine, "a combine that runs");
    no_dispatch(dispatch, "it is combined");
    ASSERT_EQ(experts.wait(combine), absl::OkStatus());
    EXPECT_EQ(experts.wait(combine).code(), Code::kInvalidArgument);
    EXPECT_EQ(out[0], said(0, 1) + said(3, 1));
    EXPECT_THAT(experts.missing(later(2)), testing::IsEmpty());
  });
}

// Promise(collectives): A list of rows that no rank writes ends the Experts that it came to, with
//   DataLoss from then on | one is damaged when it has come, and before this rank looks
TEST_P(ExpertsMisuse, AListThatCannotBeEndsTheObject) {
  for (const bool blocks : {false, true}) {
    run_group(2, options(), [&](Communicator& comm) {
      auto experts = must(Experts::create(comm, small()));
      const std::vector<float> rows(8, 1), weights(2, 1);
      std::vector<float> out(8);
      const auto dispatch = [&] { return experts->dispatch(rows.data(), 1, {0, 3}); };
      const auto received = must(dispatch());
      auto* const window = received.outputs - Geometry(small(), comm.rank(), 2).outputs(0);
      ASSERT_EQ(experts->combine(received, weights, out.data(), 32), absl::OkStatus());
      if (comm.rank() == 0) {
        const Geometry geometry(small(), 0, 2);
        // A list begins with its round, of 8 bytes, which need not be aligned to 8.
        auto* const round =
            reinterpret_cast<uint32_t*>(window + geometry.rows_at(0, 1) - geometry.list_bytes(1));
        const std::atomic_ref<uint32_t> low(round[0]), high(round[1]);
        until([&] { return low.load() == 1; }, [&] { comm.progress(); });
        low = high = ~uint32_t{0};
        if (blocks) {
          EXPECT_TRUE(absl::IsDataLoss(dispatch().status()));
        }
        const auto work = experts->dispatch_async(rows.data(), 1, {0, 3});
        ASSERT_EQ(work.ok(), !blocks);
        if (work.ok()) {
          EXPECT_TRUE(absl::IsDataLoss(experts->wait(*work)));
          EXPECT_TRUE(absl::IsDataLoss(experts->test(*work).value_or(absl::OkStatus())));
        }
        EXPECT_TRUE(absl::IsDataLoss(experts->dispatch_async(rows.data(), 0, {}).status()));
        EXPECT_TRUE(absl::IsDataLoss(
            experts->combine_async(received.work, weights, out.data(), 32).status()));
      } else {
        EXPECT_TRUE(dispatch().ok());
      }
      EXPECT_EQ(comm.barrier(), absl::OkStatus());
    });
  }
}

TEST_P(ExpertsMisuse, MemoryOfADeviceIsRefused) {
  gpudirect::InstalledFake gpu;
  const auto device = gpu.fake().allocate(2 * gpudirect::kMiB);
  run_group(1, options(), [&](Communicator& comm) {
    auto experts = must(Experts::create(comm, small()));
    const std::vector<float> rows(8, 1), weights(2, 1);
    auto* const there = reinterpret_cast<void*>(uintptr_t{device});
    EXPECT_THAT(text(experts->dispatch(there, 1, {0, 3}).status()),
                HasSubstr("dispatch: rows is memory of a device"));
    const auto received = must(experts->dispatch(rows.data(), 1, {0, 3}));
    EXPECT_THAT(text(experts->combine(received, weights, there, 32)),
                HasSubstr("combine: out is memory of a device"));
  });
  gpu.fake().free(device);
}

TEST_P(ExpertsMisuse, MakingThemIsRefusedWhereTheGroupDoesOtherwise) {
  run_group(2, options(), [](Communicator& comm) {
    if (comm.rank() == 0) {
      EXPECT_THAT(Experts::create(comm, small()).status(),
                  fails_with(Code::kInvalidArgument, {"rank 1 called all_gather"}));
    } else {
      std::array<std::byte, 256> card{};
      std::array<std::byte, 512> all;
      EXPECT_EQ(comm.all_gather(card.data(), all.data(), card.size(), DataType::kU8),
                absl::OkStatus());
    }
    EXPECT_EQ(comm.barrier(), absl::OkStatus());
    auto own = must(comm.split(comm.rank(), 0));
    own->abort(absl::CancelledError("enough"));
    EXPECT_THAT(text(Experts::create(*own, small()).status()), HasSubstr("enough"));
  });
}

// The slots of a rank are read in its memory, where that is mapped.
TEST_P(ExpertsMisuse, SlotsThatCannotBeAreARankThatIsMissing) {
  if (std::string(GetParam()) != "shm") return;
  const Mixture mixture(small(), 2);
  run_group(2, options(), [&](Communicator& comm) {
    auto experts = must(Experts::create(comm, mixture.options()));
    Tokens tokens{.count = 1, .chosen = {0, 3}, .weights = {1, 1}};
    tokens.rows.assign(mixture.row_bytes(), std::byte{0});
    const auto received = must(experts->dispatch(tokens.rows.data(), tokens.count, tokens.chosen));
    const Geometry geometry(mixture.options(), comm.rank(), 2);
    auto* const window = received.outputs - geometry.outputs(0);
    if (comm.rank() == 1) std::memset(window + geometry.table(0, 0), 0xff, sizeof(uint32_t));
    const std::vector<int> gone = comm.rank() == 0 ? std::vector<int>{1} : std::vector<int>{};
    mixture.expect(tokens, gone);
    std::vector<std::byte> out;
    const auto back = must(mixture.combine(*experts, received.work, tokens, out));
    ASSERT_EQ(experts->wait(back), absl::OkStatus());
    EXPECT_EQ(experts->missing(back), gone);
    EXPECT_TRUE(same_bits(out, tokens.wanted));
  });
}

// Promise(collectives): A rank that leaves its Experts is masked by the others, which go on | its
//   tokens do not come, its experts add nothing, and missing() names it
TEST_P(ExpertsMisuse, ARankThatLeavesIsMissing) {
  ExpertsOptions three = small();
  three.experts = 6;
  const Mixture mixture(three, 3);
  run_group(3, options(), [&](Communicator& comm) {
    auto experts = must(Experts::create(comm, mixture.options()));
    std::mt19937_64 random(static_cast<uint64_t>(comm.rank()));
    for (int round = 0; round < 6; ++round) {
      const bool alone = round >= 2;
      if (alone && comm.rank() == 1) break;
      Tokens tokens = mixture.tokens(random);
      if (alone) mixture.expect(tokens, {1});
      const std::vector<int> gone = alone ? std::vector<int>{1} : std::vector<int>{};
      const auto received =
          must(experts->dispatch(tokens.rows.data(), tokens.count, tokens.chosen));
      EXPECT_EQ(experts->missing(received.work), gone);
      std::vector<std::byte> out;
      const auto work = must(mixture.combine(*experts, received.work, tokens, out));
      ASSERT_EQ(experts->wait(work), absl::OkStatus());
      EXPECT_EQ(experts->missing(work), gone);
      EXPECT_TRUE(same_bits(out, tokens.wanted)) << "round " << round;
    }
    experts = nullptr;
    EXPECT_EQ(comm.barrier(), absl::OkStatus());
  });
}

// Promise(collectives): Experts are destroyed at once with a round open, at some ranks or at all |
//   in dispatch, before combine and in it
TEST_P(ExpertsMisuse, AreDestroyedWithARoundOpen) {
  ExpertsOptions options = small();
  options.in_flight = 2;
  options.rank_timeout = patient(std::chrono::seconds(100));
  const Mixture mixture(options, 2);
  for (const int stage : {0, 1, 2}) {
    run_group(2, this->options(), [&](Communicator& comm) {
      auto experts = must(Experts::create(comm, options));
      std::mt19937_64 random(static_cast<uint64_t>(stage));
      const Tokens tokens = mixture.tokens(random), next = mixture.tokens(random);
      std::vector<std::byte> out(tokens.wanted.size());
      const auto round =
          must(experts->dispatch_async(tokens.rows.data(), tokens.count, tokens.chosen));
      if (stage > 0) {
        ASSERT_EQ(experts->wait(round), absl::OkStatus());
        must(experts->dispatch_async(next.rows.data(), next.count, next.chosen));
      }
      if (stage > 1) {
        must(experts->combine_async(round, tokens.weights, out.data(), out.size()));
      }
      const Time began = Clock::steady().now();
      experts = nullptr;
      EXPECT_LT(Clock::steady().now() - began, options.rank_timeout / 2);
      EXPECT_EQ(comm.barrier(), absl::OkStatus());
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Providers, ExpertsMisuse, testing::Values("shm", "tcp", "verbs_fake"),
                         [](const auto& param) { return param.param; });

}  // namespace
}  // namespace baton
