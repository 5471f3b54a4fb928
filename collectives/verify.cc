// The verifier: runs all ranks of one channel against each other, symbolically.
//
// A message here is nothing but a note that its sender may go on; the receiver reads the sender's
// memory when it takes it, as late as any executor might. So a step that overwrites what an earlier
// send has not delivered waits for that delivery, as executors do. This is the slowest that any
// executor can be: one that copies messages on their way waits for less, and cannot deadlock where
// this one does not.
#include "collectives/verify.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "collectives/verify_values.h"

namespace baton::collectives {
namespace {

using symbolic::Contributions;
using symbolic::Memory;
using symbolic::Value;
using Kind = Step::Kind;

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
  Program program;
  std::vector<uint32_t> links;  // of each step that sends or receives
  uint32_t next = 0;
  Memory memory;
  std::vector<Pending> pending;
  uint32_t depth = 0;
  uint64_t parts_sent = 0, parts_reduced = 0;
  bool queued = true;
};

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
    case Kind::kReduce:
      return "reduce";
    case Kind::kFold:
      return "fold";
  }
  return "unknown step";
}

class Run {
 public:
  Run(const ScheduleSpec& spec, const VerifyOptions& options, const Contributions& contributions,
      uint32_t channel)
      : spec_(spec),
        options_(options),
        contributions_(contributions),
        channel_(channel),
        parts_(parts_of(spec)),
        ranks_(spec.ranks) {}

  absl::Status load(const ProgramSource& source) {
    absl::flat_hash_map<uint64_t, uint32_t> known;
    for (uint32_t rank = 0; rank < spec_.ranks; ++rank) {
      absl::StatusOr<Program> program = source(rank, channel_);
      if (!program.ok()) return program.status();
      RankState& state = ranks_[rank];
      state.program = *std::move(program);
      const std::vector<Step>& steps = state.program.steps;
      state.links.resize(steps.size());
      for (uint32_t i = 0; i < steps.size(); ++i) {
        const Step& step = steps[i];
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

  // Runs everything from the beginning. `in_place`: input and output of each rank are one memory.
  absl::Status run(bool in_place, VerifyReport& report) {
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

 private:
  absl::Status error(uint32_t rank, uint32_t step, const std::string& what) const {
    std::string where;
    const std::vector<Step>& steps = ranks_[rank].program.steps;
    if (step < steps.size()) {
      where = absl::StrFormat("step %d (%s), ", step, name_of(steps[step].kind));
    }
    return absl::FailedPreconditionError(
        absl::StrFormat("%s%s: rank %d, %schannel %d: %s", spec_.to_string(),
                        in_place_ ? " in place" : "", rank, where, channel_, what));
  }

  bool reduces() const {
    return spec_.collective == Collective::kAllReduce || spec_.collective == Collective::kReduce ||
           spec_.collective == Collective::kReduceScatter;
  }
  bool has_input(uint32_t rank, uint32_t part) const {
    switch (spec_.collective) {
      case Collective::kAllGather:
        return part == rank;
      case Collective::kBroadcast:
      case Collective::kSendReceive:
        return rank == spec_.root;
      case Collective::kBarrier:
        return false;
      default:
        return true;
    }
  }
  bool has_output(uint32_t rank, uint32_t part) const {
    switch (spec_.collective) {
      case Collective::kReduceScatter:
        return part == rank;
      case Collective::kReduce:
        return rank == spec_.root;
      case Collective::kSendReceive:
        return rank == spec_.peer;
      case Collective::kBarrier:
        return false;
      default:
        return true;
    }
  }
  Value expected(uint32_t rank, uint32_t part) const {
    switch (spec_.collective) {
      case Collective::kAllGather:
        return contributions_.of(part, part);
      case Collective::kBroadcast:
      case Collective::kSendReceive:
        return contributions_.of(spec_.root, part);
      case Collective::kAllToAll:
        return contributions_.of(part, rank);
      default:
        return totals_[part];
    }
  }

  // Inputs, then outputs (the same in place), then scratch.
  uint32_t place_of(const Place& place) const {
    const uint32_t output = in_place_ ? 0 : parts_;
    switch (place.buffer) {
      case BufferName::kInput:
        return place.part;
      case BufferName::kOutput:
        return output + place.part;
      default:
        return output + parts_ + place.part;
    }
  }

  void start(uint32_t rank) {
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

  void wake(uint32_t rank) {
    if (ranks_[rank].queued) return;
    ranks_[rank].queued = true;
    ready_->push_back(rank);
  }

  // Runs steps until one must wait.
  absl::Status advance(uint32_t rank) {
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

  absl::Status check_range(uint32_t rank, const Place& place, uint32_t parts, bool write) const {
    const RankState& state = ranks_[rank];
    const char* names[] = {"input", "output", "scratch"};
    const char* name = names[static_cast<int>(place.buffer) % 3];
    const uint32_t limit =
        place.buffer == BufferName::kScratch ? state.program.scratch_parts : parts_;
    if (place.part > limit || parts > limit - place.part) {
      return error(rank, state.next,
                   absl::StrFormat("%s parts %d to %d are outside its %d parts", name, place.part,
                                   place.part + parts, limit));
    }
    if (place.buffer == BufferName::kInput && write && parts > 0) {
      return error(rank, state.next, "writes to the input");
    }
    if (place.buffer == BufferName::kOutput) {
      for (uint32_t i = 0; i < parts; ++i) {
        if (!has_output(rank, place.part + i)) {
          return error(rank, state.next,
                       absl::StrFormat("this rank has no output part %d", place.part + i));
        }
      }
    }
    return absl::OkStatus();
  }

  absl::Status check_written(uint32_t rank, const Place& place, uint32_t parts) const {
    const uint32_t first = place_of(place);
    for (uint32_t i = 0; i < parts; ++i) {
      if (!ranks_[rank].memory.read(first + i).written()) {
        return error(rank, ranks_[rank].next,
                     absl::StrFormat("reads part %d before anything is there", place.part + i));
      }
    }
    return absl::OkStatus();
  }

  // True if an earlier send may still be reading this.
  bool must_stay(uint32_t rank, uint32_t place, uint32_t parts) {
    std::vector<Pending>& pending = ranks_[rank].pending;
    pending.erase(
        std::remove_if(pending.begin(), pending.end(),
                       [this](const Pending& p) { return links_[p.link].taken > p.number; }),
        pending.end());
    return std::any_of(pending.begin(), pending.end(), [place, parts](const Pending& p) {
      return place < p.place + p.parts && p.place < place + parts;
    });
  }

  absl::Status step(uint32_t rank, bool& waits);
  absl::Status combine(uint32_t rank, const Value& a, const Value& b, Value& sum) const;
  absl::Status fold(uint32_t rank, const Step& step);
  absl::Status check_end() const;
  void count(VerifyReport& report) const;
  std::string why_waiting(uint32_t rank) const;

  const ScheduleSpec& spec_;
  const VerifyOptions& options_;
  const Contributions& contributions_;
  const uint32_t channel_;
  const uint32_t parts_;
  bool in_place_ = false;
  std::vector<RankState> ranks_;
  std::vector<Link> links_;
  std::vector<Value> totals_;
  std::vector<uint32_t>* ready_ = nullptr;
};

absl::Status Run::combine(uint32_t rank, const Value& a, const Value& b, Value& sum) const {
  const RankState& state = ranks_[rank];
  if (!reduces() || spec_.ordered) {
    return error(rank, state.next,
                 spec_.ordered ? "combines: an ordered schedule only folds, once"
                               : "combines, in a collective that does not");
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

absl::Status Run::fold(uint32_t rank, const Step& step) {
  RankState& state = ranks_[rank];
  if (!reduces() || !spec_.ordered) {
    return error(rank, state.next, "folds, in a schedule that is not an ordered reduction");
  }
  const Place own{BufferName::kInput, step.target.part};
  if (step.parts != 1 || step.source.buffer != BufferName::kScratch) {
    return error(rank, state.next, "folds one part, from scratch");
  }
  Value sum;
  for (uint32_t i = 0; i < spec_.ranks; ++i) {
    const Place from = i == rank ? own : Place{BufferName::kScratch, step.source.part + i};
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

absl::Status Run::step(uint32_t rank, bool& waits) {
  RankState& state = ranks_[rank];
  const Step& step = state.program.steps[state.next];
  const bool receives = step.kind == Kind::kReceive || step.kind == Kind::kReceiveReduce;
  const bool combines = step.kind == Kind::kReceiveReduce || step.kind == Kind::kReduce;
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
    if (link.sent.size() - link.taken >= options_.messages_ahead) {
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
  if (step.kind == Kind::kReduce) {
    if (absl::Status ok = check_written(rank, step.target, step.parts); !ok.ok()) return ok;
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
      const uint32_t other = step.kind == Kind::kReduce ? target : place_of(step.source);
      Value sum;
      absl::Status ok = combine(rank, state.memory.read(other + i), value, sum);
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

std::string Run::why_waiting(uint32_t rank) const {
  const RankState& state = ranks_[rank];
  const Step& step = state.program.steps[state.next];
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
      const Value value = ranks_[rank].memory.read(place_of({BufferName::kOutput, part}));
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

bool can_be_in_place(const ScheduleSpec& spec) {
  return !spec.separate && spec.collective != Collective::kAllToAll &&
         spec.collective != Collective::kSendReceive && spec.collective != Collective::kBarrier;
}

}  // namespace

absl::StatusOr<VerifyReport> verify(const ScheduleSpec& spec, const ProgramSource& program,
                                    const VerifyOptions& options) {
  if (absl::Status valid = validate(spec); !valid.ok()) return valid;
  const Contributions contributions(spec, options.sampled_parts, options.seed);
  VerifyReport report;
  for (uint32_t channel = 0; channel < spec.channels; ++channel) {
    Run run(spec, options, contributions, channel);
    absl::Status status = run.load(program);
    if (status.ok()) status = run.run(false, report);
    if (status.ok() && can_be_in_place(spec)) status = run.run(true, report);
    if (!status.ok()) return status;
  }
  return report;
}

absl::StatusOr<VerifyReport> verify(const ScheduleSpec& spec, const VerifyOptions& options) {
  return verify(
      spec, [&spec](uint32_t rank, uint32_t channel) { return write_program(spec, rank, channel); },
      options);
}

}  // namespace baton::collectives
