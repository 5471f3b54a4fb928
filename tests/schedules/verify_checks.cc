// The checks of a symbolic run: before a step, for a combination, and at the end.
#include "tests/schedules/verify_run.h"

#include <algorithm>

#include "absl/strings/str_format.h"

namespace baton::collectives::proof::symbolic {

using Kind = schedules::Step::Kind;

namespace {

const char* name_of(Kind kind) {
  switch (kind) {
    case Kind::kSend:
      return "send";
    case Kind::kReceive:
      return "receive";
    case Kind::kReceiveReduce:
      return "receive_reduce";
    case Kind::kCopy:
      return "copy";
    case Kind::kFold:
      return "fold";
  }
  return "unknown step";
}

}  // namespace

absl::Status Run::error(uint32_t rank, uint32_t step, const std::string& what) const {
  std::string where;
  const std::vector<schedules::Step>& steps = ranks_[rank].program.steps;
  if (step < steps.size()) {
    where = absl::StrFormat("step %d (%s), ", step, name_of(steps[step].kind));
  }
  return absl::FailedPreconditionError(
      absl::StrFormat("%s%s: rank %d, %schannel %d: %s", spec_.to_string(),
                      in_place_ ? " in place" : "", rank, where, channel_, what));
}

bool Run::has_input(uint32_t rank, uint32_t part) const {
  switch (spec_.collective) {
    case Collective::kAllGather:
    case Collective::kGather:
      return part == rank;
    case Collective::kBroadcast:
    case Collective::kScatter:
      return rank == spec_.root;
    case Collective::kBarrier:
      return false;
    default:
      return true;
  }
}

bool Run::has_output(uint32_t rank, uint32_t part) const {
  switch (spec_.collective) {
    case Collective::kReduceScatter:
    case Collective::kScatter:
      return part == rank;
    case Collective::kReduce:
    case Collective::kGather:
      return rank == spec_.root;
    case Collective::kBarrier:
      return false;
    default:
      return true;
  }
}

Value Run::expected(uint32_t rank, uint32_t part) const {
  switch (spec_.collective) {
    case Collective::kAllGather:
    case Collective::kGather:
      return contributions_.of(part, part);
    case Collective::kBroadcast:
    case Collective::kScatter:
      return contributions_.of(spec_.root, part);
    case Collective::kAllToAll:
      return contributions_.of(part, rank);
    default:
      return totals_[part];
  }
}

// Inputs, then outputs (the same in place), then scratch.
uint32_t Run::place_of(const schedules::Place& place) const {
  const uint32_t output = in_place_ ? 0 : parts_;
  switch (place.buffer) {
    case schedules::BufferName::kInput:
      return place.part;
    case schedules::BufferName::kOutput:
      return output + place.part;
    default:
      return output + parts_ + place.part;
  }
}

absl::Status Run::check_range(uint32_t rank, const schedules::Place& place, uint32_t parts,
                              bool write) const {
  const RankState& state = ranks_[rank];
  const char* names[] = {"input", "output", "scratch"};
  const char* name = names[static_cast<int>(place.buffer) % 3];
  const uint32_t limit =
      place.buffer == schedules::BufferName::kScratch ? state.program.scratch_parts : parts_;
  if (place.part > limit || parts > limit - place.part) {
    return error(rank, state.next,
                 absl::StrFormat("%s parts %d to %d are outside its %d parts", name, place.part,
                                 place.part + parts, limit));
  }
  if (place.buffer == schedules::BufferName::kInput && write && parts > 0) {
    return error(rank, state.next, "writes to the input");
  }
  if (place.buffer == schedules::BufferName::kOutput) {
    for (uint32_t i = 0; i < parts; ++i) {
      if (!has_output(rank, place.part + i)) {
        return error(rank, state.next,
                     absl::StrFormat("this rank has no output part %d", place.part + i));
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Run::check_written(uint32_t rank, const schedules::Place& place,
                                uint32_t parts) const {
  const uint32_t first = place_of(place);
  for (uint32_t i = 0; i < parts; ++i) {
    if (!ranks_[rank].memory.read(first + i).written()) {
      return error(rank, ranks_[rank].next,
                   absl::StrFormat("reads part %d before anything is there", place.part + i));
    }
  }
  return absl::OkStatus();
}

absl::Status Run::combine(uint32_t rank, const Value& a, const Value& b, Value& sum) const {
  const RankState& state = ranks_[rank];
  if (!reduces() || spec_.ordered) {
    return error(rank, state.next,
                 spec_.ordered ? "combines: an ordered schedule only folds, once"
                               : "combines, in a collective that does not combine");
  }
  if (a.tag != b.tag) {
    return error(rank, state.next,
                 absl::StrFormat("combines contributions to different parts (%d and %d)",
                                 static_cast<int>(a.tag), static_cast<int>(b.tag)));
  }
  if (a.final || b.final) {
    return error(rank, state.next,
                 absl::StrFormat("combines part %d again after its final combination",
                                 static_cast<int>(a.tag)));
  }
  if (a.tag == Value::kNotFollowed) {
    sum = a;
    return absl::OkStatus();
  }
  if (!Contributions::combine(a, b, contributions_.exact(), sum)) {
    return error(rank, state.next, absl::StrFormat("takes a contribution to part %d twice", a.tag));
  }
  return absl::OkStatus();
}

absl::Status Run::fold(uint32_t rank, const schedules::Step& step) {
  RankState& state = ranks_[rank];
  if (!reduces() || !spec_.ordered) {
    return error(rank, state.next, "folds, in a schedule that is not an ordered reduction");
  }
  const schedules::Place own{schedules::BufferName::kInput, step.target.part};
  if (step.parts != 1 || step.source.buffer != schedules::BufferName::kScratch) {
    return error(rank, state.next, "folds one part, from scratch");
  }
  Value sum;
  for (uint32_t i = 0; i < spec_.ranks; ++i) {
    const schedules::Place from =
        i == rank ? own : schedules::Place{schedules::BufferName::kScratch, step.source.part + i};
    if (absl::Status ok = check_range(rank, from, 1, false); !ok.ok()) return ok;
    if (absl::Status ok = check_written(rank, from, 1); !ok.ok()) return ok;
    const Value value = state.memory.read(place_of(from));
    if (i == 0) sum = {.tag = value.tag};
    const bool same_tag = value.tag == sum.tag;
    if (!same_tag ||
        (value.followed() && !value.same_contributions(contributions_.of(i, value.tag)))) {
      return error(rank, state.next,
                   absl::StrFormat("the contribution of rank %d is not in its place", i));
    }
    if (value.followed()) {
      Contributions::combine(sum, value, contributions_.exact(), sum);
    }
  }
  sum.step = state.next;
  sum.final = step.final;
  state.memory.write(place_of(step.target), sum);
  state.parts_reduced += spec_.ranks - 1;
  return absl::OkStatus();
}

std::string Run::why_waiting(uint32_t rank) const {
  const RankState& state = ranks_[rank];
  const schedules::Step& step = state.program.steps[state.next];
  if (step.kind == Kind::kSend) {
    return absl::StrFormat("waits for ever to send: rank %d does not take the messages before it",
                           step.peer);
  }
  if (step.kind == Kind::kReceive || step.kind == Kind::kReceiveReduce) {
    const Link& link = links_[state.links[state.next]];
    if (link.taken == link.sent.size()) {
      return absl::StrFormat("waits for ever for a message from rank %d", step.peer);
    }
  }
  return "waits for ever to overwrite what an earlier send has not delivered";
}

absl::Status Run::check_end() const {
  for (uint32_t rank = 0; rank < spec_.ranks; ++rank) {
    const RankState& state = ranks_[rank];
    if (state.next < state.program.steps.size()) {
      return error(rank, state.next, why_waiting(rank));
    }
  }
  for (const Link& link : links_) {
    if (link.taken < link.sent.size()) {
      return error(link.from, link.sent[link.taken].step,
                   absl::StrFormat("rank %d never receives this message", link.to));
    }
  }
  for (uint32_t rank = 0; rank < spec_.ranks; ++rank) {
    for (uint32_t part = 0; part < parts_; ++part) {
      if (!has_output(rank, part)) continue;
      const Value value =
          ranks_[rank].memory.read(place_of({schedules::BufferName::kOutput, part}));
      const Value want = expected(rank, part);
      if (!value.written()) {
        return error(rank, UINT32_MAX, absl::StrFormat("output part %d is never written", part));
      }
      if (!value.same_contributions(want)) {
        return error(rank, value.step,
                     absl::StrFormat("leaves output part %d with other contributions than those "
                                     "of all ranks to it",
                                     part));
      }
      if (reduces() && spec_.ranks > 1 && value.followed() && !value.final) {
        return error(rank, value.step,
                     absl::StrFormat("output part %d has passed no final combination", part));
      }
    }
  }
  return absl::OkStatus();
}

void Run::count(VerifyReport& report) const {
  uint64_t messages = 0;
  for (const Link& link : links_) messages += link.sent.size();
  report.messages = std::max(report.messages, messages);
  for (const RankState& state : ranks_) {
    report.rounds = std::max(report.rounds, state.depth);
    report.most_parts_sent = std::max(report.most_parts_sent, state.parts_sent);
    report.most_parts_reduced = std::max(report.most_parts_reduced, state.parts_reduced);
  }
}

}  // namespace baton::collectives::proof::symbolic
