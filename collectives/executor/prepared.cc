// Finding the sends that a step must wait for.
#include "collectives/executor/prepared.h"

#include <algorithm>
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
      out.final_write[s] = std::none_of(read.begin(), read.end(),
                                        [&](const Range& r) { return r.overlaps(*range); });
    }
    if (step.kind == Step::Kind::kFold) {
      const Range all{BufferName::kScratch, step.source.part,
                      step.source.part + static_cast<uint32_t>(out.scratch_parts)};
      read.push_back(all);
    } else if (step.kind != Step::Kind::kReceive) {
      read.push_back(range_of(step.source, step.parts, collective, rank, in_place));
    }
    if (step.kind == Step::Kind::kReduce) {
      read.push_back(range_of(step.target, step.parts, collective, rank, in_place));
    }
  }
  return out;
}

}  // namespace baton::collectives::executor
