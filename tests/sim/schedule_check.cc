// What must hold when a schedule is over.
#include <algorithm>

#include "tests/sim/schedule.h"

namespace baton::sim {
namespace {
constexpr std::byte kLeftAlone{0xee};
constexpr std::byte kInUse{0xcc};
}  // namespace

void Seen::add(const WorkerStats& stats) {
  receipts += stats.receipts;
  slices_moved += stats.slices_moved;
  peers_lost += stats.peers_lost;
  peers_resumed += stats.peers_resumed;
}

void Seen::add(const SimStats& stats) {
  fabric.lost += stats.lost;
  fabric.duplicated += stats.duplicated;
  fabric.reordered += stats.reordered;
  fabric.timeouts += stats.timeouts;
  fabric.rails_lost += stats.rails_lost;
}

void Schedule::check(size_t number) {
  Item& item = items_[number];
  SCOPED_TRACE(testing::Message() << "transfer " << number << ": " << item.result);
  if (!item.submitted) return;
  if (!item.ended) {
    EXPECT_TRUE(gone(item.from));
    return;
  }
  EXPECT_TRUE(item.result.ok() || item.stopped || troubled()) << "nobody asked for this end";
  check_block(item);
  if (item.op == Op::kWrite) check_word(item);
}

void Schedule::check_block(const Item& item) {
  const std::byte* target = target_of(item);
  const bool of_another = item.target_node() == 1 && restarted_;
  if (item.notified != 0 || item.parted || of_another) {
    EXPECT_EQ(std::count(target, target + kBlock, kInUse), static_cast<ptrdiff_t>(kBlock))
        << "bytes landed in memory that had been reused";
    return;
  }
  EXPECT_TRUE(std::equal(item.at_end.begin(), item.at_end.end(), target))
      << "bytes moved after the end";
  std::vector<bool> own(kBlock);
  for (size_t i = 0; i < item.bytes; ++i) {
    const size_t at = item.target.offsets[i] - kHalf - item.number * kBlock;
    own[at] = true;
    if (item.result.ok() && target[at] != pattern(item.number, i)) {
      FAIL() << "byte " << i << " of " << item.bytes << " is wrong";
    }
  }
  for (size_t at = 0; at < kBlock; ++at) {
    if (!own[at] && target[at] != kLeftAlone) {
      FAIL() << "written outside, at " << at << " of the block";
    }
  }
}

// A worker that is gone may hold arrivals that its program never saw.
void Schedule::check_word(const Item& item) {
  EXPECT_LE(item.notified, 1);
  if (gone(item.target_node())) return;
  const uint64_t value = cluster_.worker(item.target_node()).counter_value(item.counter);
  if (item.result.ok()) {
    EXPECT_EQ(value, 7 + item.number);
    EXPECT_EQ(item.notified, 1);
  } else {
    EXPECT_TRUE(value == 0 || value == 7 + item.number) << value;
  }
}

// Blocks that no transfer of that node's has as its target.
void Schedule::check_the_rest() {
  for (const Item& item : items_) {
    const size_t node = item.source_node();
    const std::byte* other = memory(node) + kHalf + item.number * kBlock;
    const std::byte as_it_was = node == 1 && restarted_ ? kInUse : kLeftAlone;
    ASSERT_EQ(std::count(other, other + kBlock, as_it_was), static_cast<ptrdiff_t>(kBlock));
  }
}

}  // namespace baton::sim
