// One run of the verifier: all ranks of one channel against each other, symbolically. Internal to
// verify*.cc.
//
// A message here only tells that its sender may continue; the receiver reads the sender's memory
// when it takes the message, as late as any executor might. So a step that overwrites what an
// earlier send has not delivered waits for that delivery, as executors do. This is the slowest that
// any executor can be: one that copies messages on their way waits for less, and cannot deadlock
// where this one does not.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "collectives/schedules/schedule.h"
#include "tests/schedules/verify.h"

namespace baton::collectives::proof::symbolic {

// Symbolic values for the verifier: which contributions a place holds. Internal to verify*.cc.

// The content of one place.
struct Value {
  static constexpr uint32_t kNothing = UINT32_MAX;          // never written
  static constexpr uint32_t kNotFollowed = UINT32_MAX - 1;  // a part outside the sample

  // Up to 64 ranks: the set of contributors. Above: the sum of their fingerprints.
  uint64_t low = 0, high = 0;
  uint32_t tag = kNothing;  // the part whose contributions these are
  uint32_t step = 0;        // that wrote it
  bool final = false;       // a final step lies on its way

  bool written() const { return tag != kNothing; }
  bool followed() const { return tag < kNotFollowed; }
  bool same_contributions(const Value& other) const {
    return low == other.low && high == other.high && tag == other.tag;
  }
};

// The contributions of all ranks.
class Contributions {
 public:
  Contributions(const schedules::ScheduleSpec& spec, uint32_t sampled_parts);

  bool exact() const { return exact_; }
  // The contribution of one rank to one part.
  Value of(uint32_t rank, uint32_t part) const;
  // The contributions of all ranks.
  Value all(uint32_t part) const;
  // a (+) b. False if they are of different parts, or (exactly known) share a contributor.
  static bool combine(const Value& a, const Value& b, bool exact, Value& sum);

 private:
  bool followed(uint32_t part) const;
  uint32_t ranks_;
  bool exact_;
  std::vector<uint32_t> sample_;  // sorted
};

// Numbered places of one rank. With a sample most values are alike, and kept as a byte.
class Memory {
 public:
  Memory() = default;
  Memory(uint32_t places, bool exact);
  Value read(uint32_t place) const;
  void write(uint32_t place, const Value& value);

 private:
  bool exact_ = true;
  std::vector<Value> values_;    // exact: by place; else only those followed
  std::vector<uint8_t> state_;   // not exact: nothing, not followed, followed
  std::vector<uint32_t> where_;  // the places of values_
};

struct Message {
  uint32_t step = 0;   // of the sender
  uint32_t place = 0;  // the first one
  uint32_t parts = 0;
  uint32_t depth = 0;  // of the chain of messages that ends with it
};

// Messages from one rank to another, in order.
struct Link {
  uint32_t from = 0, to = 0;
  uint32_t taken = 0;
  std::vector<Message> sent;
};

struct Pending {  // a send whose source must stay
  uint32_t link = 0, number = 0;
  uint32_t place = 0, parts = 0;
};

struct RankState {
  schedules::Program program;
  std::vector<uint32_t> links;  // of each step that sends or receives
  uint32_t next = 0;
  Memory memory;
  std::vector<Pending> pending;
  uint32_t depth = 0;
  uint64_t parts_sent = 0, parts_reduced = 0;
  bool queued = true;
};

class Run {
 public:
  Run(const schedules::ScheduleSpec& spec, const Contributions& contributions, uint32_t channel)
      : spec_(spec),
        contributions_(contributions),
        channel_(channel),
        parts_(schedules::parts_of(spec)),
        ranks_(spec.ranks) {}
  absl::Status load(const ProgramSource& source);

  // Runs everything from the beginning. `in_place`: input and output of each rank are one memory.
  absl::Status run(bool in_place, VerifyReport& report);

 private:
  absl::Status error(uint32_t rank, uint32_t step, const std::string& what) const;
  bool reduces() const { return schedules::reduces(spec_.collective); }
  bool has_input(uint32_t rank, uint32_t part) const;
  bool has_output(uint32_t rank, uint32_t part) const;
  Value expected(uint32_t rank, uint32_t part) const;

  // Inputs, then outputs (the same in place), then scratch.
  uint32_t place_of(const schedules::Place& place) const;
  void start(uint32_t rank);
  void wake(uint32_t rank);

  // Runs steps until one must wait.
  absl::Status advance(uint32_t rank);
  absl::Status check_range(uint32_t rank, const schedules::Place& place, uint32_t parts,
                           bool write) const;
  absl::Status check_written(uint32_t rank, const schedules::Place& place, uint32_t parts) const;

  // True if an earlier send may still be reading this.
  bool must_stay(uint32_t rank, uint32_t place, uint32_t parts);
  absl::Status step(uint32_t rank, bool& waits);
  absl::Status combine(uint32_t rank, const Value& a, const Value& b, Value& sum) const;
  absl::Status fold(uint32_t rank, const schedules::Step& step);
  absl::Status check_end() const;
  void count(VerifyReport& report) const;
  std::string why_waiting(uint32_t rank) const;

  const schedules::ScheduleSpec& spec_;
  const Contributions& contributions_;
  const uint32_t channel_;
  const uint32_t parts_;
  bool in_place_ = false;
  std::vector<RankState> ranks_;
  std::vector<Link> links_;
  std::vector<Value> totals_;
  std::vector<uint32_t>* ready_ = nullptr;
};

}  // namespace baton::collectives::proof::symbolic
