// The steps of a symbolic run.
#include "tests/schedules/verify_run.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_format.h"
#include "tests/schedules/verify.h"
#include "transport/base/splitmix.h"

namespace baton::collectives::proof::symbolic {

using Kind = schedules::Step::Kind;

absl::Status Run::load(const ProgramSource& source) {
  absl::flat_hash_map<uint64_t, uint32_t> known;
  for (uint32_t rank = 0; rank < spec_.ranks; ++rank) {
    absl::StatusOr<schedules::Program> program = source(rank, channel_);
    if (!program.ok()) return program.status();
    RankState& state = ranks_[rank];
    state.program = *std::move(program);
    const std::vector<schedules::Step>& steps = state.program.steps;
    state.links.resize(steps.size());
    for (uint32_t i = 0; i < steps.size(); ++i) {
      const schedules::Step& step = steps[i];
      if (step.kind != Kind::kSend && step.kind != Kind::kReceive &&
          step.kind != Kind::kReceiveReduce) {
        continue;
      }
      if (step.peer >= spec_.ranks || step.peer == rank) {
        return error(rank, i, absl::StrFormat("there is no peer %d", step.peer));
      }
      const uint32_t from = step.kind == Kind::kSend ? rank : step.peer;
      const uint32_t to = step.kind == Kind::kSend ? step.peer : rank;
      const auto [at, added] =
          known.try_emplace((uint64_t{from} << 32) | to, static_cast<uint32_t>(links_.size()));
      if (added) links_.push_back({from, to, 0, {}});
      state.links[i] = at->second;
    }
  }
  return absl::OkStatus();
}

absl::Status Run::run(bool in_place, VerifyReport& report) {
  in_place_ = in_place;
  for (Link& link : links_) {
    link.taken = 0;
    link.sent.clear();
  }
  std::vector<uint32_t> ready;
  for (uint32_t rank = spec_.ranks; rank-- > 0;) {
    start(rank);
    ready.push_back(rank);
  }
  ready_ = &ready;
  while (!ready.empty()) {
    const uint32_t rank = ready.back();
    ready.pop_back();
    ranks_[rank].queued = false;
    absl::Status status = advance(rank);
    if (!status.ok()) return status;
  }
  absl::Status status = check_end();
  if (status.ok()) count(report);
  return status;
}

void Run::start(uint32_t rank) {
  RankState& state = ranks_[rank];
  const uint32_t places = parts_ * (in_place_ ? 1 : 2) + state.program.scratch_parts;
  state.memory = Memory(places, contributions_.exact());
  for (uint32_t part = 0; part < parts_; ++part) {
    if (has_input(rank, part)) state.memory.write(part, contributions_.of(rank, part));
  }
  state.next = 0;
  state.depth = 0;
  state.pending.clear();
  state.parts_sent = state.parts_reduced = 0;
  state.queued = true;
  if (reduces() && totals_.empty()) {
    for (uint32_t part = 0; part < parts_; ++part) totals_.push_back(contributions_.all(part));
  }
}

void Run::wake(uint32_t rank) {
  if (ranks_[rank].queued) return;
  ranks_[rank].queued = true;
  ready_->push_back(rank);
}

absl::Status Run::advance(uint32_t rank) {
  RankState& state = ranks_[rank];
  while (state.next < state.program.steps.size()) {
    bool waits = false;
    absl::Status status = step(rank, waits);
    if (!status.ok()) return status;
    if (waits) break;
    ++state.next;
  }
  return absl::OkStatus();
}

// True if an earlier send may still be reading this.
bool Run::must_stay(uint32_t rank, uint32_t place, uint32_t parts) {
  std::vector<Pending>& pending = ranks_[rank].pending;
  pending.erase(
      std::remove_if(pending.begin(), pending.end(),
                     [this](const Pending& p) { return links_[p.link].taken > p.number; }),
      pending.end());
  return std::any_of(pending.begin(), pending.end(), [place, parts](const Pending& p) {
    return place < p.place + p.parts && p.place < place + parts;
  });
}

absl::Status Run::step(uint32_t rank, bool& waits) {
  RankState& state = ranks_[rank];
  const schedules::Step& step = state.program.steps[state.next];
  const bool receives = step.kind == Kind::kReceive || step.kind == Kind::kReceiveReduce;
  const bool combines = step.kind == Kind::kReceiveReduce;
  const bool writes = step.kind != Kind::kSend;
  if (step.final && !combines && step.kind != Kind::kFold) {
    return error(rank, state.next, "is final but combines nothing");
  }
  if (step.kind != Kind::kReceive && step.kind != Kind::kFold) {
    if (absl::Status ok = check_range(rank, step.source, step.parts, false); !ok.ok()) return ok;
    if (absl::Status ok = check_written(rank, step.source, step.parts); !ok.ok()) return ok;
  }
  if (writes) {
    if (absl::Status ok = check_range(rank, step.target, step.parts, true); !ok.ok()) return ok;
  }
  if (!receives && step.parts == 0 && step.kind != Kind::kSend) {
    return error(rank, state.next, "has no parts");
  }
  const uint32_t target = writes ? place_of(step.target) : 0;
  if (step.kind == Kind::kCopy && place_of(step.source) == target) return absl::OkStatus();

  if (step.kind == Kind::kSend) {
    Link& link = links_[state.links[state.next]];
    if (step.parts > state.program.max_message_parts) {
      return error(rank, state.next,
                   absl::StrFormat("sends %d parts at once; this schedule promises at most %d",
                                   step.parts, state.program.max_message_parts));
    }
    if (link.sent.size() - link.taken >= schedules::kMessagesAhead) {
      waits = true;
      return absl::OkStatus();
    }
    const uint32_t place = place_of(step.source);
    state.pending.push_back(
        {state.links[state.next], static_cast<uint32_t>(link.sent.size()), place, step.parts});
    link.sent.push_back({state.next, place, step.parts, state.depth + 1});
    state.parts_sent += step.parts;
    wake(link.to);
    return absl::OkStatus();
  }

  const Link* link = receives ? &links_[state.links[state.next]] : nullptr;
  if ((receives && link->taken == link->sent.size()) || must_stay(rank, target, step.parts)) {
    waits = true;
    return absl::OkStatus();
  }
  if (step.kind == Kind::kFold) return fold(rank, step);

  const Message* message = receives ? &link->sent[link->taken] : nullptr;
  if (receives && message->parts != step.parts) {
    return error(rank, state.next,
                 absl::StrFormat("expects %d parts from rank %d, whose step %d sends %d",
                                 step.parts, step.peer, message->step, message->parts));
  }
  const uint32_t from = receives ? 0 : place_of(step.source);
  for (uint32_t i = 0; i < step.parts; ++i) {
    Value value;
    if (receives) {
      value = ranks_[step.peer].memory.read(message->place + i);
    } else {
      value = state.memory.read(from + i);
    }
    if (combines) {
      Value sum;
      absl::Status ok = combine(rank, state.memory.read(place_of(step.source) + i), value, sum);
      if (!ok.ok()) return ok;
      sum.final = step.final && sum.followed();
      value = sum;
    }
    value.step = state.next;
    state.memory.write(target + i, value);
  }
  if (combines) state.parts_reduced += step.parts;
  if (receives) {
    state.depth = std::max(state.depth, message->depth);
    ++links_[state.links[state.next]].taken;
    wake(step.peer);
  }
  return absl::OkStatus();
}

namespace {

enum : uint8_t { kUnwritten, kAlike, kKept };
constexpr uint64_t kSeed = 1;

}  // namespace

Contributions::Contributions(const schedules::ScheduleSpec& spec, uint32_t sampled_parts)
    : ranks_(spec.ranks), exact_(spec.ranks <= 64) {
  if (exact_) return;
  const uint32_t parts = schedules::parts_of(spec);
  for (uint32_t i = 0; i < sampled_parts; ++i) {
    sample_.push_back(static_cast<uint32_t>(base::splitmix(base::splitmix(kSeed) + i) % parts));
  }
  std::sort(sample_.begin(), sample_.end());
}

bool Contributions::followed(uint32_t part) const {
  return exact_ || std::binary_search(sample_.begin(), sample_.end(), part);
}

Value Contributions::of(uint32_t rank, uint32_t part) const {
  if (exact_) return {.low = uint64_t{1} << rank, .tag = part};
  if (!followed(part)) return {.tag = Value::kNotFollowed};
  const uint64_t base = base::splitmix(kSeed ^ base::splitmix((uint64_t{rank} << 32) | part));
  return {.low = base::splitmix(base), .high = base::splitmix(base + 1), .tag = part};
}

Value Contributions::all(uint32_t part) const {
  Value sum = of(0, part);
  if (!sum.followed()) return sum;
  for (uint32_t rank = 1; rank < ranks_; ++rank) combine(sum, of(rank, part), exact_, sum);
  return sum;
}

bool Contributions::combine(const Value& a, const Value& b, bool exact, Value& sum) {
  if (a.tag != b.tag || (exact && (a.low & b.low) != 0)) return false;
  const Value left = a;
  sum.tag = left.tag;
  sum.low = left.low + b.low;
  sum.high = left.high + b.high + (sum.low < b.low ? 1 : 0);
  return true;
}

Memory::Memory(uint32_t places, bool exact) : exact_(exact) {
  if (exact) {
    values_.resize(places);
  } else {
    state_.resize(places, kUnwritten);
  }
}

Value Memory::read(uint32_t place) const {
  if (exact_) return values_[place];
  if (state_[place] == kUnwritten) return {};
  if (state_[place] == kAlike) return {.tag = Value::kNotFollowed};
  return values_[std::find(where_.begin(), where_.end(), place) - where_.begin()];
}

void Memory::write(uint32_t place, const Value& value) {
  if (exact_) {
    values_[place] = value;
    return;
  }
  if (state_[place] == kKept) {
    const auto at = std::find(where_.begin(), where_.end(), place) - where_.begin();
    if (value.followed()) {
      values_[at] = value;
      return;
    }
    where_[at] = where_.back();
    values_[at] = values_.back();
    where_.pop_back();
    values_.pop_back();
  } else if (value.followed()) {
    where_.push_back(place);
    values_.push_back(value);
  }
  state_[place] = !value.written() ? kUnwritten : value.followed() ? kKept : kAlike;
}

}  // namespace baton::collectives::proof::symbolic

namespace baton::collectives::proof {

using schedules::ScheduleSpec;

namespace {

bool can_be_in_place(const ScheduleSpec& spec) {
  return !spec.separate && spec.collective != Collective::kAllToAll &&
         spec.collective != Collective::kBarrier;
}

}  // namespace

absl::StatusOr<VerifyReport> verify(const ScheduleSpec& spec, const ProgramSource& program,
                                    uint32_t sampled_parts) {
  if (absl::Status valid = schedules::validate(spec); !valid.ok()) return valid;
  const symbolic::Contributions contributions(spec, sampled_parts);
  VerifyReport report;
  for (uint32_t channel = 0; channel < spec.channels; ++channel) {
    symbolic::Run run(spec, contributions, channel);
    absl::Status status = run.load(program);
    if (status.ok()) status = run.run(false, report);
    if (status.ok() && can_be_in_place(spec)) status = run.run(true, report);
    if (!status.ok()) return status;
  }
  return report;
}

absl::StatusOr<VerifyReport> verify(const ScheduleSpec& spec, uint32_t sampled_parts) {
  return verify(
      spec, [&spec](uint32_t rank, uint32_t channel) { return write_program(spec, rank, channel); },
      sampled_parts);
}

}  // namespace baton::collectives::proof
