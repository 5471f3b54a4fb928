// Starting calls: what is refused, how a call is to run, and its slot.
#include <algorithm>
#include <cstring>

#include "absl/strings/str_format.h"
#include "collectives/arguments.h"
#include "collectives/communicator_impl.h"

namespace baton {

using collectives::Call;
using collectives::CallDescriptor;
using collectives::CallShape;
using collectives::Choice;
using collectives::ControlBlock;
using collectives::Override;
using collectives::ScheduleSpec;

using collectives::check_pointer;
using collectives::refuse;

namespace {

constexpr size_t kMaxChoices = 64;

// Turns of the executor before a blocking call lets others at the communicator: some microseconds.
constexpr int kShortCall = 100;

bool reduces(Collective collective) {
  return collective == Collective::kAllReduce || collective == Collective::kReduceScatter ||
         collective == Collective::kReduce;
}

bool overlap(const std::byte* a, size_t a_bytes, const std::byte* b, size_t b_bytes) {
  return a_bytes > 0 && b_bytes > 0 && a < b + b_bytes && b < a + a_bytes;
}

}  // namespace

absl::Status Communicator::Impl::check(const Request& request, bool& in_place) const {
  const Collective what = request.collective;
  in_place = false;
  if (what == Collective::kBarrier) return absl::OkStatus();
  if (static_cast<int>(request.type) >= kDataTypes) return refuse(what, "unknown element type");
  if (static_cast<int>(request.op) >= kReduceOps) return refuse(what, "unknown operation");
  if (request.root < 0 || request.root >= options.ranks) {
    return refuse(
        what, absl::StrFormat("root %d is not a rank: there are %d", request.root, options.ranks));
  }
  const size_t element = size_of(request.type);
  const bool all_in = what == Collective::kReduceScatter || what == Collective::kAllToAll;
  const bool all_out = what == Collective::kAllGather || what == Collective::kAllToAll;
  if (request.count > SIZE_MAX / 4 / ranks / element) {
    return refuse(what, absl::StrFormat("a count of %u is too large", request.count));
  }
  const bool reads = what != Collective::kBroadcast || request.root == options.rank;
  const bool writes = what != Collective::kReduce || request.root == options.rank;
  const size_t in_count = reads ? request.count * (all_in ? ranks : 1) : 0;
  const size_t out_count = writes ? request.count * (all_out ? ranks : 1) : 0;
  if (absl::Status s = check_pointer(what, "in", request.in, in_count, element); !s.ok()) return s;
  if (absl::Status s = check_pointer(what, "out", request.out, out_count, element); !s.ok()) {
    return s;
  }
  const auto* in = static_cast<const std::byte*>(request.in);
  const auto* out = static_cast<const std::byte*>(request.out);
  const size_t block = request.count * element;
  if (!overlap(in, in_count * element, out, out_count * element)) return absl::OkStatus();
  const std::byte* in_own = what == Collective::kReduceScatter ? in + rank * block : in;
  const std::byte* out_own = what == Collective::kAllGather ? out + rank * block : out;
  in_place = in_own == out_own && what != Collective::kAllToAll;
  if (in_place) return absl::OkStatus();
  return refuse(what, what == Collective::kAllToAll
                          ? "in and out overlap: give it two buffers"
                          : "in and out overlap, but are not what in place means (the same "
                            "pointer; the rank's own part of the larger buffer)");
}

CallShape Communicator::Impl::shape_of(const Request& request) const {
  CallShape shape;
  shape.collective = request.collective;
  shape.ranks = ranks;
  shape.root = static_cast<uint32_t>(request.root);
  shape.element_bytes = size_of(request.type);
  shape.bytes = request.count * shape.element_bytes;
  if (request.collective == Collective::kReduceScatter ||
      request.collective == Collective::kAllGather || request.collective == Collective::kAllToAll) {
    shape.bytes *= ranks;
  }
  shape.ordered = reduces(request.collective) && request.options.ordered.value_or(options.ordered);
  return shape;
}

absl::StatusOr<Communicator::Impl::CachedPrograms*> Communicator::Impl::programs(
    const ScheduleSpec& spec, bool in_place) {
  for (const auto& cached : program_cache) {
    if (cached->spec == spec && cached->in_place == in_place) return cached.get();
  }
  auto fresh = std::make_unique<CachedPrograms>();
  fresh->spec = spec;
  fresh->in_place = in_place;
  fresh->parts = collectives::parts_of(spec);
  fresh->max_message_parts = std::max(1u, collectives::max_message_parts(spec));
  for (uint32_t channel = 0; channel < spec.channels; ++channel) {
    ScheduleSpec own = spec;
    own.separate = !in_place;
    absl::StatusOr<collectives::Program> program = collectives::write_program(own, rank, channel);
    if (!program.ok()) return program.status();
    fresh->programs.push_back(
        collectives::prepare(*std::move(program), spec.collective, rank, in_place));
  }
  program_cache.push_back(std::move(fresh));
  return program_cache.back().get();
}

absl::StatusOr<Communicator::Impl::CachedChoice*> Communicator::Impl::choose(
    const Request& request) {
  const CallShape shape = shape_of(request);
  Override fixed;
  fixed.has_algorithm = request.options.algorithm.has_value();
  fixed.algorithm = request.options.algorithm.value_or(Algorithm::kRing);
  fixed.channels = request.options.channels;
  fixed.chunk_bytes = request.options.chunk_bytes;
  auto matches = [&](const CachedChoice& cached) {
    return cached.shape == shape && cached.fixed == fixed;
  };
  if (last_choice != nullptr && matches(*last_choice)) return last_choice;
  for (CachedChoice& cached : choices) {
    if (matches(cached)) return last_choice = &cached;
  }
  absl::Status status;
  std::vector<Way> ways = ways_for(shape, fixed, status);
  if (!status.ok()) return status;
  if (choices.size() < kMaxChoices) {
    choices.emplace_back();
    last_choice = &choices.back();
  } else {
    do {
      last_choice = &choices[next_choice++ % kMaxChoices];
    } while (last_choice->combining.sequence != 0);
    *last_choice = CachedChoice{};
  }
  last_choice->shape = shape;
  last_choice->fixed = fixed;
  last_choice->ways = std::move(ways);
  last_choice->settled = last_choice->ways.size() == 1;
  return last_choice;
}

absl::StatusOr<Communicator::Impl::WorkSlot*> Communicator::Impl::take_slot() {
  for (size_t i = 0; i < kSlots && slots[next_work % kSlots].id.load() != 0; ++i) ++next_work;
  WorkSlot& slot = slots[next_work % kSlots];
  if (slot.id.load(std::memory_order_relaxed) != 0) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "%u calls are open: wait() for the first of them, or test() it until it has ended",
        kSlots));
  }
  slot.done.store(false, std::memory_order_relaxed);
  slot.result = absl::OkStatus();
  slot.owner = this;
  slot.parent = nullptr;
  slot.parts_left = 0;
  slot.choice = UINT32_MAX;
  slot.call = Call{};
  slot.call.on_done = &Impl::on_done;
  slot.call.context = &slot;
  slot.call.began = now();
  slot.id.store(next_work++, std::memory_order_release);
  in_flight.push_back(&slot);
  ++calls_made;
  return &slot;
}

Communicator::Impl::WorkSlot* Communicator::Impl::find(Work work) {
  if (work.sequence == 0) return nullptr;
  WorkSlot& slot = slots[work.sequence % kSlots];
  return slot.id.load(std::memory_order_acquire) == work.sequence ? &slot : nullptr;
}

absl::StatusOr<Work> Communicator::Impl::begin(const Request& request) {
  std::lock_guard lock(mutex);
  return begin_locked(request);
}

absl::Status Communicator::Impl::run(const Request& request) {
  Work work;
  {
    std::lock_guard lock(mutex);
    absl::StatusOr<Work> begun = begin_locked(request);
    if (!begun.ok()) return begun.status();
    work = *begun;
    // A short call is over before it pays to let go of the lock.
    for (int turn = 0; turn < kShortCall && !background.joinable() && !crowded; ++turn) {
      if (std::optional<absl::Status> result = reap(work)) return *std::move(result);
      advance();
    }
  }
  return wait(work);
}

absl::StatusOr<Work> Communicator::Impl::begin_locked(const Request& request) {
  bool in_place = false;
  if (absl::Status status = check(request, in_place); !status.ok()) return status;
  if (!broken.ok()) return broken;
  absl::StatusOr<CachedChoice*> chosen = choose(request);
  if (!chosen.ok()) return chosen.status();
  absl::StatusOr<uint32_t> way = way_for(**chosen);
  if (!way.ok()) return way.status();
  const Choice& choice = (*chosen)->ways[*way].choice;
  CachedPrograms*& schedule = (*chosen)->ways[*way].programs[in_place ? 1 : 0];
  if (schedule == nullptr) {
    absl::StatusOr<CachedPrograms*> made = programs(choice.spec, in_place);
    if (!made.ok()) return made.status();
    schedule = *made;
  }
  absl::StatusOr<WorkSlot*> slot = take_slot();
  if (!slot.ok()) return slot.status();

  Call& call = (*slot)->call;
  const size_t element = size_of(request.type);
  // Whole cache lines, but never more than a slot holds.
  size_t part = std::max<size_t>(choice.part_bytes, 1);
  if (part >= 64) part = (part + 63) & ~size_t{63};
  part = std::min(part, options.slot_bytes / schedule->max_message_parts);
  call.geometry = {request.collective, element, request.count,
                   std::max<size_t>(1, (part < 64 ? part + element - 1 : part) / element),
                   schedule->parts};
  call.type = request.type;
  call.op = request.op;
  // The executor writes to `out` only, or to `in` where that is the same memory.
  call.in = static_cast<std::byte*>(const_cast<void*>(request.in));
  call.out = static_cast<std::byte*>(request.out);
  call.programs = &schedule->programs;
  call.pieces = call.geometry.pieces();
  const Time timeout =
      request.options.timeout == Time::zero() ? options.timeout : request.options.timeout;
  call.deadline = timeout == kNever ? kNever : call.began + timeout;
  call.descriptor = {.sequence = ++sequence,
                     .count = request.count,
                     .part_elements = call.geometry.part_elements,
                     .root = static_cast<uint32_t>(request.root),
                     .node_size = choice.spec.node_size,
                     .channels = static_cast<uint16_t>(choice.spec.channels),
                     .collective = static_cast<uint8_t>(request.collective),
                     .type = static_cast<uint8_t>(request.type),
                     .op = static_cast<uint8_t>(request.op),
                     .algorithm = static_cast<uint8_t>(choice.spec.algorithm),
                     .ordered = static_cast<uint8_t>(choice.spec.ordered ? 1 : 0)};
  call.fingerprint = call.descriptor.fingerprint();
  control->calls[sequence % ControlBlock::kCalls] = call.descriptor;
  control->entered.store(sequence, std::memory_order_release);
  recorder->record({.at = call.began,
                    .kind = collectives::FlightEvent::Kind::kCallBegin,
                    .collective = request.collective,
                    .sequence = sequence,
                    .bytes = request.count * element});
  if (any_transfer) compare_calls();
  (*slot)->choice = static_cast<uint32_t>(*chosen - choices.data());
  (*slot)->way = *way;
  const Work work{(*slot)->id.load(std::memory_order_relaxed)};
  executor->start(call);
  advance();
  if (background.joinable()) background_wakes.notify_one();
  return work;
}

std::string Communicator::Impl::explain(Collective collective, size_t bytes,
                                        const CallOptions& call_options) {
  Request request;
  request.collective = collective;
  request.options = call_options;
  CallShape shape = shape_of(request);
  shape.bytes = bytes;
  double actual = 0;
  for (const CachedChoice& cached : choices) {
    if (cached.shape == shape && !cached.ways.empty()) actual = cached.ways[cached.best].last;
  }
  absl::StatusOr<std::vector<Choice>> all = model->candidates(shape);
  if (!all.ok()) return std::string(all.status().message());
  for (const CachedChoice& cached : choices) {
    if (!(cached.shape == shape) || !cached.settled) continue;
    // What trials have found goes before what was predicted.
    const Choice& best = cached.ways[cached.best].choice;
    auto at = std::find_if(all->begin(), all->end(), [&](const Choice& choice) {
      return choice.spec == best.spec && choice.part_bytes == best.part_bytes;
    });
    if (at != all->end()) std::rotate(all->begin(), at, at + 1);
  }
  const std::string table = collectives::explain(shape, *all, actual);
  if (calibrated_in == Time::zero()) return table + "model, not measured: assumed costs\n";
  const collectives::CostParameters& cost = model->parameters();
  return absl::StrFormat(
      "%smodel, measured in %.1f ms at the start: a message takes %.2f us and %.2f GB/s here, "
      "%.2f us and %.2f GB/s to other nodes; combining %.1f GB/s\n",
      table, std::chrono::duration<double, std::milli>(calibrated_in).count(),
      cost.local.alpha * 1e6, 1e-9 / cost.local.beta, cost.remote.alpha * 1e6,
      1e-9 / cost.remote.beta, 1e-9 / cost.gamma);
}

void Communicator::Impl::on_done(Call&, void* context) {
  auto* slot = static_cast<WorkSlot*>(context);
  slot->owner->finished.push_back(slot);
}

// The call has ended. Its slot is free once the caller has heard of it; the slots of parts at once.
void Communicator::Impl::finish(WorkSlot& slot, absl::Status result) {
  const Call& call = slot.call;
  in_flight.erase(std::find(in_flight.begin(), in_flight.end(), &slot));
  // The clock costs as much as a small call: look at it now and then only.
  CachedChoice* cached = slot.choice < choices.size() ? &choices[slot.choice] : nullptr;
  const bool small =
      call.pieces == 1 && call.descriptor.sequence % 16 != 0 && result.ok() &&
      (cached == nullptr || cached->settled) &&
      call.geometry.count * call.geometry.element_bytes <= collectives::Letter::kPayload;
  const Time end = small ? call.began : now();
  recorder->record({.at = end,
                    .kind = collectives::FlightEvent::Kind::kCallEnd,
                    .collective = call.geometry.collective,
                    .status = static_cast<uint8_t>(result.code()),
                    .sequence = call.descriptor.sequence});
  if (result.ok() && !small && cached != nullptr && slot.way < cached->ways.size()) {
    Way& way = cached->ways[slot.way];
    way.last = std::chrono::duration<double>(end - call.began).count();
    if (!cached->settled && way.trials.size() < way.trials.capacity()) {
      way.trials.push_back(way.last);
    }
  }
  WorkSlot* parent = slot.parent;
  slot.result = result;
  if (parent != nullptr) {
    slot.id.store(0, std::memory_order_release);
    if (result.ok() && --parent->parts_left == 0) finish(*parent, absl::OkStatus());
    return;
  }
  slot.done.store(true, std::memory_order_release);
  if (background.joinable()) call_ended.notify_all();
}

}  // namespace baton
