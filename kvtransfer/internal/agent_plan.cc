// Pairs of descriptors are sorted into classes of equal ranges and sizes; each becomes two layouts.
#include "kvtransfer/internal/agent_plan.h"

#include <bit>
#include <numeric>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_format.h"

namespace baton::kvtransfer {
namespace {

// One side of a class: pages of one size in one range. A page's number is its distance from the
// lowest offset in units; where those are more than 2^32, each window of 2^32 is a class.
struct Scale {
  uint64_t lowest = 0;
  uint64_t unit = 1;
  int shift = -1;  // of a unit that is a power of two

  Scale(const AgentUse& use, uint64_t also) : lowest(use.lowest) {
    unit = std::gcd(use.unit, also);
    if (unit == 0) unit = 1;
    if (std::has_single_bit(unit)) shift = std::countr_zero(unit);
  }
  uint64_t number(uint64_t offset) const {
    const uint64_t away = offset - lowest;
    return shift >= 0 ? away >> shift : away / unit;
  }
};

struct Class {
  uint32_t local_use = 0;
  uint32_t remote_use = 0;
  uint64_t bytes = 0;
  uint32_t local_window = 0;
  uint32_t remote_window = 0;
  bool operator==(const Class&) const = default;
  template <typename H>
  friend H AbslHashValue(H h, const Class& c) {
    return H::combine(std::move(h), c.local_use, c.remote_use, c.bytes, c.local_window,
                      c.remote_window);
  }
};

// What a class is known to be while pairs are added to it.
struct Members {
  uint64_t count = 0;
  uint64_t local_first = 0, local_next = 0;  // offsets
  uint64_t remote_first = 0, remote_next = 0;
  bool local_run = true;  // each page begins where the last one ended
  bool remote_run = true;
};

class Planner {
 public:
  Planner(const AgentList& local, const AgentList& remote) : local_(local), remote_(remote) {}

  // `cut`: every size is a sum of powers of two, of which the lowest is `cut`. 0: sizes are kept.
  void begin(size_t pairs, uint64_t cut) {
    local_scales_.clear();
    remote_scales_.clear();
    for (const AgentUse& use : local_.uses()) local_scales_.emplace_back(use, cut);
    for (const AgentUse& use : remote_.uses()) remote_scales_.emplace_back(use, cut);
    local_pages_.clear();
    remote_pages_.clear();
    class_of_.clear();
    local_pages_.reserve(pairs);
    remote_pages_.reserve(pairs);
    classes_.clear();
    members_.clear();
    known_.clear();
    current_ = 0;
  }

  void add(uint32_t local_use, uint64_t local, uint32_t remote_use, uint64_t remote,
           uint64_t bytes) {
    const uint64_t a = local_scales_[local_use].number(local);
    const uint64_t b = remote_scales_[remote_use].number(remote);
    const Class c{local_use, remote_use, bytes, static_cast<uint32_t>(a >> 32),
                  static_cast<uint32_t>(b >> 32)};
    if (classes_.empty() || classes_[current_] != c) change(c);
    Members& m = members_[current_];
    if (m.count++ == 0) {
      m.local_first = local;
      m.remote_first = remote;
    } else {
      m.local_run &= local == m.local_next;
      m.remote_run &= remote == m.remote_next;
    }
    m.local_next = local + bytes;
    m.remote_next = remote + bytes;
    local_pages_.push_back(static_cast<uint32_t>(a));
    remote_pages_.push_back(static_cast<uint32_t>(b));
    if (!class_of_.empty()) class_of_.push_back(current_);
  }

  size_t classes() const { return classes_.size(); }

  void finish(AgentPlan& plan) {
    if (classes_.size() > 1) sort();
    plan.pages.reserve(2);
    plan.pages.push_back(std::move(local_pages_));
    plan.pages.push_back(std::move(remote_pages_));
    plan.parts.reserve(classes_.size());
    uint64_t first = 0;
    for (size_t i = 0; i < classes_.size(); ++i) {
      const Class& c = classes_[i];
      const Members& m = members_[i];
      AgentPart& part = plan.parts.emplace_back();
      part.local = local_.uses()[c.local_use].local;
      part.remote = remote_.uses()[c.remote_use].remote;
      part.local_layout = layout(m.local_run, m.local_first, local_scales_[c.local_use],
                                 c.local_window, m.count, &plan.pages[0][first], c.bytes);
      part.remote_layout = layout(m.remote_run, m.remote_first, remote_scales_[c.remote_use],
                                  c.remote_window, m.count, &plan.pages[1][first], c.bytes);
      first += m.count;
    }
  }

 private:
  void change(const Class& c) {
    const auto next = static_cast<uint32_t>(classes_.size());
    // With the second class, each pair's is written down.
    if (next == 1) class_of_.assign(local_pages_.size(), 0);
    auto [at, made] = known_.try_emplace(c, next);
    current_ = at->second;
    if (!made) return;
    classes_.push_back(c);
    members_.emplace_back();
  }

  // Brings the pages of each class together.
  void sort() {
    std::vector<uint64_t> at(classes_.size(), 0);
    for (size_t i = 1; i < at.size(); ++i) at[i] = at[i - 1] + members_[i - 1].count;
    std::vector<uint32_t> local(local_pages_.size());
    std::vector<uint32_t> remote(remote_pages_.size());
    for (size_t i = 0; i < class_of_.size(); ++i) {
      const uint64_t to = at[class_of_[i]]++;
      local[to] = local_pages_[i];
      remote[to] = remote_pages_[i];
    }
    local_pages_ = std::move(local);
    remote_pages_ = std::move(remote);
  }

  static Layout layout(bool run, uint64_t first, const Scale& scale, uint64_t window,
                       uint64_t count, const uint32_t* pages, uint64_t bytes) {
    if (run) return Layout::contiguous(first, count * bytes);
    return Layout::paged(scale.lowest + (window << 32) * scale.unit, {pages, count}, scale.unit,
                         bytes)
        .measured();
  }

  const AgentList& local_;
  const AgentList& remote_;
  std::vector<Scale> local_scales_, remote_scales_;   // by use
  std::vector<uint32_t> local_pages_, remote_pages_;  // of each pair
  std::vector<uint32_t> class_of_;                    // of each pair; empty while there is one
  std::vector<Class> classes_;
  std::vector<Members> members_;
  absl::flat_hash_map<Class, uint32_t> known_;
  uint32_t current_ = 0;
};

template <typename Index>
absl::StatusOr<AgentPlan> layouts_of(const AgentList& local, const AgentList& remote, size_t pairs,
                                     Index&& index) {
  AgentPlan plan;
  Planner planner(local, remote);
  planner.begin(pairs, 0);
  uint64_t sizes = 0;  // all that occur, or-ed
  uint64_t last = 0;
  std::pair<const AgentUse*, const AgentUse*> ranges{};
  uint64_t local_next = 0;
  uint64_t remote_next = 0;
  absl::flat_hash_set<uint64_t> different;
  absl::Status status = for_each_pair(
      local, remote, pairs, index, [&](const AgentList::Place& a, const AgentList::Place& b) {
        const uint64_t bytes = a.segment->bytes;
        plan.bytes += bytes;
        const std::pair where{&local.uses()[a.segment->use], &remote.uses()[b.segment->use]};
        if (where != ranges || a.offset != local_next || b.offset != remote_next) {
          ++plan.descriptors;
        }
        ranges = where;
        local_next = a.offset + bytes;
        remote_next = b.offset + bytes;
        if (bytes != last) {
          last = bytes;
          sizes |= bytes;
          if (different.size() <= kMaxAgentSizes) different.insert(bytes);
        }
        // Not kept if there are too many sizes: no use in sorting them any further.
        if (different.size() <= kMaxAgentSizes) {
          planner.add(a.segment->use, a.offset, b.segment->use, b.offset, bytes);
        }
      });
  if (!status.ok()) return status;
  if (different.size() > kMaxAgentSizes) {
    planner.begin(pairs, sizes & (~sizes + 1));
    status = for_each_pair(
        local, remote, pairs, index, [&](const AgentList::Place& a, const AgentList::Place& b) {
          uint64_t done = 0;
          for (uint64_t rest = a.segment->bytes; rest != 0;) {
            const uint64_t piece = std::bit_floor(rest);
            planner.add(a.segment->use, a.offset + done, b.segment->use, b.offset + done, piece);
            done += piece;
            rest -= piece;
          }
        });
    if (!status.ok()) return status;
  }
  planner.finish(plan);
  return plan;
}

}  // namespace

absl::StatusOr<AgentPlan> plan_agent_transfer(const AgentList& local,
                                              absl::Span<const int64_t> local_indices,
                                              const AgentList& remote,
                                              absl::Span<const int64_t> remote_indices) {
  return plan_pairs<AgentPlan>(local_indices, remote_indices, [&](size_t pairs, auto&& index) {
    return layouts_of(local, remote, pairs, index);
  });
}

absl::StatusOr<AgentPlan> plan_agent_transfer(const AgentList& local, const AgentList& remote) {
  return plan_pairs<AgentPlan>(local, remote, [&](size_t pairs, auto&& index) {
    return layouts_of(local, remote, pairs, index);
  });
}

}  // namespace baton::kvtransfer
