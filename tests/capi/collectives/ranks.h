// Ranks of tests in C: threads, each with a communicator of its own.
#pragma once

#include <baton/collectives.h>

#include "tests/test.h"
#include "tests/until.h"

namespace baton::capi {

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

inline baton_call call_of(int32_t kind, const void* in, void* out, size_t count, int32_t peer = 0) {
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
inline void run_ranks(int ranks, const std::function<void(Rank&)>& body,
                      const char* provider = "shm") {
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

inline std::vector<int32_t> numbers(size_t count, int32_t from) {
  std::vector<int32_t> out(count);
  std::iota(out.begin(), out.end(), from);
  return out;
}

struct CollectivesInC : ::testing::TestWithParam<const char*> {};

}  // namespace baton::capi
