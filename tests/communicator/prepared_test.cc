// What a prepared program says of its steps, beside looking at every pair of them.
#include "collectives/executor/prepared.h"

#include <random>

#include "tests/test.h"

namespace baton::collectives::executor {
namespace {

using schedules::BufferName;
using schedules::ScheduleSpec;
using schedules::Step;
using Part = std::pair<BufferName, uint32_t>;

struct Parts {
  std::set<Part> written, read;
};

bool meet(const std::set<Part>& a, const std::set<Part>& b) {
  return std::any_of(a.begin(), a.end(), [&](const Part& part) { return b.contains(part); });
}

// What step touches which parts, places that are the same memory being the same part.
class Reader {
 public:
  Reader(const ScheduleSpec& spec, uint32_t rank, bool in_place, uint32_t scratch_parts)
      : spec_(spec), rank_(rank), in_place_(in_place), scratch_parts_(scratch_parts) {}

  Parts parts_of(const Step& step) const {
    Parts parts;
    if (step.kind != Step::Kind::kSend) add(parts.written, step.target, step.parts);
    if (step.kind == Step::Kind::kFold) {
      add(parts.read, {BufferName::kScratch, step.source.part}, scratch_parts_);
      add(parts.read, {BufferName::kInput, step.target.part}, 1);
    } else if (step.kind != Step::Kind::kReceive) {
      add(parts.read, step.source, step.parts);
    }
    return parts;
  }

 private:
  void add(std::set<Part>& to, const schedules::Place& place, uint32_t count) const {
    const Collective what = spec_.collective;
    const bool own_input = what == Collective::kAllGather || what == Collective::kGather;
    const bool own_output = what == Collective::kReduceScatter || what == Collective::kScatter;
    const bool own = (place.buffer == BufferName::kInput && own_input) ||
                     (place.buffer == BufferName::kOutput && own_output);
    const bool moves = in_place_ && place.buffer == BufferName::kInput;
    for (uint32_t i = 0; i < count; ++i) {
      to.insert({moves ? BufferName::kOutput : place.buffer, (own ? rank_ : place.part) + i});
    }
  }

  const ScheduleSpec& spec_;
  const uint32_t rank_;
  const bool in_place_;
  const uint32_t scratch_parts_;
};

void compare(const schedules::Program& program, const ScheduleSpec& spec, uint32_t rank,
             bool in_place) {
  const Reader reader(spec, rank, in_place, program.scratch_parts);
  const PreparedProgram prepared = prepare(program, spec.collective, rank, in_place);
  const std::vector<Step>& steps = prepared.steps;
  std::vector<Parts> parts;
  for (const Step& step : steps) parts.push_back(reader.parts_of(step));
  ASSERT_EQ(prepared.first_hazard.size(), steps.size() + 1);
  for (uint32_t s = 0; s < steps.size(); ++s) {
    SCOPED_TRACE(absl::StrFormat("%s, rank %u, step %u%s", spec.to_string(), rank, s,
                                 in_place ? ", in place" : ""));
    std::vector<uint32_t> hazards;
    for (uint32_t before = 0; before < s; ++before) {
      if (steps[before].kind == Step::Kind::kSend && meet(parts[before].read, parts[s].written)) {
        hazards.push_back(before);
      }
    }
    EXPECT_EQ(hazards,
              std::vector<uint32_t>(prepared.hazards.begin() + prepared.first_hazard[s],
                                    prepared.hazards.begin() + prepared.first_hazard[s + 1]));

    bool read_later = false;
    for (uint32_t later = s + 1; later < steps.size(); ++later) {
      read_later |= meet(parts[later].read, parts[s].written);
    }
    EXPECT_EQ(prepared.final_write[s], !parts[s].written.empty() && !read_later);

    uint32_t free_from = PreparedProgram::kNoStep;
    const bool receives =
        steps[s].kind == Step::Kind::kReceive || steps[s].kind == Step::Kind::kReceiveReduce;
    if (receives && !parts[s].written.empty() && !meet(parts[s].read, parts[s].written)) {
      for (free_from = s; free_from > 0; --free_from) {
        const Parts& before = parts[free_from - 1];
        if (meet(before.read, parts[s].written) || meet(before.written, parts[s].written)) break;
      }
    }
    EXPECT_EQ(prepared.free_from[s], free_from);
  }
}

// Also what no schedule of ours does: parts that are written twice and never read, ranges that
// overlap.
TEST(PreparedProgram, SaysWhatEveryPairOfStepsSays) {
  std::mt19937 random(7);
  for (int round = 0; round < 1000; ++round) {
    const ScheduleSpec spec{.collective = static_cast<Collective>(random() % kCollectives),
                            .ranks = 6};
    schedules::Program program;
    program.scratch_parts = 4;
    for (size_t steps = 1 + random() % 40; steps > 0; --steps) {
      const auto place = [&random] {
        return schedules::Place{static_cast<BufferName>(random() % 3),
                                static_cast<uint32_t>(random() % 6)};
      };
      program.steps.push_back({.kind = static_cast<Step::Kind>(random() % 5),
                               .peer = static_cast<uint32_t>(1 + random() % 3),
                               .parts = static_cast<uint32_t>(random() % 4),
                               .source = place(),
                               .target = place()});
    }
    compare(program, spec, 2, round % 2 == 0);
  }
}

}  // namespace
}  // namespace baton::collectives::executor
