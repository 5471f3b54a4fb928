// The C interface: what its results, errors and structs promise, and what it does with nonsense.
#include "tests/capi/side.h"
#include "tests/test.h"
#include "tests/until.h"

namespace {

using baton::until;
using baton::capi_tests::kLong;
using baton::capi_tests::Side;
using ::testing::HasSubstr;

struct Capi : ::testing::Test {
  Capi() {
    baton_bytes metadata{}, name{};
    EXPECT_EQ(baton_agent_metadata(b.agent, &metadata, &error), BATON_OK);
    EXPECT_EQ(baton_agent_add_remote(a.agent, metadata.data, metadata.size, &name, &error),
              BATON_OK)
        << error.text;
    EXPECT_STREQ(name.data, "b");
    baton_bytes_free(&metadata);
    baton_bytes_free(&name);
    EXPECT_EQ(name.data, nullptr);
  }
  baton_transfer make(uint64_t bytes = 100) {
    baton_descriptor from = a.whole, to = b.whole;
    from.bytes = to.bytes = bytes;
    baton_transfer out = 0;
    EXPECT_EQ(baton_transfer_make_direct(a.agent, BATON_WRITE, BATON_DRAM, &from, 1, &to, 1, "b",
                                         "done", 4, &out, &error),
              BATON_OK)
        << error.text;
    return out;
  }
  Side a{"a"}, b{"b"};
  baton_error error = BATON_ERROR_INIT;
};

TEST_F(Capi, ATransferFromMakeToRelease) {
  a.memory()[7] = 'x';
  const baton_transfer write = make();
  EXPECT_EQ(baton_transfer_state(a.agent, write, &error), BATON_ERR_NOT_POSTED);
  EXPECT_EQ(error.result, BATON_ERR_NOT_POSTED);
  EXPECT_EQ(baton_transfer_wait(a.agent, write, 0, &error), BATON_ERR_NOT_POSTED);
  baton_telemetry telemetry{};
  telemetry.size = sizeof telemetry;
  EXPECT_EQ(baton_transfer_telemetry(a.agent, write, &telemetry, &error), BATON_ERR_NOT_POSTED);
  ASSERT_EQ(baton_transfer_post(a.agent, write, "other", 5, &error), BATON_OK) << error.text;
  ASSERT_EQ(baton_transfer_wait(a.agent, write, kLong, &error), BATON_OK) << error.text;
  EXPECT_EQ(baton_transfer_state(a.agent, write, &error), BATON_OK);
  EXPECT_EQ(baton_transfer_local_free(a.agent, write, &error), BATON_OK);
  EXPECT_EQ(b.memory()[7], 'x');
  EXPECT_EQ(baton_transfer_telemetry(a.agent, write, &telemetry, &error), BATON_OK);
  EXPECT_EQ(telemetry.bytes, 100u);
  EXPECT_EQ(telemetry.descriptors, 1u);
  EXPECT_GT(telemetry.transfer_ns, 0);

  baton_bytes from{}, message{};
  int32_t got = BATON_ERR_NOT_FOUND;
  until([&] {
    got = baton_next_message(b.agent, &from, &message, &error);
    return got != BATON_ERR_NOT_FOUND;
  });
  ASSERT_EQ(got, BATON_OK);
  EXPECT_STREQ(from.data, "a");
  EXPECT_EQ(std::string(message.data, message.size), "other");
  baton_bytes_free(&from);
  baton_bytes_free(&message);

  EXPECT_EQ(baton_transfer_release(a.agent, write, BATON_FOREVER, &error), BATON_OK);
  EXPECT_EQ(baton_transfer_state(a.agent, write, &error), BATON_ERR_NOT_FOUND);
  EXPECT_EQ(baton_transfer_local_free(a.agent, write, &error), BATON_ERR_NOT_FOUND);
  EXPECT_EQ(baton_transfer_release(a.agent, write, BATON_FOREVER, &error), BATON_ERR_NOT_FOUND);
  EXPECT_THAT(error.text, HasSubstr("already released"));
}

TEST_F(Capi, RowsAreRegisteredAndPreparedOrNeither) {
  std::vector<char> memory(64 * 100);
  const auto address = reinterpret_cast<uint64_t>(memory.data());
  const baton_strided rows[] = {{address, 10, 0, 100, 32}, {address + 3200, 20, 0, 100, 32}};
  const auto count = [&] {
    baton_agent_stats stats{};
    stats.size = sizeof stats;
    EXPECT_EQ(baton_agent_get_stats(a.agent, &stats, &error), BATON_OK);
    return std::pair(stats.registered, stats.lists);
  };
  const auto before = count();
  baton_list list = 0;
  ASSERT_EQ(baton_list_register(a.agent, BATON_DRAM, rows, 2, &list, &error), BATON_OK)
      << error.text;
  EXPECT_EQ(count(), std::pair(before.first + 2, before.second + 1));
  // Row 1's are indices 32 to 63, of 20 bytes.
  const int64_t mine[] = {33}, theirs[] = {0};
  const baton_strided there{b.whole.address, 20, 0, 20, 1};
  baton_list remote = 0;
  ASSERT_EQ(baton_list_prepare_strided(a.agent, "b", BATON_DRAM, &there, 1, &remote, &error),
            BATON_OK);
  memory[3300] = 'y';
  baton_transfer write = 0;
  ASSERT_EQ(baton_transfer_make(a.agent, BATON_WRITE, list, mine, 1, remote, theirs, 1, nullptr, 0,
                                &write, &error),
            BATON_OK)
      << error.text;
  EXPECT_EQ(baton_transfer_run(a.agent, write, kLong, &error), BATON_OK) << error.text;
  EXPECT_EQ(b.memory()[0], 'y');
  for (const baton_list each : {list, remote}) {
    EXPECT_EQ(baton_list_release(a.agent, each, &error), BATON_OK);
  }
  const baton_descriptor ranges[] = {{address, 3110, 0}, {address + 3200, 3120, 0}};
  EXPECT_EQ(baton_agent_deregister(a.agent, BATON_DRAM, ranges, 2, &error), BATON_OK) << error.text;

  ASSERT_EQ(baton_list_register(a.agent, BATON_DRAM, rows, 2, nullptr, &error), BATON_OK);
  EXPECT_EQ(count(), std::pair(before.first + 2, before.second));
  EXPECT_EQ(baton_agent_deregister(a.agent, BATON_DRAM, ranges, 2, &error), BATON_OK) << error.text;
  EXPECT_EQ(count(), before);
}

TEST_F(Capi, AMessageIsWaitedFor) {
  baton_bytes from{}, message{};
  EXPECT_EQ(baton_wait_message(b.agent, 0, &from, &message, &error), BATON_ERR_TIMEOUT);
  EXPECT_EQ(baton_wait_message(nullptr, 0, &from, &message, &error), BATON_ERR_INVALID_PARAM);
  // Threads that wait, and one that asks now and then: each message is one's.
  constexpr int kEach = 50;
  std::atomic<int> got{0};
  std::vector<std::thread> waiting;
  for (int i = 0; i < 3; ++i) {
    waiting.emplace_back([&] {
      baton_bytes text{};
      while (baton_wait_message(b.agent, BATON_FOREVER, nullptr, &text, nullptr) == BATON_OK) {
        const std::string said(text.data, text.size);
        baton_bytes_free(&text);
        if (said == "end") return;
        ++got;
      }
    });
  }
  for (int i = 0; i < kEach; ++i) {
    ASSERT_EQ(baton_notify(a.agent, "b", "text", 4, &error), BATON_OK) << error.text;
    if (baton_next_message(b.agent, nullptr, nullptr, nullptr) == BATON_OK) ++got;
  }
  until([&] { return got >= kEach; });
  for (int i = 0; i < 3; ++i) ASSERT_EQ(baton_notify(a.agent, "b", "end", 3, &error), BATON_OK);
  for (std::thread& thread : waiting) thread.join();
  EXPECT_EQ(got, kEach);
}

TEST_F(Capi, ErrorsFitWhatTheCallerHas) {
  EXPECT_EQ(baton_list_release(a.agent, 12345, nullptr), BATON_ERR_NOT_FOUND);
  baton_error small = BATON_ERROR_INIT;
  std::memset(small.text, '#', sizeof small.text);
  small.size = offsetof(baton_error, text) + 5;
  EXPECT_EQ(baton_list_release(a.agent, 12345, &small), BATON_ERR_NOT_FOUND);
  EXPECT_EQ(std::strlen(small.text), 4u);
  EXPECT_EQ(small.text[5], '#') << "not a byte more";
  const baton_transfer idle = make();
  EXPECT_EQ(baton_transfer_state(a.agent, idle, &small), BATON_ERR_NOT_POSTED);
  EXPECT_EQ(small.result, BATON_ERR_NOT_POSTED) << "an error of any size has the number";
  EXPECT_EQ(baton_transfer_release(a.agent, idle, kLong, &error), BATON_OK);
  // A text that is longer than any error: cut.
  const std::string long_name(3000, 'n');
  EXPECT_EQ(baton_notify(a.agent, long_name.c_str(), "", 0, &error), BATON_ERR_NOT_FOUND);
  EXPECT_EQ(std::strlen(error.text), sizeof error.text - 1);
}

TEST_F(Capi, NullOutputPointersCreateNothing) {
  const baton_descriptor& whole = a.whole;
  baton_list before = 0, after = 0;
  ASSERT_EQ(baton_list_prepare(a.agent, nullptr, BATON_DRAM, &whole, 1, &before, &error), BATON_OK);
  EXPECT_EQ(baton_list_prepare(a.agent, nullptr, BATON_DRAM, &whole, 1, nullptr, &error),
            BATON_ERR_INVALID_PARAM);
  ASSERT_EQ(baton_list_prepare(a.agent, nullptr, BATON_DRAM, &whole, 1, &after, &error), BATON_OK);
  EXPECT_EQ(after, before + 1) << "numbers are counted";
}

TEST_F(Capi, NonsenseIsAnErrorAndNoCrash) {
  baton_agent* none = nullptr;
  uint64_t out = 0;
  const int64_t index = 0;
  EXPECT_EQ(baton_agent_register(none, 0, nullptr, 0, &error), BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_agent_port(none), 0);
  EXPECT_STREQ(baton_agent_name(none), "");
  EXPECT_EQ(baton_agent_event_fd(none), -1);
  EXPECT_EQ(baton_agent_progress(none), 0);
  EXPECT_EQ(baton_agent_has_remote(none, "b", 0, nullptr, 0), 0);
  baton_agent_destroy(none);
  EXPECT_EQ(baton_agent_open("c", nullptr, &error), BATON_ERR_INVALID_PARAM);
  ASSERT_EQ(baton_agent_open("c", &none, &error), BATON_OK) << error.text;
  EXPECT_STREQ(baton_agent_name(none), "c");
  baton_agent_destroy(none);
  EXPECT_EQ(baton_agent_open(nullptr, &none, &error), BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(none, nullptr);
  baton_bytes_free(nullptr);
  baton_transfer_abandon(none, 1);
  EXPECT_EQ(baton_transfer_wait(none, 1, 0, &error), BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_agent_add_remote(a.agent, nullptr, 99, nullptr, &error), BATON_ERR_MISMATCH);
  EXPECT_EQ(baton_agent_add_remote(a.agent, "nixl", 4, nullptr, &error), BATON_ERR_MISMATCH);
  EXPECT_EQ(baton_agent_has_remote(a.agent, nullptr, 0, nullptr, 0), 0);
  // The host's memory is no device's, whether or not there is one here.
  const bool devices = baton_memory_supported(BATON_VRAM, &error) == BATON_OK;
  EXPECT_EQ(baton_agent_register(a.agent, BATON_VRAM, &a.whole, 1, &error),
            devices ? BATON_ERR_INVALID_PARAM : BATON_ERR_NOT_SUPPORTED);
  EXPECT_THAT(error.text, HasSubstr("CUDA"));
  EXPECT_EQ(baton_memory_supported(BATON_DRAM, nullptr), BATON_OK);
  EXPECT_EQ(baton_memory_supported(BATON_FILE, &error), BATON_OK);
  EXPECT_EQ(baton_memory_supported(BATON_OBJECT, &error), BATON_ERR_NOT_SUPPORTED);
  EXPECT_EQ(baton_memory_supported(1234, &error), BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_transfer_make_between(a.agent, BATON_READ, BATON_VRAM, &a.whole, 1, BATON_DRAM,
                                        &b.whole, 1, "b", nullptr, 0, &out, &error),
            BATON_ERR_NOT_FOUND);
  EXPECT_THAT(error.text, HasSubstr("registered VRAM range"));
  EXPECT_EQ(baton_transfer_make_between(a.agent, BATON_READ, BATON_FILE, &a.whole, 1, BATON_DRAM,
                                        &b.whole, 1, "b", nullptr, 0, &out, &error),
            BATON_ERR_NOT_SUPPORTED);
  EXPECT_EQ(baton_agent_register(a.agent, -3, &a.whole, 1, &error), BATON_ERR_INVALID_PARAM);
  EXPECT_EQ(baton_list_prepare(a.agent, nullptr, 0, &b.whole, 1, &out, &error),
            BATON_ERR_NOT_FOUND);
  ASSERT_EQ(baton_list_prepare(a.agent, nullptr, 0, &a.whole, 1, &out, &error), BATON_OK);
  EXPECT_EQ(
      baton_transfer_make(a.agent, 7, out, &index, 1, out, &index, 1, nullptr, 0, &out, &error),
      BATON_ERR_INVALID_PARAM);
  for (const int32_t op : {-1, 2, 256, 257, INT32_MIN}) {
    EXPECT_EQ(baton_transfer_make_direct(a.agent, op, BATON_DRAM, &a.whole, 1, &b.whole, 1, "b",
                                         nullptr, 0, &out, &error),
              BATON_ERR_INVALID_PARAM);
    EXPECT_THAT(error.text, HasSubstr("BATON_WRITE"));
  }
  baton_agent_options options;
  baton_agent_options_init(&options, sizeof options);
  options.name = "c";
  options.providers = "shm,carrier pigeon";
  EXPECT_NE(baton_agent_create(&options, &none, &error), BATON_OK);
  EXPECT_EQ(none, nullptr);
  options.providers = nullptr;
  options.settings = "tcp.sockets=many";
  EXPECT_EQ(baton_agent_create(&options, &none, &error), BATON_ERR_INVALID_PARAM);
  EXPECT_THAT(error.text, HasSubstr("tcp.sockets"));
  options.settings = nullptr;
  options.key_file = "/nowhere";
  EXPECT_NE(baton_agent_create(&options, &none, &error), BATON_OK);
  options.key_file = "";  // as every empty text of the options: none is named
  EXPECT_EQ(baton_agent_create(&options, &none, &error), BATON_OK) << error.text;
  baton_agent_destroy(none);
}

TEST_F(Capi, EveryNumberHasAName) {
  for (int32_t i = -11; i <= 1; ++i) {
    EXPECT_THAT(baton_result_name(i), HasSubstr("BATON_")) << i;
    EXPECT_EQ(std::string(baton_result_name(i)) == "BATON_ERR_UNKNOWN", i == BATON_ERR_UNKNOWN);
  }
  EXPECT_STREQ(baton_result_name(-1000), "BATON_ERR_UNKNOWN");
  EXPECT_THAT(baton_version(), HasSubstr("."));
}

}  // namespace
