// A seeded schedule of groups in virtual time: over a fabric that loses, repeats and holds up, with
// links that are slow or down, ranks that abort or leave, processes that stop or die; and then
// whoever is left goes on in place, with others or without.
#pragma once

#include "tests/communicator/sim_calls.h"
#include "tests/communicator/sim_nodes.h"

namespace baton {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

// What happened, over all schedules.
struct Tally {
  std::map<std::string, uint64_t> times;
  uint64_t& operator[](const std::string& what) { return times[what]; }
};

// A life of some processes: a group of some of them, and groups of that, in calls that go wrong or
// not; then the next group of those that are left and of others.
class Lives : public SimNodes {
 public:
  static constexpr Time kTimeout = seconds(4);
  static constexpr Time kHealed = seconds(6);  // whatever stops or is cut off is back before

  Lives(uint64_t seed, Tally& seen) : Lives(seed, seen, std::mt19937_64(seed * 7919 + 1)) {}
  ~Lives() {
    calls_.clear();
    for (size_t node = 0; node < nodes_; ++node) leave(world_, node);
    for (auto& group : groups_) leave_all(*group);
    if (!HasFatalFailure()) drive_for(milliseconds(40));
    leaving_.clear();
  }

  void run(size_t acts) {
    for (size_t act = 0; act < acts && !testing::Test::HasFailure(); ++act) {
      SCOPED_TRACE(testing::Message() << "act " << act << " at " << seconds_of(now()) << " s");
      if (living().empty()) break;  // all have died
      next_world();
      if (testing::Test::HasFailure()) return;
      make_groups();
      if (testing::Test::HasFailure()) return;
      begin_calls();
      for (size_t faults = pick(3); faults > 0; --faults) break_something();
      finish_calls();
      if (testing::Test::HasFailure()) return;
    }
    for (const std::string& violation : fabric_.violations()) ADD_FAILURE() << violation;
  }

 private:
  // A group: its communicators, by node.
  struct Group {
    std::vector<size_t> members;  // by rank
    std::map<size_t, std::unique_ptr<Communicator>> at;
    bool hurt = false;  // something happened that its calls may fail for

    bool has(size_t node) const {
      return std::find(members.begin(), members.end(), node) != members.end();
    }
  };
  struct Call {
    Group* group;
    size_t node;
    std::unique_ptr<SimCall> call;
  };

  Lives(uint64_t seed, Tally& seen, std::mt19937_64 random)
      : SimNodes({.seed = seed,
                  .nodes = 2 + random() % 4,
                  .rails = 1 + random() % 2,
                  .link = {.bytes_per_second = 0.2e9,
                           .loss = static_cast<double>(random() % 2) * 0.01,
                           .duplicate = static_cast<double>(random() % 2) * 0.01,
                           .reorder = static_cast<double>(random() % 2) * 0.1}},
                 512),
        seen_(seen),
        random_(random) {}

  static bool HasFatalFailure() { return testing::Test::HasFatalFailure(); }
  size_t pick(size_t below) { return std::uniform_int_distribution<size_t>(0, below - 1)(random_); }
  bool chance(size_t one_in) { return pick(one_in) == 0; }
  template <typename T>
  std::vector<T> shuffled(std::vector<T> all) {
    std::shuffle(all.begin(), all.end(), random_);
    return all;
  }
  std::vector<size_t> living() const {
    std::vector<size_t> all;
    for (size_t node = 0; node < nodes_; ++node) {
      if (alive(node)) all.push_back(node);
    }
    return all;
  }

  // --- leaving ---
  // Virtual time stands still in a destructor, which waits for what is on its way: mostly that goes
  // out before.
  void leave(Group& group, size_t node, bool at_once = false) {
    const auto found = group.at.find(node);
    if (found == group.at.end()) return;
    const bool idle = alive(node) && endpoints_[node]->worker().stats().open_transfers == 0;
    if (!idle) found->second->abort(absl::CancelledError("it leaves"));
    for (Call& call : calls_) {
      if (call.group == &group && call.node == node) {
        call.call->abandon(absl::CancelledError("its communicator was destroyed"));
      }
    }
    if (!idle && !at_once) leaving_.push_back(std::move(found->second));
    group.at.erase(found);
    ++seen_["left"];
  }
  void leave_all(Group& group) {
    while (!group.at.empty()) leave(group, group.at.begin()->first);
  }

  // --- the next world ---
  // Some of the living, in any order: those that have a communicator reconfigure it.
  void next_world() {
    std::vector<size_t> members = shuffled(living());
    members.resize(1 + pick(members.size()));
    if (!chance(4) && members.size() < 2) members = shuffled(living());
    for (size_t attempt = 0;; ++attempt) {
      for (size_t node = 0; node < nodes_; ++node) {
        const bool goes_on =
            alive(node) && std::find(members.begin(), members.end(), node) != members.end();
        if (!goes_on) leave(world_, node);
      }
      world_.members = members;
      world_.hurt = attempt < 2 && chance(4) && disturb_start(members);
      if (enter(members)) return;
      if (HasFatalFailure() || testing::Test::HasFailure()) return;
      ++seen_["starts that failed"];
      drive_for(kHealed);
      std::erase_if(members, [&](size_t node) { return !alive(node); });
      if (members.empty()) members = living();
    }
  }

  // True if all are in the next world.
  bool enter(const std::vector<size_t>& members) {
    const uint64_t uuid = ++uuids_;
    std::vector<Handle> handles;
    for (const size_t node : members) handles.push_back(handles_[node]);
    std::map<size_t, Work> entering;
    std::map<size_t, absl::Status> how;
    const Time begun = now();
    for (const size_t node : shuffled(members)) {
      if (!alive(node)) continue;
      if (chance(3)) drive_for(microseconds(pick(3000)));  // not all at once
      if (!alive(node)) continue;
      if (world_.at.contains(node)) {
        auto work = world_.at[node]->reconfigure(handles, uuid, kTimeout);
        EXPECT_TRUE(work.ok()) << work.status();
        if (!work.ok()) return false;
        entering[node] = *work;
        ++seen_["reconfigured"];
      } else {
        auto comm = Communicator::create(endpoints_[node], handles, sim_group(uuid, kTimeout));
        EXPECT_TRUE(comm.ok()) << comm.status();
        if (!comm.ok()) return false;
        world_.at[node] = *std::move(comm);
        ++seen_["created"];
      }
    }
    const auto over = [&](size_t node) {
      if (!alive(node) || how.contains(node)) return true;
      Communicator& comm = *world_.at[node];
      if (entering.contains(node)) {
        if (auto ended = comm.test(entering[node])) how[node] = *ended;
      } else if (comm.state() != GroupState::kStarting) {
        how[node] = comm.status();
      }
      return how.contains(node);
    };
    const bool all = drive([&] { return std::all_of(members.begin(), members.end(), over); },
                           kTimeout + kHealed);
    EXPECT_TRUE(all) << "a reconfigure() or create() hangs since " << seconds_of(begun) << " s";
    bool well = all;
    for (const auto& [node, status] : how) {
      well &= status.ok();
      if (world_.hurt) continue;
      EXPECT_EQ(status, absl::OkStatus()) << "node " << node;
      EXPECT_EQ(world_.at[node]->ranks(), static_cast<int>(members.size()));
    }
    return well && how.size() == members.size();
  }

  // Something that a start may fail for. False: not this time.
  bool disturb_start(const std::vector<size_t>& members) {
    const size_t victim = members[pick(members.size())];
    const Time when = now() + microseconds(pick(3000));
    if (chance(3)) {
      if (living().size() < 3) return false;
      ++seen_["deaths at a start"];
      fabric_.kill(places_[victim], when);
      return true;
    }
    if (chance(2)) {
      ++seen_["stops at a start"];
      stop(victim, when, milliseconds(1 + pick(5500)));
      return true;
    }
    if (!world_.at.contains(victim)) return false;
    ++seen_["aborts at a start"];
    fabric_.at(when, [this, victim] {
      if (world_.at.contains(victim)) {
        world_.at[victim]->abort(absl::CancelledError("by the schedule"));
      }
    });
    return true;
  }

  // --- groups of the world ---
  void make_groups() {
    for (size_t g = pick(3); g > 0; --g) {
      chance(2) ? split() : subgroup();
      if (HasFatalFailure()) return;
    }
  }

  void subgroup() {
    auto group = std::make_unique<Group>();
    std::vector<int> ranks;
    for (size_t rank = 0; rank < world_.members.size(); ++rank) {
      ranks.push_back(static_cast<int>(rank));
    }
    ranks = shuffled(ranks);
    ranks.resize(1 + pick(ranks.size()));
    group->hurt = world_.hurt;
    for (const int rank : ranks) group->members.push_back(world_.members[rank]);
    for (const size_t node : group->members) {
      if (!alive(node) || !world_.at.contains(node)) continue;
      group->at[node] = must(world_.at[node]->subgroup(ranks, sim_group(0, kTimeout)));
    }
    ++seen_["subgroups"];
    groups_.push_back(std::move(group));
  }

  // All of the world split it; now and then one dies or aborts meanwhile.
  void split() {
    std::map<size_t, std::unique_ptr<SteppedSplit>> splits;
    std::map<int, std::vector<std::pair<int, size_t>>> wanted;  // keys and nodes, by color
    for (const size_t node : world_.members) {
      if (!alive(node) || !world_.at.contains(node)) continue;
      const int color = static_cast<int>(pick(3)) - (chance(4) ? 1 : 0);
      const int key = static_cast<int>(pick(3));
      splits[node] = std::make_unique<SteppedSplit>(*world_.at[node], color, key);
      if (color >= 0) wanted[color].emplace_back(key, node);
    }
    ++seen_["splits"];
    if (chance(6)) break_something();
    std::map<size_t, absl::Status> how;
    const bool over = drive(
        [&] {
          for (const auto& [node, split] : splits) {
            if (how.contains(node) || !alive(node)) continue;
            if (!split->work.ok()) {
              how[node] = split->work.status();
            } else if (!world_.at.contains(node)) {
              how[node] = absl::CancelledError("it has left");
            } else if (auto ended = world_.at[node]->test(*split->work)) {
              how[node] = *ended;
            }
          }
          return std::all_of(splits.begin(), splits.end(), [&](const auto& split) {
            return how.contains(split.first) || !alive(split.first);
          });
        },
        kTimeout + kHealed);
    ASSERT_TRUE(over) << "a split() hangs";
    for (auto& [color, members] : wanted) {
      // Where keys are equal the lower rank comes first.
      std::stable_sort(members.begin(), members.end(),
                       [](const auto& a, const auto& b) { return a.first < b.first; });
      auto group = std::make_unique<Group>();
      group->hurt = world_.hurt;
      for (const auto& [key, node] : members) group->members.push_back(node);
      for (const size_t node : group->members) {
        if (!alive(node) || !world_.at.contains(node)) continue;  // it may have left since
        if (world_.hurt && !how[node].ok()) continue;
        ASSERT_EQ(how[node], absl::OkStatus()) << "node " << node;
        auto comm = must(splits[node]->finish(sim_group(0, kTimeout)));
        ASSERT_EQ(comm->ranks(), static_cast<int>(group->members.size()));
        ASSERT_EQ(group->members[comm->rank()], node);
        group->at[node] = std::move(comm);
      }
      groups_.push_back(std::move(group));
    }
  }

  std::vector<Group*> all_groups() {
    std::vector<Group*> all = {&world_};
    for (auto& group : groups_) {
      if (!group->at.empty()) all.push_back(group.get());
    }
    return all;
  }

  // --- calls ---
  void begin_calls() {
    for (Group* group : shuffled(all_groups())) {
      std::vector<std::array<size_t, 3>> plan(1 + pick(3));
      for (auto& [kind, count, root] : plan) {
        kind = pick(SimCall::kKinds);
        count = chance(3) ? 1 + pick(50000) : 1 + pick(2000);
        root = pick(group->members.size());
      }
      for (const size_t node : shuffled(group->members)) {
        if (!alive(node) || !group->at.contains(node)) continue;
        for (const auto& [kind, count, root] : plan) {
          calls_.push_back(
              {group, node,
               std::make_unique<SimCall>(*group->at[node], kind, count, static_cast<int>(root))});
        }
      }
    }
  }

  void finish_calls() {
    const bool over = drive(
        [&] {
          bool all = true;
          for (const Call& call : calls_) {
            if (call.call->ended() || !alive(call.node)) continue;
            all &= call.call->ended(*call.group->at[call.node]);
          }
          return all;
        },
        kTimeout + kHealed);
    ASSERT_TRUE(over) << "a call hangs";
    for (const Call& call : calls_) {
      if (!alive(call.node)) continue;
      const absl::Status& status = call.call->status();
      ++seen_[status.ok() ? "calls that ended well" : "calls that failed"];
      if (status.ok()) continue;
      EXPECT_FALSE(status.message().empty());
      EXPECT_TRUE(call.group->hurt)
          << "nothing happened to this group of " << call.group->members.size() << ", and at node "
          << call.node << " it says " << status;
    }
    // A first call to a process that has stopped, or over links that are down, is given up soon.
    if (now() < healed_at_) drive_for(healed_at_ - now());
    const bool slowly = chance(2);
    drive_for(milliseconds(slowly ? 40 : 3));
    if (slowly) leaving_.clear();
    for (const Call& call : calls_) call.call->check_nothing_came_late();
    for (const Call& call : before_) call.call->check_nothing_came_late();
    before_ = std::move(calls_);
    calls_.clear();
    for (auto& group : groups_) leave_all(*group);
    for (const auto& [node, comm] : world_.at) world_.hurt |= !comm->status().ok();
    if (chance(8)) leave(world_, world_.members[pick(world_.members.size())]);
  }

  // --- what goes wrong ---
  void hurt(const std::function<bool(const Group&)>& which) {
    for (Group* group : all_groups()) group->hurt |= which(*group);
  }

  void break_something() {
    const Time when = now() + microseconds(pick(2500));
    const size_t victim = world_.members[pick(world_.members.size())];
    const size_t other = (victim + 1 + pick(nodes_ - 1)) % nodes_;
    const auto with_victim = [&](const Group& group) { return group.has(victim); };
    switch (pick(10)) {
      case 0:
      case 1:
      case 2: {  // of one group: the others must not notice
        const std::vector<Group*> all = all_groups();
        Group* const group = all[pick(all.size())];
        const size_t node = group->members[pick(group->members.size())];
        group->hurt = true;
        if (chance(2)) slow_down(node);
        const bool leaves = chance(3);
        ++seen_[leaves ? "left in a call" : "aborts"];
        fabric_.at(when, [this, group, node, leaves] {
          if (!group->at.contains(node) || !alive(node) || frozen(node)) return;
          group->at[node]->abort(absl::CancelledError("by the schedule"));
          if (leaves) leave(*group, node, true);
        });
        return;
      }
      case 3:
        if (living().size() < 3) return;
        ++seen_["deaths"];
        hurt(with_victim);
        fabric_.kill(places_[victim], when);
        return;
      case 4:
        ++seen_["stops"];
        stop(victim, when, milliseconds(1 + pick(400)));
        return;
      case 5:
        ++seen_["long stops"];
        hurt(with_victim);
        stop(victim, when, kTimeout + seconds(1));
        return;
      case 6:
      case 7:
        ++seen_["flaps"];
        cut(victim, other, 0, when, milliseconds(1 + pick(30)));
        return;
      case 8:
        ++seen_["links cut for long"];
        hurt([&](const Group& group) { return group.has(victim) && group.has(other); });
        for (const size_t rail : {0, 1}) cut(victim, other, rail, when, kTimeout + seconds(1));
        return;
      default:
        slow_down(victim);
        return;
    }
  }

  void stop(size_t node, Time when, Time span) {
    fabric_.freeze(places_[node], when, when + span);
    healed_at_ = std::max(healed_at_, when + span + milliseconds(1));
  }
  void cut(size_t a, size_t b, size_t rail, Time when, Time span) {
    fabric_.flap(places_[a], places_[b], rail, when, when + span);
    healed_at_ = std::max(healed_at_, when + span + milliseconds(1));
  }
  // For a while the links to a node are so slow that what is on its way does not arrive within the
  // time that an abort has.
  void slow_down(size_t node) {
    ++seen_["slow links"];
    for (size_t other = 0; other < nodes_; ++other) {
      if (other == node) continue;
      for (size_t rail = 0; rail < 2; ++rail) {
        set_rate(node, other, rail, 4e6);
        fabric_.at(now() + seconds(1),
                   [this, node, other, rail] { set_rate(node, other, rail, 0.2e9); });
      }
    }
  }
  void set_rate(size_t a, size_t b, size_t rail, double bytes_per_second) {
    sim::SimLink link = fabric_.link(places_[a], places_[b], rail);
    link.bytes_per_second = bytes_per_second;
    fabric_.set_link(places_[a], places_[b], rail, link);
  }

  Tally& seen_;
  std::mt19937_64 random_;
  uint64_t uuids_ = 0;
  Time healed_at_{};  // nothing is stopped or cut off any more
  Group world_;
  std::vector<std::unique_ptr<Group>> groups_;  // ever
  std::vector<Call> calls_, before_;            // of this act, and of the one before
  std::vector<std::unique_ptr<Communicator>> leaving_;
};

}  // namespace baton
