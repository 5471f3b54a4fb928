// Collectives in C: ranks as threads of the test, each with a communicator of its own.
#include <baton/collectives.h>
#include <baton/experts.h>
#include <dirent.h>
#include <poll.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <atomic>
#include <functional>
#include <latch>
#include <numeric>
#include <thread>

#include "tests/temporary_folder.h"
#include "tests/test.h"
#include "tests/until.h"

namespace {

using baton::until;
using ::testing::AnyOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr int64_t kLong = 60'000'000'000;

struct Rank {
  ~Rank() { baton_comm_destroy(comm); }
  baton_work start(const baton_call& call, int32_t expected = BATON_OK) {
    baton_work work = 0;
    EXPECT_EQ(baton_comm_start(comm, &call, &work, &error), expected) << error.text;
    return work;
  }
  int32_t run(const baton_call& call) {
    const baton_work work = start(call);
    return baton_work_wait(comm, work, kLong, &error);
  }
  baton_comm* comm = nullptr;
  int32_t rank = 0, ranks = 1;
  baton_error error = BATON_ERROR_INIT;
};

baton_call call_of(int32_t kind, const void* in, void* out, size_t count, int32_t peer = 0) {
  baton_call call = BATON_CALL_INIT;
  call.kind = kind;
  call.type = BATON_I32;
  call.in = in;
  call.out = out;
  call.count = count;
  call.peer = peer;
  return call;
}

// body(rank) on a thread for each.
void run_ranks(int ranks, const std::function<void(Rank&)>& body, const char* provider = "shm",
               uint8_t background = 0) {
  baton_rendezvous* server = nullptr;
  baton_bytes address{};
  baton_error error = BATON_ERROR_INIT;
  ASSERT_EQ(baton_rendezvous_open(nullptr, 0, nullptr, &server, &address, &error), BATON_OK)
      << error.text;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank) {
    threads.emplace_back([&, rank] {
      Rank self;
      self.rank = rank;
      self.ranks = ranks;
      baton_place place = BATON_PLACE_INIT;
      place.rank = rank;
      place.ranks = ranks;
      place.rendezvous = address.data;
      baton_endpoint_options options;
      baton_endpoint_options_init(&options, sizeof options);
      options.providers = provider;
      options.background = background;
      baton_endpoint* endpoint = nullptr;
      ASSERT_EQ(baton_endpoint_open(&options, &endpoint, &self.error), BATON_OK) << self.error.text;
      const int32_t met = baton_comm_meet(endpoint, &place, nullptr, &self.comm, &self.error);
      baton_endpoint_close(endpoint);  // the communicator goes on
      ASSERT_EQ(met, BATON_OK) << self.error.text;
      body(self);
    });
  }
  for (std::thread& thread : threads) thread.join();
  baton_rendezvous_close(server);
  baton_bytes_free(&address);
}

std::vector<int32_t> numbers(size_t count, int32_t from) {
  std::vector<int32_t> out(count);
  std::iota(out.begin(), out.end(), from);
  return out;
}

// --- every kind gives what the header says ---

struct CollectivesInC : ::testing::TestWithParam<const char*> {};
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

// Promise(collectives): A program in C puts, gets and signals, and hears of what makes no sense |
//   one struct with its kind, ended as every call is
TEST_P(CollectivesInC, WindowsPutGetAndSignal) {
  run_ranks(
      2,
      [](Rank& self) {
        baton_error& error = self.error;
        const int32_t other = 1 - self.rank;
        baton_window* window = nullptr;
        ASSERT_EQ(baton_window_create(self.comm, nullptr, 4000, 2, kLong, &window, &error),
                  BATON_OK)
            << error.text;
        const auto run = [&](int32_t kind, void* data, uint64_t bytes, uint64_t offset,
                             uint64_t value, uint32_t slot = 1) {
          baton_access access = BATON_ACCESS_INIT;
          access.kind = kind;
          access.rank = other;
          access.data = data;
          access.bytes = bytes;
          access.offset = offset;
          access.value = value;
          access.slot = slot;
          baton_work work = 77;
          const int32_t started = baton_window_start(window, &access, &work, &error);
          EXPECT_EQ(work == 0, started != BATON_OK);
          return started != BATON_OK ? started : baton_work_wait(self.comm, work, kLong, &error);
        };
        std::vector<int32_t> sent = numbers(1000, 1000 * self.rank), got(1000);
        EXPECT_EQ(run(BATON_PUT, sent.data(), 4000, 0, 0), BATON_OK) << error.text;
        EXPECT_EQ(run(BATON_PUT, sent.data(), 4, 0, 5), BATON_OK) << error.text;
        EXPECT_EQ(run(BATON_SIGNAL, nullptr, 0, 0, 2), BATON_OK) << error.text;
        EXPECT_EQ(run(BATON_FLUSH, nullptr, 0, 0, 0), BATON_OK) << error.text;
        EXPECT_EQ(run(BATON_WAIT_SIGNAL, nullptr, 0, 0, 7), BATON_OK) << error.text;
        uint64_t value = 0, bytes = 0;
        EXPECT_EQ(baton_window_signal_value(window, other, 1, &value, &error), BATON_OK);
        EXPECT_EQ(value, 7u);
        const void* data = nullptr;
        ASSERT_EQ(baton_window_view(window, self.rank, &data, &bytes, &error), BATON_OK);
        ASSERT_EQ(bytes, 4000u);
        EXPECT_EQ(std::memcmp(data, numbers(1000, 1000 * other).data(), 4000), 0);
        EXPECT_EQ(run(BATON_GET, got.data(), 4000, 0, 0), BATON_OK) << error.text;
        EXPECT_EQ(got, sent);
        const int32_t viewed = baton_window_view(window, other, &data, &bytes, &error);
        EXPECT_EQ(viewed, std::string(GetParam()) == "shm" ? BATON_OK : BATON_ERR_NOT_SUPPORTED)
            << error.text;
        EXPECT_EQ(baton_window_bytes(window, other, &bytes, &error), BATON_OK);
        EXPECT_EQ(bytes, 4000u);
        // What makes no sense.
        baton_window* none = window;
        for (const int32_t bad :
             {run(BATON_PUT, sent.data(), 1, 4000, 0), run(BATON_GET, got.data(), 4001, 0, 0),
              run(BATON_SIGNAL, nullptr, 0, 0, 1, 2), run(BATON_SIGNAL, nullptr, 0, 0, 0),
              run(99, nullptr, 0, 0, 1), baton_window_start(window, nullptr, nullptr, &error),
              baton_window_start(nullptr, nullptr, nullptr, &error),
              baton_window_create(self.comm, nullptr, 1, 0, 0, &none, &error),
              baton_window_create(nullptr, nullptr, 1, 1, 0, &none, &error)}) {
          EXPECT_EQ(bad, BATON_ERR_INVALID_PARAM) << error.text;
        }
        EXPECT_EQ(none, nullptr);
        EXPECT_EQ(self.run(call_of(BATON_BARRIER, nullptr, nullptr, 0)), BATON_OK);
        baton_window_destroy(window);
        baton_window_destroy(nullptr);
      },
      GetParam());
}

// Promise(collectives): A program in C dispatches rows to experts and combines what they say, and
//   hears of what makes no sense | the library's, over plain structs
TEST_P(CollectivesInC, ExpertsDispatchAndCombine) {
  run_ranks(
      2,
      [](Rank& self) {
        baton_error& error = self.error;
        baton_experts_options options = BATON_EXPERTS_OPTIONS_INIT;
        options.experts = 4, options.top_k = 2, options.hidden = 3, options.max_tokens = 5;
        options.type = BATON_F32;
        baton_experts* experts = nullptr;
        ASSERT_EQ(baton_experts_create(self.comm, &options, &experts, &error), BATON_OK)
            << error.text;
        const float rows[6] = {1, 2, 3, 4, 5, 6};
        const int32_t chosen[4] = {3, 0, 2, -1};
        const float weights[4] = {0.5f, 2, 1, 99};
        float out[6] = {};
        baton_work work = 0, back = 0;
        ASSERT_EQ(baton_experts_dispatch(experts, rows, 2, chosen, 4, &work, &error), BATON_OK)
            << error.text;
        ASSERT_EQ(baton_experts_wait(experts, work, kLong, &error), BATON_OK) << error.text;
        baton_expert_rows in = BATON_EXPERT_ROWS_INIT;
        ASSERT_EQ(baton_experts_received(experts, work, &in, &error), BATON_OK) << error.text;
        ASSERT_EQ(in.group_count, 2u);
        EXPECT_EQ(in.slots, self.rank == 0 ? 2u : 4u);
        for (uint64_t g = 0; g < in.group_count; ++g) {
          const baton_expert_group& group = in.groups[g];
          EXPECT_EQ(group.expert, 2 * self.rank + static_cast<int32_t>(g));
          for (int32_t slot = group.first; slot < group.first + group.count; ++slot) {
            const auto* row = reinterpret_cast<const float*>(static_cast<const char*>(in.rows) +
                                                             in.row_of[slot] * in.row_stride);
            auto* said = reinterpret_cast<float*>(static_cast<char*>(in.outputs) +
                                                  static_cast<uint64_t>(slot) * in.output_stride);
            for (int i = 0; i < 3; ++i) said[i] = row[i] * static_cast<float>(group.expert + 1);
          }
        }
        ASSERT_EQ(baton_experts_combine(experts, work, weights, 4, out, sizeof out, &back, &error),
                  BATON_OK)
            << error.text;
        int32_t ended = BATON_IN_PROGRESS;
        until([&] { return (ended = baton_experts_test(experts, back, &error)) != 1; });
        EXPECT_EQ(ended, BATON_OK) << error.text;
        EXPECT_THAT(out, testing::ElementsAre(4, 8, 12, 12, 15, 18));  // 0.5 * 4 + 2 * 1; 1 * 3
        size_t count = 7;
        EXPECT_EQ(baton_experts_missing(experts, back, nullptr, 0, &count, &error), BATON_OK);
        EXPECT_EQ(count, 0u);
        // What makes no sense.
        baton_experts* none = experts;
        for (const int32_t bad :
             {baton_experts_dispatch(experts, rows, -1, chosen, 4, &work, &error),
              baton_experts_dispatch(experts, rows, 2, nullptr, 4, &work, &error),
              baton_experts_dispatch(experts, rows, 2, chosen, 3, &work, &error),
              baton_experts_dispatch(experts, nullptr, 2, chosen, 4, &work, &error),
              baton_experts_dispatch(nullptr, rows, 2, chosen, 4, &work, &error),
              baton_experts_wait(experts, back, 0, &error),
              baton_experts_wait(experts, 0, 0, &error),
              baton_experts_create(self.comm, nullptr, &none, &error),
              baton_experts_create(nullptr, &options, &none, &error)}) {
          EXPECT_EQ(bad, BATON_ERR_INVALID_PARAM) << error.text;
        }
        EXPECT_EQ(baton_experts_combine(experts, 1, weights, 4, out, sizeof out, &back, &error),
                  BATON_ERR_NOT_ALLOWED)
            << error.text;
        EXPECT_EQ(none, nullptr);
        baton_experts_destroy(experts);
        baton_experts_destroy(nullptr);
      },
      GetParam());
}

TEST_P(CollectivesInC, AnEmptyWindowNeedsNoMemory) {
  run_ranks(
      2,
      [](Rank& self) {
        baton_error& error = self.error;
        const bool none = self.rank == 1;
        std::vector<int32_t> mine(4, 7), got(4);
        baton_window* window = nullptr;
        ASSERT_EQ(baton_window_create(self.comm, none ? nullptr : mine.data(), none ? 0 : 16, 1,
                                      kLong, &window, &error),
                  BATON_OK)
            << error.text;
        uint64_t bytes = 77;
        EXPECT_EQ(baton_window_bytes(window, 1, &bytes, &error), BATON_OK);
        EXPECT_EQ(bytes, 0u);
        baton_access access = BATON_ACCESS_INIT;
        access.kind = BATON_GET;
        access.rank = 1 - self.rank;
        access.data = got.data();
        access.bytes = 16;
        baton_work work = 0;
        const int32_t started = baton_window_start(window, &access, &work, &error);
        EXPECT_EQ(started, none ? BATON_OK : BATON_ERR_INVALID_PARAM) << error.text;
        if (none) {
          EXPECT_EQ(baton_work_wait(self.comm, work, kLong, &error), BATON_OK) << error.text;
          EXPECT_EQ(got, mine = std::vector<int32_t>(4, 7));
        }
        EXPECT_EQ(self.run(call_of(BATON_BARRIER, nullptr, nullptr, 0)), BATON_OK);
        baton_window_destroy(window);
      },
      GetParam());
}

// Promise(collectives): A program in C waits for several calls as one | as
//   Communicator::group_begin(), with the numbers and errors of the library
TEST_P(CollectivesInC, AGroupOfCallsIsOneWork) {
  run_ranks(
      3,
      [](Rank& self) {
        baton_error& error = self.error;
        const int32_t right = (self.rank + 1) % 3, left = (self.rank + 2) % 3;
        const std::vector<int32_t> mine(1000, self.rank);
        std::vector<int32_t> theirs(1000, -1);
        baton_work group = 0, joined = 0, receiving = 0;
        ASSERT_EQ(baton_comm_group_begin(self.comm, &group, &error), BATON_OK) << error.text;
        ASSERT_NE(group, 0u);
        baton_call send = call_of(BATON_SEND, mine.data(), nullptr, 1000, right);
        baton_call receive = call_of(BATON_RECEIVE, nullptr, theirs.data(), 1000, BATON_ANY_RANK);
        send.group = receive.group = group;
        joined = self.start(send);
        receiving = self.start(receive);
        EXPECT_EQ(baton_work_test(self.comm, group, &error), BATON_ERR_NOT_ALLOWED) << error.text;
        ASSERT_EQ(baton_comm_group_end(self.comm, group, &error), BATON_OK) << error.text;
        EXPECT_EQ(baton_work_wait(self.comm, group, kLong, &error), BATON_OK) << error.text;
        EXPECT_EQ(theirs, std::vector<int32_t>(1000, left));
        int32_t source = -1;
        EXPECT_EQ(baton_work_source(self.comm, receiving, &source, &error), BATON_OK) << error.text;
        EXPECT_EQ(source, left);
        EXPECT_EQ(baton_work_wait(self.comm, joined, kLong, &error), BATON_ERR_NOT_FOUND);
        // What makes no sense, and breaks nothing.
        send.group = group + 1000;
        baton_stream stream = {0, nullptr};
        for (const int32_t bad : {baton_comm_start(self.comm, &send, &joined, &error),
                                  baton_comm_group_end(self.comm, group, &error),
                                  baton_comm_group_end(self.comm, 0, &error),
                                  baton_comm_group_begin(self.comm, nullptr, &error),
                                  baton_comm_group_begin(nullptr, &group, &error),
                                  baton_work_hold(self.comm, group, nullptr, &error)}) {
          EXPECT_EQ(bad, BATON_ERR_INVALID_PARAM) << error.text;
        }
        EXPECT_LT(baton_work_hold(self.comm, group, &stream, &error), 0);
        EXPECT_EQ(self.run(call_of(BATON_BARRIER, nullptr, nullptr, 0)), BATON_OK) << error.text;
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

TEST(CollectivesOfC, FactorsTagsAndSources) {
  run_ranks(2, [](Rank& self) {
    const float own[2] = {1, 2}, factor = self.rank == 0 ? 10.0f : 0.5f;
    float sum[2] = {};
    baton_call call = call_of(BATON_ALL_REDUCE, own, sum, 2);
    call.type = BATON_F32;
    call.op = BATON_PREMUL_SUM;
    call.factor = &factor;
    EXPECT_EQ(self.run(call), BATON_OK) << self.error.text;
    EXPECT_EQ(sum[1], 21.0f);
    if (self.rank == 0) {  // the second message is taken first
      int32_t words[2] = {5, 6};
      baton_call first = call_of(BATON_SEND, &words[0], nullptr, 1, 1);
      baton_call second = call_of(BATON_SEND, &words[1], nullptr, 1, 1);
      first.tag = 1;
      second.tag = 2;
      const baton_work one = self.start(first), two = self.start(second);
      EXPECT_EQ(baton_work_wait(self.comm, two, kLong, &self.error), BATON_OK) << self.error.text;
      EXPECT_EQ(baton_work_wait(self.comm, one, kLong, &self.error), BATON_OK) << self.error.text;
    } else {
      for (const int32_t tag : {2, 1}) {
        int32_t word = 0;
        baton_call receive = call_of(BATON_RECEIVE, nullptr, &word, 1, BATON_ANY_RANK);
        receive.tag = tag;
        const baton_work work = self.start(receive);
        EXPECT_EQ(baton_work_wait(self.comm, work, kLong, &self.error), BATON_OK)
            << self.error.text;
        EXPECT_EQ(word, tag == 2 ? 6 : 5);
        int32_t source = -1;
        EXPECT_EQ(baton_work_source(self.comm, work, &source, &self.error), BATON_OK)
            << self.error.text;
        EXPECT_EQ(source, 0);
      }
    }
  });
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

TEST(CollectivesOfC, AWaitThatRunsOutLeavesTheCall) {
  std::atomic<bool> asked{false};
  run_ranks(2, [&](Rank& self) {
    if (self.rank == 1) until([&] { return asked.load(); });
    const baton_work work = self.start(call_of(BATON_BARRIER, nullptr, nullptr, 0));
    if (self.rank == 0) {
      EXPECT_EQ(baton_work_wait(self.comm, work, 1000, &self.error), BATON_ERR_TIMEOUT);
      EXPECT_EQ(baton_work_test(self.comm, work, &self.error), BATON_IN_PROGRESS);
      asked = true;
    }
    EXPECT_EQ(baton_work_wait(self.comm, work, BATON_FOREVER, &self.error), BATON_OK)
        << self.error.text;
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

struct Chain {
  Rank& self;
  int left;
  std::atomic<bool> over{false};
  static void on_end(void* context, baton_work /*work*/, int32_t result, const char* text) {
    auto& chain = *static_cast<Chain*>(context);
    EXPECT_EQ(result, BATON_OK) << text;
    if (chain.left-- == 0) {
      chain.over = true;
    } else {
      chain.begin();
    }
  }
  void begin() {
    baton_call call = call_of(BATON_BARRIER, nullptr, nullptr, 0);
    call.flags = BATON_CALL_DETACHED;
    call.on_end = on_end;
    call.context = this;
    EXPECT_EQ(baton_comm_start(self.comm, &call, nullptr, &self.error), BATON_OK)
        << self.error.text;
  }
};

TEST(CollectivesOfC, ACallbackMayBeginCalls) {
  for (const uint8_t background : {0, 1}) {
    run_ranks(
        2,
        [](Rank& self) {
          Chain chain{self, 50};
          chain.begin();
          baton_endpoint* endpoint = nullptr;
          EXPECT_EQ(baton_comm_endpoint(self.comm, &endpoint, &self.error), BATON_OK);
          until([&] { return chain.over.load(); }, [&] { baton_endpoint_progress(endpoint); });
          baton_endpoint_close(endpoint);
        },
        "shm", background);
  }
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

TEST(CollectivesOfC, AbortEndsCallsHereAndThere) {
  std::latch started(2);
  run_ranks(2, [&](Rank& self) {
    int32_t word = 0;
    const baton_work work =
        self.start(call_of(BATON_RECEIVE, nullptr, &word, 1, 1 - self.rank));  // that nothing sends
    started.arrive_and_wait();
    if (self.rank == 0) {
      EXPECT_EQ(baton_comm_abort(self.comm, "enough", &self.error), BATON_OK);
    }
    EXPECT_EQ(baton_work_wait(self.comm, work, kLong, &self.error), BATON_ERR_CANCELED);
    EXPECT_THAT(self.error.text, HasSubstr("enough"));
    EXPECT_THAT(self.error.text, HasSubstr("rank 0"));
  });
}

// --- groups from handles ---

struct Member {
  ~Member() {
    baton_comm_destroy(comm);
    baton_endpoint_close(endpoint);
  }
  baton_endpoint* endpoint = nullptr;
  baton_comm* comm = nullptr;
  baton_error error = BATON_ERROR_INIT;
};

// body(member, its rank, all handles) on a thread for each.
void run_members(int members,
                 const std::function<void(Member&, int, const std::vector<baton_handle>&)>& body) {
  std::vector<Member> all(static_cast<size_t>(members));
  std::vector<baton_handle> handles(all.size());
  for (size_t i = 0; i < all.size(); ++i) {
    ASSERT_EQ(baton_endpoint_open(nullptr, &all[i].endpoint, &all[i].error), BATON_OK)
        << all[i].error.text;
    ASSERT_EQ(baton_endpoint_handle(all[i].endpoint, &handles[i], &all[i].error), BATON_OK);
  }
  std::vector<std::thread> threads;
  for (int i = 0; i < members; ++i) {
    threads.emplace_back([&, i] { body(all[static_cast<size_t>(i)], i, handles); });
  }
  for (std::thread& thread : threads) thread.join();
}

baton_comm_options group(uint64_t uuid) {
  baton_comm_options options;
  baton_comm_options_init(&options, sizeof options);
  options.uuid = uuid;
  return options;
}

int32_t sum_of_ones(baton_comm* comm, baton_error& error) {
  int32_t one = 1;
  const baton_call call = call_of(BATON_ALL_REDUCE, &one, &one, 1);
  baton_work work = 0;
  EXPECT_EQ(baton_comm_start(comm, &call, &work, &error), BATON_OK) << error.text;
  EXPECT_EQ(baton_work_wait(comm, work, kLong, &error), BATON_OK) << error.text;
  return one;
}

TEST(GroupsOfC, AreMadeOfHandlesSplitAndTakenAsParts) {
  run_members(3, [](Member& self, int rank, const std::vector<baton_handle>& handles) {
    const baton_comm_options options = group(7);
    ASSERT_EQ(
        baton_comm_create(self.endpoint, handles.data(), 3, &options, &self.comm, &self.error),
        BATON_OK)
        << self.error.text;
    EXPECT_EQ(baton_comm_rank(self.comm), rank);
    EXPECT_EQ(baton_comm_ranks(self.comm), 3);
    ASSERT_EQ(baton_comm_wait_ready(self.comm, kLong, &self.error), BATON_OK) << self.error.text;
    EXPECT_EQ(baton_comm_state(self.comm, &self.error), BATON_OK);
    EXPECT_EQ(sum_of_ones(self.comm, self.error), 3);
    baton_handle again[3] = {};
    size_t count = 0;
    EXPECT_EQ(baton_comm_handles(self.comm, again, 3, &count, &self.error), BATON_OK);
    EXPECT_EQ(count, 3U);
    EXPECT_EQ(std::memcmp(again, handles.data(), sizeof again), 0);
    // Ranks 2 and 0, in this order; rank 1 is in no group.
    baton_comm* part = nullptr;
    ASSERT_EQ(baton_comm_split(self.comm, rank == 1 ? -1 : 4, -rank, nullptr, &part, &self.error),
              BATON_OK)
        << self.error.text;
    EXPECT_EQ(part == nullptr, rank == 1);
    if (part != nullptr) {
      EXPECT_EQ(baton_comm_rank(part), rank == 2 ? 0 : 1);
      EXPECT_EQ(sum_of_ones(part, self.error), 2);
      baton_comm_destroy(part);
    }
    if (rank > 0) {
      const int32_t ranks[] = {1, 2};
      ASSERT_EQ(baton_comm_subgroup(self.comm, ranks, 2, nullptr, &part, &self.error), BATON_OK)
          << self.error.text;
      EXPECT_EQ(sum_of_ones(part, self.error), 2);
      baton_comm_destroy(part);
    }
    EXPECT_EQ(sum_of_ones(self.comm, self.error), 3);
  });
}

TEST(GroupsOfC, TakeOtherMembersAfterAnAbort) {
  std::latch aborted(3);
  run_members(3, [&](Member& self, int rank, const std::vector<baton_handle>& handles) {
    const baton_comm_options options = group(11);
    ASSERT_EQ(
        baton_comm_create(self.endpoint, handles.data(), 3, &options, &self.comm, &self.error),
        BATON_OK)
        << self.error.text;
    EXPECT_EQ(sum_of_ones(self.comm, self.error), 3);
    EXPECT_EQ(baton_comm_abort(self.comm, "shrinks", &self.error), BATON_OK);
    EXPECT_EQ(baton_comm_state(self.comm, &self.error), BATON_ERR_CANCELED);
    aborted.arrive_and_wait();
    if (rank == 2) return;
    baton_work work = 0;
    ASSERT_EQ(baton_comm_reconfigure(self.comm, handles.data(), 2, 12, kLong, &work, &self.error),
              BATON_OK)
        << self.error.text;
    ASSERT_EQ(baton_work_wait(self.comm, work, kLong, &self.error), BATON_OK) << self.error.text;
    EXPECT_EQ(baton_comm_ranks(self.comm), 2);
    EXPECT_EQ(sum_of_ones(self.comm, self.error), 2);
  });
}

TEST(GroupsOfC, MemoryOfAnEndpointIsForEveryCall) {
  run_members(2, [](Member& self, int rank, const std::vector<baton_handle>& handles) {
    const baton_comm_options options = group(21);
    ASSERT_EQ(
        baton_comm_create(self.endpoint, handles.data(), 2, &options, &self.comm, &self.error),
        BATON_OK)
        << self.error.text;
    void* memory = nullptr;
    ASSERT_EQ(baton_endpoint_allocate(self.endpoint, 4096, &memory, &self.error), BATON_OK)
        << self.error.text;
    auto* words = static_cast<int32_t*>(memory);
    EXPECT_EQ(words[1023], 0);
    words[7] = rank + 1;
    const baton_call call = call_of(BATON_ALL_REDUCE, words, words, 1024);
    baton_work work = 0;
    ASSERT_EQ(baton_comm_start(self.comm, &call, &work, &self.error), BATON_OK) << self.error.text;
    EXPECT_EQ(baton_work_wait(self.comm, work, kLong, &self.error), BATON_OK) << self.error.text;
    EXPECT_EQ(words[7], 3);
    EXPECT_EQ(baton_endpoint_free(self.endpoint, words + 1, &self.error), BATON_ERR_NOT_FOUND);
    EXPECT_EQ(baton_endpoint_free(self.endpoint, memory, &self.error), BATON_OK);
    EXPECT_EQ(baton_endpoint_free(self.endpoint, memory, &self.error), BATON_ERR_NOT_FOUND);
    EXPECT_EQ(baton_endpoint_allocate(self.endpoint, 0, &memory, &self.error),
              BATON_ERR_INVALID_PARAM);
    EXPECT_GE(baton_endpoint_event_fd(self.endpoint), 0);
  });
}

// Promise(collectives): A loop may sleep on an endpoint's event descriptor | peers begin later
TEST(GroupsOfC, ALoopSleepsOnTheEventDescriptor) {
  std::atomic<int> asleep{0};
  run_members(2, [&](Member& self, int rank, const std::vector<baton_handle>& handles) {
    const baton_comm_options options = group(23);
    ASSERT_EQ(
        baton_comm_create(self.endpoint, handles.data(), 2, &options, &self.comm, &self.error),
        BATON_OK)
        << self.error.text;
    for (int turn = 1; turn <= 20; ++turn) {
      std::vector<int32_t> data(turn % 2 != 0 ? 16 : 300'000, rank + 1);
      const baton_call call = call_of(BATON_ALL_REDUCE, data.data(), data.data(), data.size());
      baton_work work = 0;
      if (rank == 1) until([&] { return asleep == turn; });
      ASSERT_EQ(baton_comm_start(self.comm, &call, &work, &self.error), BATON_OK)
          << self.error.text;
      if (rank == 1) {
        ASSERT_EQ(baton_work_wait(self.comm, work, kLong, &self.error), BATON_OK)
            << self.error.text;
        continue;
      }
      pollfd fd{.fd = baton_endpoint_event_fd(self.endpoint), .events = POLLIN, .revents = 0};
      int32_t result = BATON_IN_PROGRESS;
      while ((result = baton_work_test(self.comm, work, &self.error)) == BATON_IN_PROGRESS) {
        if (baton_endpoint_progress(self.endpoint) == 1) continue;
        asleep = turn;
        ASSERT_EQ(poll(&fd, 1, static_cast<int>(kLong / 1'000'000)), 1) << "turn " << turn;
      }
      ASSERT_EQ(result, BATON_OK) << self.error.text;
      EXPECT_EQ(data.back(), 3);
    }
  });
}

TEST(GroupsOfC, HandlesThatMakeNoSenseAreRefused) {
  Member self;
  ASSERT_EQ(baton_endpoint_open(nullptr, &self.endpoint, &self.error), BATON_OK) << self.error.text;
  baton_handle own{}, damaged{};
  ASSERT_EQ(baton_endpoint_handle(self.endpoint, &own, &self.error), BATON_OK);
  damaged = own;
  damaged.bytes[50] ^= 1;
  const struct {
    const char* what;
    std::vector<baton_handle> handles;
    uint64_t uuid;
  } cases[] = {{"damaged", {own, damaged}, 1},
               {"zeros", {own, baton_handle{}}, 1},
               {"none", {}, 1},
               {"one twice", {own, own}, 1},
               {"no uuid", {own}, 0}};
  const baton_comm_options alone = group(5);
  baton_comm* first = nullptr;
  ASSERT_EQ(baton_comm_create(self.endpoint, &own, 1, &alone, &first, &self.error), BATON_OK)
      << self.error.text;
  EXPECT_EQ(baton_comm_create(self.endpoint, &own, 1, &alone, &self.comm, &self.error),
            BATON_ERR_NOT_ALLOWED)
      << self.error.text;
  baton_comm_destroy(first);
  for (const auto& each : cases) {
    const baton_comm_options options = group(each.uuid);
    EXPECT_LT(baton_comm_create(self.endpoint, each.handles.data(), each.handles.size(), &options,
                                &self.comm, &self.error),
              0)
        << each.what;
    EXPECT_EQ(self.comm, nullptr) << each.what;
    EXPECT_NE(*self.error.text, 0) << each.what;
  }
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

TEST(CollectivesOfC, RanksThatDoNotFitHearWhy) {
  baton_rendezvous* server = nullptr;
  baton_bytes address{};
  baton_error error = BATON_ERROR_INIT;
  ASSERT_EQ(baton_rendezvous_open(nullptr, 2, nullptr, &server, &address, &error), BATON_OK);
  const auto meets = [&](int32_t rank, int32_t ranks, int64_t timeout, baton_error& why,
                         baton_endpoint* endpoint = nullptr) {
    baton_place place = BATON_PLACE_INIT;
    place.rendezvous = address.data;
    place.rank = rank;
    place.ranks = ranks;
    baton_comm_options options = group(0);
    options.start_timeout = timeout;
    baton_comm* comm = nullptr;
    const int32_t result = baton_comm_meet(endpoint, &place, &options, &comm, &why);
    EXPECT_EQ(comm == nullptr, result != BATON_OK);
    baton_comm_destroy(comm);
    return result;
  };
  EXPECT_EQ(meets(2, 2, kLong, error), BATON_ERR_INVALID_PARAM) << error.text;
  EXPECT_EQ(meets(0, 2, 50'000'000, error), BATON_ERR_TIMEOUT) << error.text;
  EXPECT_THAT(error.text, HasSubstr("1"));
  baton_error twice = BATON_ERROR_INIT;
  std::thread other([&] { EXPECT_EQ(meets(0, 2, kLong, twice), BATON_ERR_INVALID_PARAM); });
  EXPECT_EQ(meets(0, 2, kLong, error), BATON_ERR_INVALID_PARAM);
  other.join();
  EXPECT_THAT(error.text, HasSubstr("rank 0"));
  baton::TemporaryFolder folder;
  const std::string key = folder.path("key");
  folder.file("key", std::string(64, 'a'));
  chmod(key.c_str(), 0600);
  baton_endpoint_options stranger;
  baton_endpoint_options_init(&stranger, sizeof stranger);
  stranger.key_file = key.c_str();
  baton_endpoint* endpoint = nullptr;
  ASSERT_EQ(baton_endpoint_open(&stranger, &endpoint, &error), BATON_OK) << error.text;
  EXPECT_EQ(meets(0, 2, kLong, error, endpoint), BATON_ERR_MISMATCH) << error.text;
  baton_endpoint_close(endpoint);
  baton_rendezvous_close(server);
  baton_bytes_free(&address);
}

TEST(CollectivesOfC, MismatchingCallsNameBothRanks) {
  run_ranks(2, [](Rank& self) {
    int32_t words[4] = {};
    EXPECT_EQ(self.run(call_of(BATON_ALL_REDUCE, words, words, self.rank == 0 ? 2 : 3)),
              BATON_ERR_INVALID_PARAM);
    EXPECT_THAT(self.error.text, HasSubstr("rank 0"));
    EXPECT_THAT(self.error.text, HasSubstr("rank 1"));
  });
}

// --- the process ---

TEST(CollectivesOfC, AForkedChildIsRefused) {
  run_ranks(1, [](Rank& self) {
    const pid_t child = fork();
    if (child == 0) {
      baton_error error = BATON_ERROR_INIT;
      const bool refused = baton_comm_state(self.comm, &error) == BATON_ERR_INVALID_PARAM &&
                           std::strstr(error.text, "forked") != nullptr &&
                           baton_comm_rank(self.comm) == -1;
      baton_comm_destroy(self.comm);
      _exit(refused ? 0 : 1);
    }
    int status = -1;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
    EXPECT_EQ(self.run(call_of(BATON_BARRIER, nullptr, nullptr, 0)), BATON_OK) << self.error.text;
  });
}

size_t entries(const char* folder) {
  size_t count = 0;
  DIR* dir = opendir(folder);
  while (readdir(dir) != nullptr) ++count;
  closedir(dir);
  return count;
}

size_t shared_mappings() {
  size_t count = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    count += line.find("memfd:") != std::string::npos ? 1 : 0;
  }
  return count;
}

// Promise(collectives): Communicators of C leave no descriptor, thread or shared memory behind |
//   they are counted before and after 100
TEST(CollectivesOfC, LeaveNothingBehind) {
  const auto once = [] {
    run_ranks(2, [](Rank& self) {
      EXPECT_EQ(self.run(call_of(BATON_BARRIER, nullptr, nullptr, 0)), BATON_OK) << self.error.text;
    });
  };
  once();  // what the process makes once
  const size_t descriptors = entries("/proc/self/fd"), shared = shared_mappings();
  size_t threads = 0;
  until([&, last = entries("/proc/self/task")]() mutable {
    threads = entries("/proc/self/task");
    return std::exchange(last, threads) == threads;
  });
  for (int i = 0; i < 50; ++i) once();  // of two ranks
  EXPECT_EQ(entries("/proc/self/fd"), descriptors);
  EXPECT_EQ(shared_mappings(), shared);
  until([&] { return entries("/proc/self/task") <= threads; });  // who was joined is listed longer
}

TEST(CollectivesOfC, TheEnvironmentSaysThePlace) {
  const char* const names[] = {"BATON_RANK", "BATON_RANKS", "BATON_RENDEZVOUS"};
  baton_place place = BATON_PLACE_INIT;
  baton_bytes where{};
  baton_error error = BATON_ERROR_INIT;
  for (const char* name :
       {"RANK", "WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"}) {
    unsetenv(name);
  }
  EXPECT_EQ(baton_place_from_environment(&place, &where, &error), BATON_ERR_NOT_FOUND);
  EXPECT_EQ(where.data, nullptr);
  setenv(names[0], "2", 1);
  setenv(names[1], "4", 1);
  setenv(names[2], "127.0.0.1:4711", 1);
  EXPECT_EQ(baton_place_from_environment(&place, &where, &error), BATON_OK) << error.text;
  EXPECT_EQ(place.rank, 2);
  EXPECT_EQ(place.ranks, 4);
  EXPECT_STREQ(place.rendezvous, "127.0.0.1:4711");
  EXPECT_EQ(place.rendezvous, where.data);
  baton_bytes_free(&where);
  setenv(names[0], "four", 1);
  EXPECT_EQ(baton_place_from_environment(&place, &where, &error), BATON_ERR_INVALID_PARAM);
  EXPECT_THAT(error.text, HasSubstr("BATON_RANK"));
  for (const char* name : names) unsetenv(name);
}

}  // namespace
