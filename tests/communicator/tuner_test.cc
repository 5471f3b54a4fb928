// What the trials of a shape find is what its calls run as from then on.
#include "collectives/internal/tuner.h"
#include "tests/test.h"

namespace baton::collectives::internal {
namespace {

constexpr size_t kSlotBytes = 512 << 10;

// Trials and vote of a shape, each call taking what `seconds` says of its choice; then the choice
// that is left. `tried`: the parts of all choices, in bytes.
template <typename Seconds>
prediction::Choice settle(const prediction::CallShape& shape, const Seconds& seconds,
                          std::set<size_t>& tried) {
  prediction::CostParameters cost;
  cost.gamma = 1 / 54e9;
  cost.node_size = 2;
  cost.cores_move_local = true;
  cost.local.alpha = cost.remote.alpha = 9e-6;
  cost.local.beta = cost.remote.beta = 1 / 6e9;
  Tuner tuner({.rank = 0, .ranks = shape.ranks, .slot_bytes = kSlotBytes}, cost);
  for (int call = 0; call < 1000; ++call) {
    const auto entry = tuner.entry_of(shape, {});
    EXPECT_TRUE(entry.ok()) << entry.status();
    if (!entry.ok()) return {};
    const Tuner::Due due = tuner.due(**entry);
    if (due == Tuner::Due::kVote) {
      tuner.votes(**entry);
      tuner.vote_began(**entry, Work{1});
    } else if (due == Tuner::Due::kAwait) {
      tuner.vote_ended(**entry);
    }
    const auto pick = tuner.take(**entry, false);
    EXPECT_TRUE(pick.ok()) << pick.status();
    if (!pick.ok()) return {};
    if (!tuner.measuring(pick->entry)) return *pick->choice;
    tried.insert(pick->choice->part_bytes);
    tuner.measured(pick->entry, pick->candidate, seconds(*pick->choice));
  }
  ADD_FAILURE() << "1,000 calls did not settle it";
  return {};
}

prediction::CallShape all_reduce_of(size_t bytes) {
  prediction::CallShape shape;
  shape.collective = Collective::kAllReduce;
  shape.ranks = 2;
  shape.element_bytes = 4;
  shape.bytes = bytes;
  return shape;
}

TEST(Tuner, SmallerChunksAreTriedAndTakenWhereTheyAreFaster) {
  std::set<size_t> tried;
  const auto by_part = [](const prediction::Choice& choice) {
    return choice.part_bytes > 200'000 ? 800e-6 : choice.part_bytes > 150'000 ? 650e-6 : 700e-6;
  };
  const prediction::Choice found = settle(all_reduce_of(2 << 20), by_part, tried);
  EXPECT_GT(*tried.rbegin(), 200'000u);
  EXPECT_LT(found.part_bytes, 200'000u);
  EXPECT_GT(found.part_bytes, 150'000u);
}

TEST(Tuner, SmallerChunksThatGainLittleAreNotTaken) {
  std::set<size_t> tried;
  const auto by_part = [](const prediction::Choice& choice) {
    return choice.part_bytes > 200'000 ? 800e-6 : 780e-6;
  };
  const prediction::Choice found = settle(all_reduce_of(2 << 20), by_part, tried);
  EXPECT_EQ(found.part_bytes, *tried.rbegin());
  EXPECT_GT(tried.size(), 1u);
}

TEST(Tuner, OneMessageIsNotCutForATrial) {
  std::set<size_t> tried;
  settle(
      all_reduce_of(8), [](const prediction::Choice&) { return 1e-6; }, tried);
  EXPECT_LE(*tried.rbegin(), 8u);
}

// The first calls take messages in turn whose memory nobody has touched yet.
TEST(Tuner, TheFirstCallsAreNotHeldAgainstTheCandidateThatMakesThem) {
  std::set<size_t> tried;
  std::optional<schedules::ScheduleSpec> first;
  int calls = 0;
  const auto cold = [&](const prediction::Choice& choice) {
    if (!first) first = choice.spec;
    ++calls;
    return calls <= 16 ? 9e-6 : choice.spec == *first ? 1e-6 : 2e-6;
  };
  const prediction::Choice found = settle(all_reduce_of(8), cold, tried);
  EXPECT_EQ(found.spec, *first);
  EXPECT_GT(calls, 16 + 15);  // another one was tried
  EXPECT_LE(calls, 100);      // from then on the shape is settled
}

}  // namespace
}  // namespace baton::collectives::internal
