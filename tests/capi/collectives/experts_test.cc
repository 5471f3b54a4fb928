// Experts in C.
#include <baton/experts.h>

#include <latch>

#include "tests/capi/collectives/ranks.h"

namespace baton::capi {
namespace {

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
        baton_expert_rows unsized = in;
        unsized.size = 8;
        const auto made_with = [&](const std::function<void(baton_experts_options&)>& change) {
          baton_experts_options changed = options;
          change(changed);
          return baton_experts_create(self.comm, &changed, &none, &error);
        };
        for (const int32_t bad :
             {baton_experts_dispatch(experts, rows, -1, chosen, 4, &work, &error),
              baton_experts_dispatch(experts, rows, 2, nullptr, 4, &work, &error),
              baton_experts_dispatch(experts, rows, 2, chosen, 3, &work, &error),
              baton_experts_dispatch(experts, nullptr, 2, chosen, 4, &work, &error),
              baton_experts_dispatch(nullptr, rows, 2, chosen, 4, &work, &error),
              baton_experts_dispatch(experts, rows, 2, chosen, 4, nullptr, &error),
              baton_experts_combine(experts, work, nullptr, 4, out, sizeof out, &back, &error),
              baton_experts_combine(experts, work, weights, 4, out, sizeof out, nullptr, &error),
              baton_experts_received(experts, work, nullptr, &error),
              baton_experts_received(experts, work, &unsized, &error),
              baton_experts_missing(experts, work, nullptr, 0, nullptr, &error),
              made_with([](auto& o) { o.size = 8; }),
              made_with([](auto& o) { o.mode = -1; }),
              made_with([](auto& o) { o.mode = 3; }),
              made_with([](auto& o) { o.type = -1; }),
              made_with([](auto& o) { o.type = 256; }),
              made_with([](auto& o) { o.in_flight = 9; }),
              baton_experts_create(self.comm, &options, nullptr, &error),
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

TEST_P(CollectivesInC, ExpertsThatWaitAndThatMissRanks) {
  std::latch waited(3);
  run_ranks(
      3,
      [&](Rank& self) {
        baton_error& error = self.error;
        baton_experts_options options = BATON_EXPERTS_OPTIONS_INIT;
        options.experts = 3, options.top_k = 1, options.hidden = 1, options.max_tokens = 1;
        baton_experts* experts = nullptr;
        ASSERT_EQ(baton_experts_create(self.comm, &options, &experts, &error), BATON_OK)
            << error.text;
        const pid_t child = fork();
        if (child == 0) {
          const bool refused =
              baton_experts_wait(experts, 1, 0, &error) == BATON_ERR_INVALID_PARAM &&
              std::strstr(error.text, "forked") != nullptr;
          baton_experts_destroy(experts);
          _exit(refused ? 0 : 1);
        }
        int status = -1;
        waitpid(child, &status, 0);
        EXPECT_EQ(status, 0);
        baton_work work = 0;
        const auto dispatch = [&] {
          return baton_experts_dispatch(experts, nullptr, 0, nullptr, 0, &work, &error);
        };
        if (self.rank == 0) {  // the others come later, and not for long
          ASSERT_EQ(dispatch(), BATON_OK) << error.text;
          EXPECT_EQ(baton_experts_wait(experts, work, 1000, &error), BATON_ERR_TIMEOUT);
          EXPECT_EQ(baton_experts_test(experts, work, &error), BATON_IN_PROGRESS);
        }
        waited.arrive_and_wait();
        if (self.rank == 0) {
          EXPECT_EQ(baton_experts_wait(experts, work, kLong, &error), BATON_OK) << error.text;
          int32_t ranks[2] = {-1, -1};
          size_t count = 0;
          EXPECT_EQ(baton_experts_missing(experts, work, ranks, 1, &count, &error), BATON_OK);
          EXPECT_EQ(count, 2u);
          EXPECT_THAT(ranks, testing::ElementsAre(1, -1));
          EXPECT_EQ(baton_experts_missing(experts, 0, nullptr, 2, &count, &error), BATON_OK);
          EXPECT_EQ(count, 2u);
        }
        baton_experts_destroy(experts);
      },
      GetParam());
}

}  // namespace
}  // namespace baton::capi
