// Windows in C.
#include "tests/capi/collectives/ranks.h"

namespace baton::capi {
namespace {

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
        // One without bytes needs no memory.
        baton_window* empty = nullptr;
        ASSERT_EQ(baton_window_create(self.comm, nullptr, 0, 1, kLong, &empty, &error), BATON_OK)
            << error.text;
        EXPECT_EQ(baton_window_bytes(empty, other, &bytes, &error), BATON_OK);
        EXPECT_EQ(bytes, 0u);
        baton_window_destroy(empty);
        EXPECT_EQ(self.run(call_of(BATON_BARRIER, nullptr, nullptr, 0)), BATON_OK);
        baton_window_destroy(window);
        baton_window_destroy(nullptr);
      },
      GetParam());
}

}  // namespace
}  // namespace baton::capi
