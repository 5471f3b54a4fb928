// Two connectors, and threads that make every call of both at once, at random: each call ends and
// says one of the things that it may say, and in the end all is over.
#include "tests/capi/side.h"
#include "tests/sanitized.h"
#include "tests/test.h"
#include "tests/until.h"

namespace {

using baton::until;

constexpr uint32_t kLayers = 2, kBlocks = 32, kBlockTokens = 4, kIds = 6;
constexpr int64_t kMoment = 200'000;

struct Side {
  explicit Side(const char* name) : connector(baton::capi_tests::open_connector(name, 1)) {}
  ~Side() { baton_kv_connector_destroy(connector); }
  Side(const Side&) = delete;
  Side& operator=(const Side&) = delete;
  baton_kv_connector* const connector;
  baton::capi_tests::Cache cache{connector, kLayers, kBlocks, kBlockTokens, 1};
};

// One of these results.
template <typename... Results>
void says(int32_t result, Results... may) {
  EXPECT_TRUE(((result == may) || ...)) << baton_result_name(result);
}

struct ConnectorThreads : ::testing::Test {
  void decode(uint32_t seed) {
    std::mt19937 random(seed);
    baton_error error = BATON_ERROR_INIT;
    for (int i = 0; i < kRounds || seen < kJobs; ++i) {
      const uint64_t id = random() % kIds;
      const int32_t tokens[8] = {};
      const uint32_t blocks[2] = {static_cast<uint32_t>(2 * id), static_cast<uint32_t>(2 * id + 1)};
      switch (random() % 9) {
        case 0: {
          baton_kv_load load = BATON_KV_LOAD_INIT;
          load.id = id;
          load.prefill = address.c_str();
          load.tokens = tokens;
          load.token_count = 8;
          load.blocks = blocks;
          load.block_count = 2;
          load.pull = random() % 2;
          says(baton_kv_load_start(d.connector, &load, &error), BATON_OK, BATON_ERR_NOT_ALLOWED);
          break;
        }
        case 1:
          says(baton_kv_load_state(d.connector, id, nullptr, &error), BATON_OK, BATON_IN_PROGRESS,
               BATON_ERR_NOT_FOUND, BATON_ERR_CANCELED);
          break;
        case 2:
          says(baton_kv_load_wait(d.connector, id, random() % kLayers, kMoment, &error), BATON_OK,
               BATON_ERR_TIMEOUT, BATON_ERR_NOT_FOUND, BATON_ERR_CANCELED);
          break;
        case 3:
          says(baton_kv_load_renew(d.connector, id, 60'000'000'000, &error), BATON_OK,
               BATON_ERR_NOT_FOUND, BATON_ERR_CANCELED);
          break;
        case 4: {
          baton_bytes payload{};
          const int32_t got = baton_kv_load_payload(d.connector, id, &payload, &error);
          says(got, BATON_OK, BATON_IN_PROGRESS, BATON_ERR_NOT_FOUND, BATON_ERR_CANCELED,
               BATON_ERR_NOT_ALLOWED);
          if (got == BATON_OK) {
            EXPECT_TRUE(payload.size == 0 || std::string(payload.data) == "token");
          }
          baton_bytes_free(&payload);
          break;
        }
        case 5: {
          uint32_t failed[2];
          size_t count = 0;
          says(baton_kv_load_failed_blocks(d.connector, id, failed, 2, &count, &error), BATON_OK,
               BATON_ERR_NOT_FOUND);
          EXPECT_LE(count, 2U);
          break;
        }
        case 6:
          says(baton_kv_connector_wait(d.connector, kMoment, &error), BATON_OK, BATON_ERR_TIMEOUT);
          break;
        case 7: {
          baton_kv_connector_stats stats{};
          stats.size = sizeof stats;
          baton_bytes route{};
          says(baton_kv_connector_get_stats(d.connector, &stats, &route, &error), BATON_OK);
          baton_bytes_free(&route);
          break;
        }
        default:
          says(baton_kv_load_end(d.connector, id, &error), BATON_OK, BATON_IN_PROGRESS);
      }
    }
  }
  uint64_t any_job(std::mt19937& random) {
    const std::lock_guard lock(mutex);
    return jobs.empty() ? 0 : jobs[random() % jobs.size()];
  }
  void prefill(uint32_t seed, bool takes) {
    std::mt19937 random(seed);
    baton_error error = BATON_ERROR_INIT;
    while (!over) {
      if (takes) {
        baton_kv_job job{};
        job.size = sizeof job;
        const int32_t got = baton_kv_job_next(p.connector, &job, &error);
        says(got, BATON_OK, BATON_ERR_NOT_FOUND);
        if (got == BATON_OK) {
          EXPECT_EQ(job.token_count, 8U);
          EXPECT_STREQ(job.decode, "decode");
          const std::lock_guard lock(mutex);
          jobs.push_back(job.job);
          ++seen;
        } else {
          baton_kv_connector_wait(p.connector, kMoment, &error);
        }
      }
      const uint64_t job = any_job(random);
      const uint32_t blocks[2] = {1, 2};
      switch (random() % 5) {
        case 0:
          says(baton_kv_job_save_layer(p.connector, job, random() % kLayers, 0, blocks, 2, &error),
               BATON_OK, BATON_ERR_NOT_FOUND, BATON_ERR_CANCELED, BATON_ERR_NOT_ALLOWED);
          break;
        case 1:
          says(baton_kv_job_give_payload(p.connector, job, "token", 5, &error), BATON_OK,
               BATON_ERR_NOT_FOUND, BATON_ERR_NOT_ALLOWED);
          break;
        case 2:
          baton_kv_job_is_wanted(p.connector, job);
          break;
        case 3:
          if (random() % 4 == 0) finish(job);
          break;
        default:
          says(baton_kv_job_state(p.connector, job, &error), BATON_OK, BATON_IN_PROGRESS);
      }
    }
  }
  void finish(uint64_t job) {
    const uint32_t blocks[2] = {1, 2};
    for (uint32_t layer = 0; layer < kLayers; ++layer) {
      baton_kv_job_save_layer(p.connector, job, layer, 0, blocks, 2, nullptr);
    }
    baton_error error = BATON_ERROR_INIT;
    says(baton_kv_job_finish(p.connector, job, BATON_OK, nullptr, &error), BATON_OK);
  }
  const int kRounds = baton::kSanitized ? 200 : 2000, kJobs = baton::kSanitized ? 20 : 200;
  Side d{"decode"}, p{"prefill"};
  std::string address;
  std::mutex mutex;
  std::vector<uint64_t> jobs;
  std::atomic<bool> over{false};
  std::atomic<int> seen{0};  // jobs
};

TEST_F(ConnectorThreads, MakeEveryCall) {
  baton_bytes text{};
  ASSERT_EQ(baton_kv_connector_address(p.connector, &text, nullptr), BATON_OK);
  address = text.data;
  baton_bytes_free(&text);
  std::vector<std::thread> working, serving;
  for (uint32_t i = 0; i < 2; ++i) serving.emplace_back([&, i] { prefill(10 + i, i == 0); });
  for (uint32_t i = 0; i < 3; ++i) working.emplace_back([&, i] { decode(20 + i); });
  for (std::thread& thread : working) thread.join();
  // Whatever is open is ended while prefill goes on.
  for (uint64_t id = 0; id < kIds; ++id) {
    until([&] { return baton_kv_load_end(d.connector, id, nullptr) != BATON_IN_PROGRESS; },
          [&] { baton_kv_connector_wait(d.connector, kMoment, nullptr); });
  }
  over = true;
  for (std::thread& thread : serving) thread.join();
  for (const uint64_t job : jobs) {
    baton_kv_job_finish(p.connector, job, BATON_ERR_CANCELED, "over", nullptr);
    until([&] { return baton_kv_job_state(p.connector, job, nullptr) != BATON_IN_PROGRESS; },
          [&] { baton_kv_connector_wait(p.connector, kMoment, nullptr); });
  }
}

}  // namespace
