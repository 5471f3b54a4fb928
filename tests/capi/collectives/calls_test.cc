// Calls in C: every kind, their works and callbacks, and what makes no sense.
#include "tests/capi/collectives/ranks.h"

namespace baton::capi {
namespace {

using ::testing::AnyOf;
using ::testing::HasSubstr;

INSTANTIATE_TEST_SUITE_P(Over, CollectivesInC, ::testing::Values("shm", "tcp"),
                         [](const auto& test) { return std::string(test.param); });

// Promise(collectives): A program in C has every collective call, with the numbers and the errors
//   of the library | one call with a versioned struct
TEST_P(CollectivesInC, EveryKindGivesWhatTheHeaderSays) {
  constexpr int kRanks = 3;
  constexpr int32_t kCount = 5, kRoot = 1;
  run_ranks(
      kRanks,
      [](Rank& self) {
        const int32_t r = self.rank;
        const std::vector<int32_t> own = numbers(kCount, 100 * r);
        const std::vector<int32_t> all = numbers(size_t{kCount} * kRanks, 1000 * r);
        std::vector<int32_t> out(kCount), big(size_t{kCount} * kRanks);
        const auto run = [&](baton_call call) {
          ASSERT_EQ(self.run(call), BATON_OK) << call.kind << ": " << self.error.text;
        };
        run(call_of(BATON_ALL_REDUCE, own.data(), out.data(), kCount));
        for (int i = 0; i < kCount; ++i) EXPECT_EQ(out[i], 300 + 3 * i);
        run(call_of(BATON_REDUCE_SCATTER, all.data(), out.data(), kCount));
        for (int i = 0; i < kCount; ++i) EXPECT_EQ(out[i], 3000 + 3 * (kCount * r + i));
        run(call_of(BATON_ALL_GATHER, own.data(), big.data(), kCount));
        for (int i = 0; i < kCount * kRanks; ++i) {
          EXPECT_EQ(big[i], 100 * (i / kCount) + i % kCount);
        }
        std::vector<int32_t> cast = own;
        run(call_of(BATON_BROADCAST, cast.data(), cast.data(), kCount, kRoot));
        EXPECT_EQ(cast, numbers(kCount, 100 * kRoot));
        baton_call reduce = call_of(BATON_REDUCE, own.data(), out.data(), kCount, kRoot);
        reduce.op = BATON_MAX;
        run(reduce);
        if (r == kRoot) {
          EXPECT_EQ(out, numbers(kCount, 200));
        }
        run(call_of(BATON_ALL_TO_ALL, all.data(), big.data(), kCount));
        for (int i = 0; i < kCount * kRanks; ++i) {
          EXPECT_EQ(big[i], 1000 * (i / kCount) + kCount * r + i % kCount);
        }
        run(call_of(BATON_BARRIER, nullptr, nullptr, 0));
        run(call_of(BATON_SCATTER, all.data(), out.data(), kCount, kRoot));
        EXPECT_EQ(out, numbers(kCount, 1000 * kRoot + kCount * r));
        run(call_of(BATON_GATHER, own.data(), big.data(), kCount, kRoot));
        if (r == kRoot) {
          for (int i = 0; i < kCount * kRanks; ++i) {
            EXPECT_EQ(big[i], 100 * (i / kCount) + i % kCount);
          }
        }
        // Rank r's block has r + 1 elements; the blocks lie apart.
        const size_t counts[kRanks] = {1, 2, 3}, apart[kRanks] = {0, 4, 8};
        std::vector<int32_t> wide(12, -1);
        baton_call gather = call_of(BATON_ALL_GATHER_V, own.data(), wide.data(), 0);
        gather.out_counts = counts;
        gather.out_offsets = apart;
        run(gather);
        EXPECT_EQ(wide, (std::vector<int32_t>{0, -1, -1, -1, 100, 101, -1, -1, 200, 201, 202, -1}));
        const std::vector<int32_t> ones(12, r + 1);
        std::vector<int32_t> mine(4, -1);
        baton_call scatter = call_of(BATON_REDUCE_SCATTER_V, ones.data(), mine.data(), 0);
        scatter.in_counts = counts;
        scatter.in_offsets = apart;
        run(scatter);
        for (int i = 0; i < 4; ++i) EXPECT_EQ(mine[i], i <= r ? 6 : -1);
        // Rank r sends s + 1 elements to rank s.
        const size_t from_each[kRanks] = {counts[r], counts[r], counts[r]};
        baton_call exchange = call_of(BATON_ALL_TO_ALL_V, all.data(), wide.data(), 0);
        exchange.in_counts = counts;
        exchange.in_offsets = apart;
        exchange.out_counts = from_each;
        exchange.out_offsets = apart;
        run(exchange);
        for (int s = 0; s < kRanks; ++s) {
          for (int i = 0; i <= r; ++i) EXPECT_EQ(wide[4 * s + i], 1000 * s + 4 * r + i);
        }
        baton_call receive =
            call_of(BATON_RECEIVE, nullptr, out.data(), kCount, (r + kRanks - 1) % kRanks);
        baton_call send = call_of(BATON_SEND, own.data(), nullptr, kCount, (r + 1) % kRanks);
        const baton_work receiving = self.start(receive);
        run(send);
        EXPECT_EQ(baton_work_wait(self.comm, receiving, kLong, &self.error), BATON_OK)
            << self.error.text;
        EXPECT_EQ(out, numbers(kCount, 100 * receive.peer));
      },
      GetParam());
}

TEST_P(CollectivesInC, StatsSayAllThatTheLibraryCounts) {
  run_ranks(
      2,
      [](Rank& self) {
        std::vector<int32_t> data(100'000, 1);
        EXPECT_EQ(self.run(call_of(BATON_ALL_REDUCE, data.data(), data.data(), data.size())),
                  BATON_OK)
            << self.error.text;
        baton_comm_stats stats{};
        stats.size = sizeof stats;
        ASSERT_EQ(baton_comm_get_stats(self.comm, &stats, &self.error), BATON_OK);
        EXPECT_GE(stats.calls, 1u);
        EXPECT_GT(stats.messages, 0u);
        EXPECT_EQ(stats.link_bytes > 0, std::string(GetParam()) == "tcp") << stats.link_bytes;
        EXPECT_EQ(self.run(call_of(BATON_BARRIER, nullptr, nullptr, 0)), BATON_OK);
      },
      GetParam());
}

// --- works ---

// Promise(collectives): The number of a call is told its end once, and is never another call's |
//   it holds which communicator's it is
TEST(CollectivesOfC, AWorkIsToldOnceAndIsOfOneCommunicator) {
  run_ranks(1, [](Rank& self) {
    run_ranks(1, [&](Rank& other) {
      const baton_work work = self.start(call_of(BATON_BARRIER, nullptr, nullptr, 0));
      EXPECT_EQ(baton_work_wait(other.comm, work, kLong, &other.error), BATON_ERR_NOT_FOUND);
      EXPECT_THAT(other.error.text, HasSubstr("no work of this communicator"));
      EXPECT_EQ(baton_work_wait(self.comm, work, kLong, &self.error), BATON_OK);
      EXPECT_EQ(baton_work_wait(self.comm, work, kLong, &self.error), BATON_ERR_NOT_FOUND);
      EXPECT_EQ(baton_work_test(self.comm, work, &self.error), BATON_ERR_NOT_FOUND);
      EXPECT_EQ(baton_work_test(self.comm, 0, &self.error), BATON_ERR_NOT_FOUND);
      int32_t source = 7;
      EXPECT_EQ(baton_work_source(self.comm, work, &source, &self.error), BATON_ERR_NOT_FOUND);
      EXPECT_EQ(source, -1);
    });
  });
}

TEST(CollectivesOfC, ACallThatRunsOutOfTimeIsCanceledAndSaysWhatItWaitedFor) {
  std::atomic<bool> over{false};
  run_ranks(2, [&](Rank& self) {
    if (self.rank == 1) {
      until([&] { return over.load(); }, [&] { baton_comm_state(self.comm, nullptr); });
      return;
    }
    baton_call call = call_of(BATON_BARRIER, nullptr, nullptr, 0);
    call.timeout = 20'000'000;
    const int32_t result = self.run(call);
    EXPECT_THAT(result, AnyOf(BATON_ERR_CANCELED, BATON_ERR_REMOTE_DISCONNECT));
    EXPECT_THAT(self.error.text, HasSubstr("rank 1"));
    EXPECT_THAT(self.error.text, HasSubstr("barrier #"));
    EXPECT_EQ(baton_comm_state(self.comm, &self.error), result);
    self.start(call, result);  // as all that come after
    over = true;
  });
}

struct Ends {
  std::atomic<int> count{0};
  std::atomic<int32_t> result{1};
  std::atomic<baton_work> work{0};
  static void on_end(void* context, baton_work work, int32_t result, const char* text) {
    auto& self = *static_cast<Ends*>(context);
    self.result = result;
    self.work = work;
    EXPECT_EQ(result == BATON_OK, *text == 0) << text;
    ++self.count;
  }
};

TEST(CollectivesOfC, EndsAreToldToCallbacks) {
  run_ranks(2, [](Rank& self) {
    Ends told, alone;
    int32_t one = 1, two = 2;
    baton_call call = call_of(BATON_ALL_REDUCE, &one, &one, 1);
    call.on_end = Ends::on_end;
    call.context = &told;
    const baton_work work = self.start(call);
    EXPECT_EQ(baton_work_wait(self.comm, work, kLong, &self.error), BATON_OK) << self.error.text;
    EXPECT_EQ(told.count, 1);
    EXPECT_EQ(told.work, work);
    EXPECT_EQ(told.result, BATON_OK);
    EXPECT_EQ(one, 2);
    // More than have room at a time: the number of a detached call is gone when it has ended.
    call.in = call.out = &two;
    call.flags = BATON_CALL_DETACHED;
    call.context = &alone;
    for (int i = 0; i < 600; ++i) {
      ASSERT_EQ(baton_comm_start(self.comm, &call, nullptr, &self.error), BATON_OK)
          << self.error.text;
      if (i % 100 == 99) {
        until([&] { return alone.count == i + 1; },
              [&] { baton_work_test(self.comm, work, nullptr); });
      }
    }
    EXPECT_EQ(alone.result, BATON_OK);
    EXPECT_EQ(self.run(call_of(BATON_BARRIER, nullptr, nullptr, 0)), BATON_OK) << self.error.text;
  });
}

// Promise(collectives): A communicator of C that is destroyed with calls in flight ends them, tells
//   their callbacks, and its peers hear of it | their ends are canceled before the function returns
TEST(CollectivesOfC, DestroyingWithCallsInFlightEndsThem) {
  std::atomic<bool> left{false};
  run_ranks(2, [&](Rank& self) {
    int32_t word = 0;
    baton_call call =
        call_of(BATON_RECEIVE, nullptr, &word, 1, 1 - self.rank);  // that nothing sends
    if (self.rank == 1) {
      until([&] { return left.load(); });
      EXPECT_THAT(self.run(call), AnyOf(BATON_ERR_REMOTE_DISCONNECT, BATON_ERR_CANCELED));
      EXPECT_THAT(self.error.text, HasSubstr("rank 0"));
      return;
    }
    Ends told;
    call.on_end = Ends::on_end;
    call.context = &told;
    self.start(call);
    baton_comm_destroy(std::exchange(self.comm, nullptr));
    EXPECT_EQ(told.count, 1);
    EXPECT_EQ(told.result, BATON_ERR_CANCELED);
    left = true;
  });
}

// --- bad input ---

TEST(CollectivesOfC, WhatMakesNoSenseIsRefusedAndBreaksNothing) {
  run_ranks(2, [](Rank& self) {
    int32_t words[8] = {1, 1, 1, 1, 1, 1, 1, 1};
    const size_t counts[2] = {1, 1};
    const auto refused = [&](const char* what, const std::function<void(baton_call&)>& change) {
      baton_call call = call_of(BATON_ALL_REDUCE, words, words, 2);
      change(call);
      baton_work work = 5;
      EXPECT_EQ(baton_comm_start(self.comm, &call, &work, &self.error), BATON_ERR_INVALID_PARAM)
          << what;
      EXPECT_EQ(work, 0U) << what;
      EXPECT_NE(*self.error.text, 0) << what;
    };
    refused("no size", [](baton_call& call) { call.size = 0; });
    refused("a size in the middle of a field", [](baton_call& call) { call.size = 41; });
    for (const int32_t number : {-1, 14, 1 << 20}) {
      refused("kind", [&](baton_call& call) { call.kind = number; });
      refused("type", [&](baton_call& call) { call.type = number; });
      refused("op", [&](baton_call& call) { call.op = number; });
      refused("root", [&](baton_call& call) { call.kind = BATON_BROADCAST, call.peer = number; });
      refused("to", [&](baton_call& call) { call.kind = BATON_SEND, call.peer = number; });
    }
    refused("to itself", [&](baton_call& call) { call.kind = BATON_SEND, call.peer = self.rank; });
    refused("in", [](baton_call& call) { call.in = nullptr; });
    refused("out", [](baton_call& call) { call.out = nullptr; });
    refused("count", [](baton_call& call) { call.count = SIZE_MAX / 2; });
    refused("overlap", [&](baton_call& call) { call.out = words + 1; });
    refused("alignment",
            [&](baton_call& call) { call.in = call.out = reinterpret_cast<char*>(words) + 1; });
    for (const int32_t kind : {BATON_ALL_TO_ALL_V, BATON_ALL_GATHER_V, BATON_REDUCE_SCATTER_V}) {
      refused("no counts", [&](baton_call& call) { call.kind = kind; });
      refused("counts without offsets", [&](baton_call& call) {
        call.kind = kind;
        call.in_counts = call.out_counts = counts;
      });
    }
    refused("bits of floats", [](baton_call& call) { call.type = BATON_F32, call.op = BATON_XOR; });
    refused("no factor", [](baton_call& call) { call.op = BATON_PREMUL_SUM; });
    const baton_call good = call_of(BATON_ALL_REDUCE, words, words, 2);
    EXPECT_EQ(baton_comm_start(self.comm, &good, nullptr, &self.error), BATON_ERR_INVALID_PARAM);
    EXPECT_EQ(baton_comm_start(nullptr, &good, nullptr, nullptr), BATON_ERR_INVALID_PARAM);
    EXPECT_EQ(baton_comm_start(self.comm, nullptr, nullptr, nullptr), BATON_ERR_INVALID_PARAM);
    EXPECT_EQ(self.run(good), BATON_OK) << self.error.text;
    EXPECT_EQ(words[0], 2);
  });
}

TEST(CollectivesOfC, StructsOfOlderHeadersAreTaken) {
  run_ranks(1, [](Rank& self) {
    int32_t words[2] = {1, 2}, out[2] = {};
    baton_call call;
    std::memset(&call, 0xff, sizeof call);  // what is behind the size is not the library's to read
    const baton_call known = call_of(BATON_ALL_REDUCE, words, out, 2);
    std::memcpy(&call, &known, offsetof(baton_call, in_counts));
    call.size = offsetof(baton_call, in_counts);
    EXPECT_EQ(self.run(call), BATON_OK) << self.error.text;
    EXPECT_EQ(out[1], 2);
    baton_comm_stats stats;
    std::memset(&stats, 0xff, sizeof stats);
    stats.size = offsetof(baton_comm_stats, messages);
    EXPECT_EQ(baton_comm_get_stats(self.comm, &stats, &self.error), BATON_OK) << self.error.text;
    EXPECT_GT(stats.calls, 0U);
    EXPECT_LT(stats.calls, UINT64_MAX);
    EXPECT_EQ(stats.messages, UINT64_MAX);
  });
}

TEST(CollectivesOfC, NothingIsRefusedEverywhere) {
  baton_error error = BATON_ERROR_INIT;
  baton_bytes bytes{};
  baton_comm* comm = nullptr;
  baton_endpoint* endpoint = nullptr;
  baton_rendezvous* server = nullptr;
  baton_handle handle{};
  void* memory = nullptr;
  baton_work work = 0;
  size_t count = 0;
  int32_t number = 0;
  baton_comm_stats stats{sizeof stats, 0, 0, 0, 0, 0, 0, 0};
  const int32_t results[] = {baton_endpoint_open(nullptr, nullptr, &error),
                             baton_endpoint_handle(nullptr, &handle, &error),
                             baton_endpoint_allocate(nullptr, 1, &memory, &error),
                             baton_endpoint_free(nullptr, memory, &error),
                             baton_rendezvous_open(nullptr, 0, nullptr, nullptr, &bytes, &error),
                             baton_rendezvous_open("nowhere", 0, nullptr, &server, &bytes, &error),
                             baton_place_from_environment(nullptr, &bytes, &error),
                             baton_comm_meet(nullptr, nullptr, nullptr, &comm, &error),
                             baton_comm_create(nullptr, &handle, 1, nullptr, &comm, &error),
                             baton_comm_split(nullptr, 0, 0, nullptr, &comm, &error),
                             baton_comm_subgroup(nullptr, nullptr, 0, nullptr, &comm, &error),
                             baton_comm_reconfigure(nullptr, &handle, 1, 1, 0, &work, &error),
                             baton_comm_shrink(nullptr, &comm, &error),
                             baton_comm_endpoint(nullptr, &endpoint, &error),
                             baton_comm_handles(nullptr, &handle, 1, &count, &error),
                             baton_comm_state(nullptr, &error),
                             baton_comm_wait_ready(nullptr, 0, &error),
                             baton_comm_abort(nullptr, nullptr, &error),
                             baton_comm_lost(nullptr, nullptr, 0, &count, &error),
                             baton_comm_explain(nullptr, 0, 0, &bytes, &error),
                             baton_comm_routes(nullptr, &bytes, &error),
                             baton_comm_flight_record(nullptr, &bytes, &error),
                             baton_comm_get_stats(nullptr, &stats, &error),
                             baton_work_wait(nullptr, 1, 0, &error),
                             baton_work_test(nullptr, 1, &error),
                             baton_work_source(nullptr, 1, &number, &error)};
  for (size_t i = 0; i < std::size(results); ++i) {
    EXPECT_EQ(results[i], BATON_ERR_INVALID_PARAM) << i;
  }
  EXPECT_EQ(baton_comm_rank(nullptr), -1);
  EXPECT_EQ(baton_comm_ranks(nullptr), -1);
  EXPECT_EQ(baton_endpoint_event_fd(nullptr), -1);
  EXPECT_EQ(baton_endpoint_progress(nullptr), 0);
  EXPECT_EQ(bytes.data, nullptr);
  baton_comm_destroy(nullptr);
  baton_endpoint_close(nullptr);
  baton_rendezvous_close(nullptr);
}

}  // namespace
}  // namespace baton::capi
