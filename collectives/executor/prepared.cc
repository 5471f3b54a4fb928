// Finding the sends that a step must wait for, and when the place of a message is free.
#include "collectives/executor/prepared.h"

#include <algorithm>
#include <array>
#include <map>

#include "absl/types/span.h"

namespace baton::collectives::executor {

using schedules::BufferName;
using schedules::Step;

namespace {

// A range of parts in memory: places in different buffers that are the same memory are equal.
struct Range {
  BufferName buffer = BufferName::kInput;
  uint32_t begin = 0, end = 0;
};

// The memory that a step touches, except for its message. Unused ranges are empty.
struct Touched {
  Range written;
  std::array<Range, 2> read;
};

class Ranges {
 public:
  Ranges(Collective collective, uint32_t rank, bool in_place, uint32_t scratch_parts)
      : collective_(collective), rank_(rank), in_place_(in_place), scratch_parts_(scratch_parts) {}

  Touched of(const Step& step) const {
    Touched touched;
    const Range source = at(step.source, step.parts);
    const Range target = at(step.target, step.parts);
    if (step.kind != Step::Kind::kSend) touched.written = target;
    switch (step.kind) {
      case Step::Kind::kReceive:
        break;
      case Step::Kind::kFold:
        touched.read = {
            Range{BufferName::kScratch, step.source.part, step.source.part + scratch_parts_},
            at({BufferName::kInput, step.target.part}, 1)};  // our own contribution
        break;
      default:
        touched.read[0] = source;
    }
    return touched;
  }

 private:
  Range at(const schedules::Place& place, uint32_t parts) const {
    Range range{place.buffer, place.part, place.part + parts};
    // The smaller buffer has one part only, whatever it is called.
    const bool small =
        place.buffer == BufferName::kOutput
            ? collective_ == Collective::kReduceScatter || collective_ == Collective::kScatter
            : place.buffer == BufferName::kInput &&
                  (collective_ == Collective::kAllGather || collective_ == Collective::kGather);
    if (small) range.begin = rank_, range.end = rank_ + parts;
    if (in_place_ && range.buffer == BufferName::kInput) range.buffer = BufferName::kOutput;
    return range;
  }

  const Collective collective_;
  const uint32_t rank_;
  const bool in_place_;
  const uint32_t scratch_parts_;
};

// A value for each part of each buffer.
template <typename T>
class PerPart {
 public:
  PerPart(const std::vector<Touched>& steps, T first) {
    const auto fit = [&](const Range& range) {
      std::vector<T>& parts = buffers_[static_cast<size_t>(range.buffer)];
      if (parts.size() < range.end) parts.resize(range.end, first);
    };
    for (const Touched& step : steps) {
      fit(step.written);
      for (const Range& range : step.read) fit(range);
    }
  }
  absl::Span<T> in(const Range& range) {
    return absl::MakeSpan(buffers_[static_cast<size_t>(range.buffer)])
        .subspan(range.begin, range.end - range.begin);
  }

 private:
  std::array<std::vector<T>, 3> buffers_;
};

bool receives(const Step& step) {
  return step.kind == Step::Kind::kReceive || step.kind == Step::Kind::kReceiveReduce;
}

void find_hazards(const std::vector<Touched>& touched, PreparedProgram& out) {
  // The sends of each part, each with the one before it.
  struct Sent {
    uint32_t step, before;
  };
  constexpr uint32_t kNone = UINT32_MAX;
  std::vector<Sent> sent;
  PerPart<uint32_t> last(touched, kNone);
  for (uint32_t s = 0; s < out.steps.size(); ++s) {
    const auto first = static_cast<ptrdiff_t>(out.hazards.size());
    out.first_hazard.push_back(static_cast<uint32_t>(first));
    for (const uint32_t newest : last.in(touched[s].written)) {
      for (uint32_t i = newest; i != kNone; i = sent[i].before) out.hazards.push_back(sent[i].step);
    }
    std::sort(out.hazards.begin() + first, out.hazards.end());
    out.hazards.erase(std::unique(out.hazards.begin() + first, out.hazards.end()),
                      out.hazards.end());
    if (out.steps[s].kind != Step::Kind::kSend) continue;
    out.sends.push_back(s);
    for (uint32_t& newest : last.in(touched[s].read[0])) {
      sent.push_back({s, newest});
      newest = static_cast<uint32_t>(sent.size() - 1);
    }
  }
  out.first_hazard.push_back(static_cast<uint32_t>(out.hazards.size()));
}

void find_final_writes(const std::vector<Touched>& touched, PreparedProgram& out) {
  out.final_write.resize(touched.size());
  PerPart<uint8_t> read_later(touched, 0);
  for (size_t s = touched.size(); s-- > 0;) {
    const absl::Span<uint8_t> written = read_later.in(touched[s].written);
    out.final_write[s] =
        !written.empty() && std::find(written.begin(), written.end(), 1) == written.end();
    for (const Range& range : touched[s].read) {
      for (uint8_t& read : read_later.in(range)) read = 1;
    }
  }
}

void find_grants(const std::vector<Touched>& touched, PreparedProgram& out) {
  out.next_grant.resize(touched.size(), PreparedProgram::kNoStep);
  out.free_from.resize(touched.size(), PreparedProgram::kNoStep);
  std::map<uint32_t, std::vector<uint32_t>> received;  // steps, by peer
  PerPart<uint32_t> free_from(touched, 0);             // behind the last step that touched it
  for (uint32_t s = 0; s < touched.size(); ++s) {
    const Step& step = out.steps[s];
    const absl::Span<uint32_t> target = free_from.in(touched[s].written);
    const uint32_t from = target.empty() ? 0 : *std::max_element(target.begin(), target.end());
    for (const Range& range : touched[s].read) {
      for (uint32_t& part : free_from.in(range)) part = s + 1;
    }
    if (receives(step)) {
      std::vector<uint32_t>& earlier = received[step.peer];
      if (earlier.size() < schedules::kMessagesAhead) {
        out.first_grants.emplace_back(s, static_cast<uint32_t>(earlier.size() + 1));
      } else {
        out.next_grant[earlier[earlier.size() - schedules::kMessagesAhead]] = s;
      }
      earlier.push_back(s);
      const bool reads_it = std::find(target.begin(), target.end(), s + 1) != target.end();
      if (!target.empty() && !reads_it) out.free_from[s] = from;
    }
    for (uint32_t& part : target) part = s + 1;
  }
}

}  // namespace

PreparedProgram prepare(schedules::Program program, Collective collective, uint32_t rank,
                        bool in_place) {
  PreparedProgram out;
  out.steps = std::move(program.steps);
  out.scratch_parts = program.scratch_parts;
  out.max_message_parts = program.max_message_parts;
  const Ranges ranges(collective, rank, in_place, out.scratch_parts);
  std::vector<Touched> touched;
  touched.reserve(out.steps.size());
  for (const Step& step : out.steps) touched.push_back(ranges.of(step));
  find_hazards(touched, out);
  find_final_writes(touched, out);
  find_grants(touched, out);
  return out;
}

}  // namespace baton::collectives::executor
