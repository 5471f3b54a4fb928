// Finding the sends that a step must wait for, and when the place of a message is free.
#include "collectives/executor/prepared.h"

#include <algorithm>
#include <map>
#include <optional>

namespace baton::collectives::executor {

using schedules::BufferName;
using schedules::Step;

namespace {

// A range of parts in memory: places in different buffers that are the same memory compare equal.
struct Range {
  BufferName buffer;
  uint32_t begin, end;
  bool overlaps(const Range& other) const {
    return buffer == other.buffer && begin < other.end && other.begin < end;
  }
};

Range range_of(const schedules::Place& place, uint32_t parts, Collective collective, uint32_t rank,
               bool in_place) {
  Range range{place.buffer, place.part, place.part + parts};
  // The smaller buffer has one part only, whatever it is called.
  const bool small =
      place.buffer == BufferName::kOutput
          ? collective == Collective::kReduceScatter || collective == Collective::kScatter
          : place.buffer == BufferName::kInput &&
                (collective == Collective::kAllGather || collective == Collective::kGather);
  if (small) range.begin = rank, range.end = rank + parts;
  if (in_place && range.buffer == BufferName::kInput) range.buffer = BufferName::kOutput;
  return range;
}

std::optional<Range> written(const Step& step, Collective collective, uint32_t rank,
                             bool in_place) {
  if (step.kind == Step::Kind::kSend || step.parts == 0) return std::nullopt;
  return range_of(step.target, step.parts, collective, rank, in_place);
}

// What a step reads, but for its message.
std::vector<Range> read_by(const Step& step, uint32_t scratch_parts, Collective collective,
                           uint32_t rank, bool in_place) {
  std::vector<Range> read;
  if (step.kind == Step::Kind::kFold) {
    read.push_back({BufferName::kScratch, step.source.part, step.source.part + scratch_parts});
  } else if (step.kind != Step::Kind::kReceive) {
    read.push_back(range_of(step.source, step.parts, collective, rank, in_place));
  }
  if (step.kind == Step::Kind::kReduce) {
    read.push_back(range_of(step.target, step.parts, collective, rank, in_place));
  }
  if (step.kind == Step::Kind::kFold) {  // our own contribution
    const schedules::Place own{BufferName::kInput, step.target.part};
    read.push_back(range_of(own, 1, collective, rank, in_place));
  }
  return read;
}

bool receives(const Step& step) {
  return step.kind == Step::Kind::kReceive || step.kind == Step::Kind::kReceiveReduce;
}

bool any_overlap(const std::vector<Range>& ranges, const Range& range) {
  return std::any_of(ranges.begin(), ranges.end(),
                     [&](const Range& one) { return one.overlaps(range); });
}

}  // namespace

PreparedProgram prepare(schedules::Program program, Collective collective, uint32_t rank,
                        bool in_place) {
  PreparedProgram out;
  out.steps = std::move(program.steps);
  out.scratch_parts = program.scratch_parts;
  out.max_message_parts = program.max_message_parts;
  std::vector<Range> sent;  // parallel to out.sends
  for (uint32_t s = 0; s < out.steps.size(); ++s) {
    const Step& step = out.steps[s];
    out.first_hazard.push_back(static_cast<uint32_t>(out.hazards.size()));
    if (const auto range = written(step, collective, rank, in_place); range.has_value()) {
      for (size_t i = 0; i < sent.size(); ++i) {
        if (sent[i].overlaps(*range)) out.hazards.push_back(out.sends[i]);
      }
    }
    if (step.kind == Step::Kind::kSend) {
      out.sends.push_back(s);
      sent.push_back(range_of(step.source, step.parts, collective, rank, in_place));
    }
  }
  out.first_hazard.push_back(static_cast<uint32_t>(out.hazards.size()));

  out.final_write.resize(out.steps.size());
  std::vector<Range> read;  // by later steps
  for (size_t s = out.steps.size(); s-- > 0;) {
    const Step& step = out.steps[s];
    if (const auto range = written(step, collective, rank, in_place); range.has_value()) {
      out.final_write[s] = !any_overlap(read, *range);
    }
    const auto more = read_by(step, out.scratch_parts, collective, rank, in_place);
    read.insert(read.end(), more.begin(), more.end());
  }

  out.next_grant.resize(out.steps.size(), PreparedProgram::kNoStep);
  out.free_from.resize(out.steps.size(), PreparedProgram::kNoStep);
  std::map<uint32_t, std::vector<uint32_t>> received;  // steps, by peer
  for (uint32_t s = 0; s < out.steps.size(); ++s) {
    const Step& step = out.steps[s];
    if (!receives(step)) continue;
    std::vector<uint32_t>& earlier = received[step.peer];
    if (earlier.size() < schedules::kMessagesAhead) {
      out.first_grants.push_back(s);
    } else {
      out.next_grant[earlier[earlier.size() - schedules::kMessagesAhead]] = s;
    }
    earlier.push_back(s);
    const auto target = written(step, collective, rank, in_place);
    const auto reads = [&](const Step& one) {
      return any_overlap(read_by(one, out.scratch_parts, collective, rank, in_place), *target);
    };
    if (!target.has_value() || reads(step)) continue;
    uint32_t from = s;
    for (; from > 0; --from) {
      const Step& before = out.steps[from - 1];
      const auto other = written(before, collective, rank, in_place);
      if (reads(before) || (other.has_value() && other->overlaps(*target))) break;
    }
    out.free_from[s] = from;
  }
  return out;
}

}  // namespace baton::collectives::executor
