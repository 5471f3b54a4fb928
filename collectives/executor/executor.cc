// Running a lane: beginning pieces, the steps of a program, ending calls.
#include "collectives/executor/executor.h"

#include <algorithm>
#include <array>
#include <bit>
#include <optional>
#include <utility>

#include "collectives/reduce/reduce.h"
#include "transport/base/copies/copy_kernel.h"

namespace baton::collectives::executor {

using schedules::BufferName;
using schedules::Place;
using schedules::Step;

namespace {

// Steps that a lane runs before it is another lane's turn.
constexpr int kStepsInARow = 4;

// Bytes that move between two looks at the clock.
constexpr size_t kMovedPerLook = 64 << 10;
constexpr size_t kSmallStep = 2048;

// Calls of so many bytes leave nothing of their beginning in the caches: what they write last is
// streamed past them.
constexpr size_t kStreamCallsFrom = 8 << 20;
// Lines that a peer has just read in place are in its caches too: a plain store waits until each is
// taken from there, one after the other on some machines (64 KiB: 28 us, streamed 2 us).
constexpr size_t kStreamReadFrom = 16 << 10;
constexpr size_t kStreamedSums = 2048;  // bytes summed at a time before they are streamed

void copy_streamed(const Segments& to, const Segments& from) {
  walk(to, from, [](std::byte* t, std::byte* f, size_t n) { base::stream_copy(t, f, n); });
  base::stream_fence();
}

absl::Status stray() {
  return absl::FailedPreconditionError(
      "a rank has sent what this one does not expect in its call: all must name the same root");
}

// Walks three places of equal length together.
template <typename Run>
void walk3(const Segments& t, const Segments& a, const Segments& b, Run&& run) {
  if (t.contiguous() && a.contiguous() && b.contiguous()) {
    const size_t n = std::min({t.total(), a.total(), b.total()});
    if (n > 0) run(t.data, a.data, b.data, n);
    return;
  }
  const size_t total = std::min({t.total(), a.total(), b.total()});
  const Segments* places[3] = {&t, &a, &b};
  size_t done = 0;
  while (done < total) {
    std::byte* at[3];
    size_t n = total - done;
    for (int i = 0; i < 3; ++i) {
      const size_t inside = done % places[i]->bytes;
      at[i] = places[i]->run(static_cast<uint32_t>(done / places[i]->bytes)) + inside;
      n = std::min(n, places[i]->bytes - inside);
    }
    run(at[0], at[1], at[2], n);
    done += n;
  }
}

}  // namespace

Executor::Executor(uint32_t rank, std::vector<Link*> links, Memory* memory, const Clock& clock,
                   FlightRecorder* recorder)
    : rank_(rank),
      links_(std::move(links)),
      memory_(memory),
      clock_(clock),
      recorder_(recorder),
      point_to_point_(rank, links_, memory, recorder) {
  for (uint32_t i = 0; i < kLanes; ++i) {
    lanes_[i].number = i;
    lanes_[i].task = i;
  }
  for (Link* link : links_) {
    if (link != nullptr && link->made()) made_.push_back(link);
  }
  calls_.reserve(256);
  fold_sources_.resize(links_.size());
}

Executor::~Executor() {
  for (Lane& lane : lanes_) {
    if (lane.scratch.data != nullptr) memory_->free(lane.scratch);
  }
}

void Executor::set_link(uint32_t peer, Link* link) {
  links_[peer] = link;
  made_.push_back(link);  // the one before is a stand-in, and not among them
  // What the one before was not asked to grant.
  for (Lane& lane : lanes_) {
    if (lane.program == nullptr || !lane.grants) continue;
    for (const auto& [step, ahead] : lane.program->first_grants) {
      if (lane.program->steps[step].peer == peer) grant(lane, step, ahead);
    }
  }
}

void Executor::start(Call& call) {
  if (rooted_ != 0) {
    strayed_ |= any_stray_of_last();
    rooted_ = 0;
  }
  now_ = call.began;
  call.pieces_done = 0;
  if (call.programs == nullptr) {
    point_to_point_.start(call);
    return;
  }
  calls_.push_back({&call, next_task_});
  for (uint32_t i = 0; i < std::min<size_t>(call.pieces, kLanes); ++i) {
    open_lanes_ |= 1u << ((next_task_ + i) % kLanes);
  }
  next_task_ += call.pieces;
}

Executor::Turn Executor::fail(absl::Status why) {
  error_ = std::move(why);
  return Turn::kFailed;
}

absl::StatusOr<bool> Executor::advance_open() {
  if (strayed_) return stray();
  bool any = false;
  for (uint32_t left = open_lanes_; left != 0; left &= left - 1) {
    const Turn turn = run(lanes_[std::countr_zero(left)]);
    if (turn == Turn::kFailed) return error_;
    any |= turn == Turn::kMoved;
  }
  if (!point_to_point_.idle()) {
    absl::StatusOr<bool> moved = point_to_point_.advance(now_);
    if (!moved.ok()) return moved;
    any |= *moved;
    touched_ |= point_to_point_.take_told();
  }
  if (std::exchange(touched_, false)) {
    // Looking at the clock would cost more than a small step does.
    if (std::exchange(moved_, 0) >= kMovedPerLook) now_ = clock_.now();
    for (Link* link : made_) link->flush();
  }
  return any;
}

// Runs a lane for a while.
Executor::Turn Executor::run(Lane& lane) {
  Turn all = Turn::kWaits;
  for (int i = 0; i < kStepsInARow; ++i) {
    if (lane.program == nullptr) {
      const Turn begun = begin_piece(lane);
      if (begun != Turn::kMoved) return begun == Turn::kFailed ? begun : all;
    }
    if (lane.step == lane.program->steps.size()) {
      if (!all_delivered(lane)) return all;
      if (schedules::rooted(lane.call->geometry.collective) && last_piece(lane) &&
          any_stray(lane.number, lane.call->descriptor.sequence)) {
        return fail(stray());
      }
      end_piece(lane);
      all = Turn::kMoved;
      continue;
    }
    const Turn turn = run_step(lane);
    if (turn != Turn::kMoved) return turn == Turn::kFailed ? turn : all;
    ++steps_;
    const uint32_t step = lane.step++;
    if (lane.grants && lane.program->next_grant[step] != PreparedProgram::kNoStep) {
      grant(lane, lane.program->next_grant[step], schedules::kMessagesAhead);
    }
    all = Turn::kMoved;
  }
  return all;
}

Executor::Turn Executor::begin_piece(Lane& lane) {
  const Active* active = nullptr;
  for (const Active& candidate : calls_) {
    if (lane.task >= candidate.first_task + candidate.call->pieces) continue;
    active = &candidate;
    break;
  }
  if (active == nullptr || lane.task < active->first_task) return Turn::kWaits;
  lane.call = active->call;
  lane.piece = lane.task - active->first_task;
  const auto& programs = *lane.call->programs;
  lane.program = programs.size() == 1 ? &programs[0] : &programs[lane.piece % programs.size()];
  lane.step = 0;
  lane.delivered = 0;
  lane.combined = 0;
  if (lane.numbers.size() < lane.program->steps.size()) {
    lane.numbers.resize(lane.program->steps.size());
  }
  const Geometry& geometry = lane.call->geometry;
  lane.part_bytes = geometry.part_elements * geometry.element_bytes;
  if (lane.program->scratch_parts * lane.part_bytes > lane.scratch.size) {
    absl::Status status = grow_scratch(lane, lane.program->scratch_parts * lane.part_bytes);
    if (!status.ok()) return fail(std::move(status));
  }
  lane.grants = lane.program->max_message_parts * lane.part_bytes > kSmallStep;
  if (lane.grants) {
    for (const auto& [step, ahead] : lane.program->first_grants) grant(lane, step, ahead);
  }
  return Turn::kMoved;
}

// Lets the message of a receive come: to where this step wants it if nothing else needs that place
// before, so that it need not be copied.
void Executor::grant(Lane& lane, uint32_t number, uint32_t ahead) {
  const PreparedProgram& program = *lane.program;
  const Step& step = program.steps[number];
  Link& link = *links_[step.peer];
  if (!link.waits_for_grant(tag(lane, step).most)) return;
  Segments place = locate(lane, step.target, step.parts);
  // A device reads its own part where the call has put it: no message may come there.
  const bool free = place.contiguous() && lane.call->sums == nullptr &&
                    program.free_from[number] <= lane.step && hazards_clear(lane, number);
  if (!free) place.data = nullptr;
  link.grant_next(lane.number, ahead, place);
  touched_ = true;
}

absl::Status Executor::grow_scratch(Lane& lane, size_t bytes) {
  if (lane.scratch.data != nullptr) memory_->free(lane.scratch);
  lane.scratch = Block{};
  absl::StatusOr<Block> block = memory_->allocate(bytes);
  if (!block.ok()) return block.status();
  lane.scratch = *block;
  return absl::OkStatus();
}

Segments Executor::locate(const Lane& lane, const Place& place, uint32_t parts) const {
  const Call& call = *lane.call;
  std::byte* base = place.buffer == BufferName::kInput    ? call.in
                    : place.buffer == BufferName::kOutput ? call.out
                                                          : lane.scratch.data;
  return call.geometry.locate(base, place.buffer, place.part, parts, lane.piece);
}

bool Executor::hazards_clear(Lane& lane, uint32_t step) {
  const PreparedProgram& program = *lane.program;
  for (uint32_t h = program.first_hazard[step]; h < program.first_hazard[step + 1]; ++h) {
    const uint32_t send = program.hazards[h];
    if (!links_[program.steps[send].peer]->delivered(lane.number, lane.numbers[send])) {
      return false;
    }
  }
  return true;
}

bool Executor::all_delivered(Lane& lane) {
  const PreparedProgram& program = *lane.program;
  for (; lane.delivered < program.sends.size(); ++lane.delivered) {
    const uint32_t send = program.sends[lane.delivered];
    if (!links_[program.steps[send].peer]->delivered(lane.number, lane.numbers[send])) {
      return false;
    }
  }
  return true;
}

bool Executor::streams(const Lane& lane, size_t bytes) const {
  const PreparedProgram& program = *lane.program;
  if (!program.final_write[lane.step]) return false;
  const Geometry& geometry = lane.call->geometry;
  if (geometry.count * geometry.element_bytes >= kStreamCallsFrom) return true;
  const uint32_t hazard = program.first_hazard[lane.step];
  return stream_over_read_ && bytes >= kStreamReadFrom &&
         hazard < program.first_hazard[lane.step + 1] &&
         links_[program.steps[program.hazards[hazard]].peer]->peer_reads_in_place();
}

void Executor::end_piece(Lane& lane) {
  Call& call = *lane.call;
  lane.program = nullptr;
  lane.call = nullptr;
  lane.task += kLanes;
  if (lane.task >= next_task_) open_lanes_ &= ~(1u << lane.number);
  if (++call.pieces_done < call.pieces) return;
  const auto ended = std::find_if(calls_.begin(), calls_.end(),
                                  [&](const Active& active) { return active.call == &call; });
  if (schedules::rooted(call.geometry.collective)) {
    rooted_ = call.descriptor.sequence;
    rooted_task_ = ended->first_task;
    rooted_pieces_ = call.pieces;
  }
  calls_.erase(ended);
  if (call.on_done != nullptr) call.on_done(call, call.context);
}

// Whether the lane has no other piece of its call to come: what comes next there is another call's.
bool Executor::last_piece(const Lane& lane) const {
  const auto active = std::find_if(calls_.begin(), calls_.end(),
                                   [&](const Active& each) { return each.call == lane.call; });
  return lane.task + kLanes >= active->first_task + lane.call->pieces;
}

bool Executor::any_stray(uint32_t lane, uint64_t sequence) const {
  return std::any_of(made_.begin(), made_.end(),
                     [&](const Link* link) { return link->stray(lane, sequence); });
}

bool Executor::any_stray_of_last() const {
  const uint64_t pieces = std::min<uint64_t>(rooted_pieces_, kLanes);
  for (uint64_t task = rooted_task_; task < rooted_task_ + pieces; ++task) {
    if (any_stray(task % kLanes, rooted_)) return true;
  }
  return false;
}

Executor::Turn Executor::run_step(Lane& lane) {
  const Step& step = lane.program->steps[lane.step];
  switch (step.kind) {
    case Step::Kind::kSend: {
      Link& link = *links_[step.peer];
      const Segments source = locate(lane, step.source, step.parts);
      const uint64_t number = link.send(lane.number, source, tag(lane, step));
      if (number == 0) return Turn::kWaits;
      lane.numbers[lane.step] = number;
      ++messages_;
      bytes_sent_ += source.total();
      touched_ = true;
      record(FlightEvent::Kind::kSend, lane, step.peer, source.total());
      return Turn::kMoved;
    }
    case Step::Kind::kReceive:
    case Step::Kind::kReceiveReduce:
      return receive(lane, step);
    case Step::Kind::kCopy: {
      const Segments source = locate(lane, step.source, step.parts);
      const Segments target = locate(lane, step.target, step.parts);
      if (source.data == target.data) return Turn::kMoved;  // in place: nothing is written
      if (!hazards_clear(lane, lane.step)) return Turn::kWaits;
      streams(lane, target.total()) ? copy_streamed(target, source) : copy(target, source);
      return Turn::kMoved;
    }
    case Step::Kind::kFold:
      if (!hazards_clear(lane, lane.step)) return Turn::kWaits;
      return fold_step(lane, step);
  }
  return fail(absl::InternalError("a program has a step of an unknown kind"));
}

Executor::Turn Executor::receive(Lane& lane, const Step& step) {
  Link& link = *links_[step.peer];
  const Segments target = locate(lane, step.target, step.parts);
  Segments message;
  absl::Status error;
  if (!link.peek(lane.number, target.total(), tag(lane, step), message, error)) {
    return error.ok() ? Turn::kWaits : fail(std::move(error));
  }
  if (!hazards_clear(lane, lane.step)) return Turn::kWaits;
  if (step.kind == Step::Kind::kReceive && message.data == target.data) {
    // It was granted that place.
  } else if (step.kind == Step::Kind::kReceive) {
    streams(lane, target.total()) ? copy_streamed(target, message) : copy(target, message);
  } else {
    const Turn done = combine(lane, step, target, locate(lane, step.source, step.parts), message);
    if (done != Turn::kMoved) return done;
  }
  if (!link.consume(lane.number)) return Turn::kWaits;
  touched_ = true;
  record(FlightEvent::Kind::kReceive, lane, step.peer, target.total());
  return Turn::kMoved;
}

Executor::Turn Executor::combine(Lane& lane, const Step& step, const Segments& target,
                                 const Segments& a, const Segments& b) {
  const Call& call = *lane.call;
  const size_t element = call.geometry.element_bytes;
  const uint32_t divide_by =
      step.final && call.op == ReduceOp::kAvg ? static_cast<uint32_t>(links_.size()) : 1;
  if (call.sums == nullptr) {
    const bool streamed = streams(lane, target.total());
    walk3(target, a, b, [&](std::byte* t, const std::byte* x, const std::byte* y, size_t bytes) {
      if (!streamed) {
        reduce::reduce(call.type, call.op, t, x, y, bytes / element, divide_by);
        return;
      }
      alignas(64) std::byte sums[kStreamedSums];
      for (size_t done = 0; done < bytes; done += sizeof sums) {
        const size_t n = std::min(sizeof sums, bytes - done);
        reduce::reduce(call.type, call.op, sums, x + done, y + done, n / element, divide_by);
        base::stream_copy(t + done, sums, n);
      }
    });
    if (streamed) base::stream_fence();
    return Turn::kMoved;
  }
  Turn done = Turn::kMoved;
  size_t run = 0;
  walk3(target, a, b, [&](std::byte* t, const std::byte* x, const std::byte* y, size_t bytes) {
    if (done != Turn::kMoved || run++ < lane.combined) return;
    const std::array<const void*, 2> sources = {x, y};
    done = combine_on_device(lane, t, sources, bytes, divide_by, SIZE_MAX);
  });
  if (done == Turn::kMoved) lane.combined = 0;
  return done;
}

Executor::Turn Executor::fold_step(Lane& lane, const Step& step) {
  const Call& call = *lane.call;
  const Segments target = locate(lane, step.target, 1);
  for (uint32_t i = 0; i < fold_sources_.size(); ++i) {
    const Place place = i == rank_ ? Place{BufferName::kInput, step.target.part}
                                   : Place{BufferName::kScratch, step.source.part + i};
    fold_sources_[i] = locate(lane, place, 1).data;
  }
  const uint32_t divide_by =
      step.final && call.op == ReduceOp::kAvg ? static_cast<uint32_t>(links_.size()) : 1;
  if (call.sums != nullptr) {
    // Our own contribution is what the call has read: no step has written there yet.
    const Turn done =
        combine_on_device(lane, target.data, fold_sources_, target.bytes, divide_by, rank_);
    if (done == Turn::kMoved) lane.combined = 0;
    return done;
  }
  reduce::fold(call.type, call.op, target.data, fold_sources_,
               target.bytes / call.geometry.element_bytes, divide_by);
  return Turn::kMoved;
}

Executor::Turn Executor::combine_on_device(Lane& lane, std::byte* target,
                                           absl::Span<const void* const> sources, size_t bytes,
                                           uint32_t divide_by, size_t original) {
  const Call& call = *lane.call;
  if (!lane.combining) {
    device_error_ =
        call.sums->begin(lane.number, call.type, call.op, target, sources,
                         bytes / call.geometry.element_bytes, divide_by, call.input, original);
    if (!device_error_.ok()) return fail(device_error_);
    lane.combining = true;
    ++combining_;
  }
  const std::optional<absl::Status> ended = call.sums->ended(lane.number);
  if (!ended.has_value()) return Turn::kWaits;
  lane.combining = false;
  --combining_;
  ++lane.combined;
  device_error_ = *ended;
  return ended->ok() ? Turn::kMoved : fail(*ended);
}

Blocked Executor::blocked() const {
  Blocked found;
  auto look = [&](const Lane& lane) {
    if (lane.call == nullptr || lane.program == nullptr) return;
    if (found.call != nullptr &&
        found.call->descriptor.sequence <= lane.call->descriptor.sequence) {
      return;
    }
    found = {lane.call, lane.number, lane.piece, lane.step, 0, false, lane.combining};
    found.peer = rank_;
    if (lane.combining) return;
    const PreparedProgram& program = *lane.program;
    const auto waits_for = [&](uint32_t send) {
      const uint32_t peer = program.steps[send].peer;
      if (links_[peer]->delivered(lane.number, lane.numbers[send])) return false;
      found.peer = peer;
      found.to_send = true;
      return true;
    };
    if (lane.step == program.steps.size()) {
      (void)std::any_of(program.sends.begin() + lane.delivered, program.sends.end(), waits_for);
      return;
    }
    const Step& step = program.steps[lane.step];
    found.to_send = step.kind == Step::Kind::kSend;
    if (found.to_send || step.kind == Step::Kind::kReceive ||
        step.kind == Step::Kind::kReceiveReduce) {
      found.peer = step.peer;
      return;
    }
    // A step of this rank's own waits for what it would overwrite.
    (void)std::any_of(program.hazards.begin() + program.first_hazard[lane.step],
                      program.hazards.begin() + program.first_hazard[lane.step + 1], waits_for);
  };
  for (const Lane& lane : lanes_) look(lane);
  const Blocked other = point_to_point_.blocked();
  if (other.call == nullptr) return found;
  const bool first = found.call == nullptr || point_to_point_.wrong() ||
                     other.call->descriptor.sequence < found.call->descriptor.sequence;
  return first ? other : found;
}

void Executor::record(FlightEvent::Kind kind, const Lane& lane, uint32_t peer, size_t bytes) {
  moved_ += bytes;
  // The steps of a small call are not worth their record: its beginning and end tell as much.
  if (recorder_ == nullptr || (bytes <= kSmallStep && lane.call->pieces == 1)) return;
  recorder_->record({.at = now_,
                     .kind = kind,
                     .collective = lane.call->geometry.collective,
                     .lane = static_cast<uint8_t>(lane.number),
                     .peer = peer,
                     .sequence = lane.call->descriptor.sequence,
                     .piece = static_cast<uint32_t>(lane.piece),
                     .step = lane.step,
                     .bytes = bytes});
}

}  // namespace baton::collectives::executor
