// Rounds: what goes out, what is awaited, and what becomes of it.
#include "collectives/experts/impl.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "collectives/reduce/reduce.h"
#include "transport/base/durations.h"
#include "transport/internal/device_memory.h"

namespace baton {

namespace reduce = collectives::reduce;
using collectives::experts::kMostTopK;
using collectives::experts::Routing;

namespace {

// The signals of a place.
enum Signal : uint32_t { kDispatched, kCombined, kRead };

// Calls are numbered: a round's dispatch, then its combine.
Work dispatch_work(uint64_t round) { return {2 * round + 1}; }
Work combine_work(uint64_t round) { return {2 * round + 2}; }
uint64_t round_of(Work work) { return (work.sequence - 1) / 2; }
bool is_dispatch(Work work) { return work.sequence % 2 == 1; }

bool on_device(const void* data, size_t bytes) {
  const internal::DeviceMemory* const devices = internal::device_memory();
  if (devices == nullptr || bytes == 0) return false;
  const absl::StatusOr<MemoryPlace> place = devices->place(data, bytes);
  return place.ok() && place->kind == MemoryKind::kDevice;
}

absl::Status check_memory(const void* data, size_t bytes, const char* what) {
  if (bytes > 0 && data == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat(what, " is null"));
  }
  if (on_device(data, bytes)) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, " is memory of a device: copy it to the host first"));
  }
  return absl::OkStatus();
}

// A rank's word of `masks`, which lie in this rank's window or in a mapped one.
std::atomic_ref<uint32_t> word_of(const std::byte* masks, uint32_t rank) {
  auto* const words = reinterpret_cast<uint32_t*>(const_cast<std::byte*>(masks));
  return std::atomic_ref<uint32_t>(words[rank]);
}

}  // namespace

// Others may be reading what this rank's experts said. First they hear that this rank reads nothing
// of rounds that are open, which they may be waiting for here, too.
Experts::Impl::~Impl() {
  if (making()) return;
  CallOptions call;
  call.timeout = rank_timeout_;
  std::vector<Work> reads;
  for (Round& round : rounds_) {
    if (round.stage != Stage::kFree) tell_read(round, std::vector<bool>(ranks_, true));
    for (uint32_t reader = 0; reader < ranks_ && group_->status().ok(); ++reader) {
      const uint64_t told = told_[round.place * ranks_ + reader];
      if (reader == rank_ || told == 0 || masked_[reader] || !sees(reader, rank_)) continue;
      const auto read =
          window_->wait_signal(static_cast<int>(reader), slot_of(round, kRead), told, call);
      if (read.ok()) reads.push_back(*read);
    }
  }
  for (const Work read : reads) group_->wait(read).IgnoreError();
}

// --- dispatch ------------------------------------------------------------------------------------

absl::StatusOr<Work> Experts::Impl::dispatch(const void* rows, int tokens,
                                             absl::Span<const int32_t> chosen) {
  if (!status_.ok()) return status_;
  Round& round = round_in(next_);
  if (round.stage != Stage::kFree) {
    return absl::FailedPreconditionError(
        absl::StrFormat("dispatch: %d rounds are open, as many as ExpertsOptions::in_flight says: "
                        "combine the oldest first",
                        options_.in_flight));
  }
  if (tokens < 0 || tokens > options_.max_tokens) {
    return absl::InvalidArgumentError(
        absl::StrFormat("dispatch of %d tokens: 0 to %d (ExpertsOptions::max_tokens) go in a round",
                        tokens, options_.max_tokens));
  }
  const size_t choices = static_cast<size_t>(tokens) * geometry_.top_k;
  if (chosen.size() != choices) {
    return absl::InvalidArgumentError(
        absl::StrFormat("dispatch of %d tokens with %u choices: there are %u, top_k of each token",
                        tokens, chosen.size(), choices));
  }
  absl::Status status =
      check_memory(rows, static_cast<size_t>(tokens) * geometry_.value_bytes, "dispatch: rows");
  if (status.ok()) status = round.routing.set(geometry_, options_.experts, tokens, chosen);
  if (!status.ok()) return status;

  round.number = next_++;
  round.stage = Stage::kDispatching;
  round.awaited.clear();
  round.arrived.assign(ranks_, false);
  round.missing_dispatch.clear();
  round.missing_combine.clear();
  CallOptions call;
  call.timeout = rank_timeout_;
  // Beginning behind this rank, so that not all write to the same one.
  for (uint32_t i = 1; i <= ranks_; ++i) {
    const uint32_t target = (rank_ + i) % ranks_;
    if (!masked_[target]) send(round, target, static_cast<const std::byte*>(rows), call);
  }
  for (uint32_t source = 0; source < ranks_; ++source) {
    if (source == rank_ || masked_[source]) continue;
    const uint64_t before = consumed_[round.place * ranks_ + source];
    await(round, source, true,
          window_->wait_signal(static_cast<int>(source), slot_of(round, kDispatched), before + 1,
                               call));
  }
  return dispatch_work(round.number);
}

void Experts::Impl::send(Round& round, uint32_t target, const std::byte* rows,
                         const CallOptions& call) {
  const std::vector<uint32_t>& chosen = round.routing.rows(target);
  const size_t list_bytes = geometry_.list_bytes(chosen.size());
  const size_t row_bytes = chosen.size() * geometry_.row_stride;
  const size_t there = geometry_.rows_at(round.place, rank_);
  if (target == rank_) {
    round.routing.write(geometry_, target, round.number, memory() + there - list_bytes);
    fill_rows(round, target, rows, memory() + there);
    round.arrived[rank_] = true;
    return;
  }
  rows_sent_ += chosen.size();
  bytes_sent_ += list_bytes + row_bytes;
  std::byte* const sent = memory() + geometry_.sent_rows(round.place, target);
  round.routing.write(geometry_, target, round.number, sent - list_bytes);
  const auto to = static_cast<int>(target);
  const uint32_t slot = slot_of(round, kDispatched);
  if (row_bytes <= geometry_.packed_bytes) {
    fill_rows(round, target, rows, sent);
    await(round, target, false,
          window_->put_signal(sent - list_bytes, list_bytes + row_bytes, to, there - list_bytes,
                              slot, chosen.size() + 1, call));
    return;
  }
  await(round, target, false,
        window_->put(sent - list_bytes, list_bytes, to, there - list_bytes, call));
  const WindowRows apart{chosen, {}, geometry_.value_bytes, geometry_.value_bytes, 0};
  await(round, target, false,
        window_->put_rows(rows, apart, to, there, slot, chosen.size() + 1, call));
}

void Experts::Impl::fill_rows(const Round& round, uint32_t target, const std::byte* rows,
                              std::byte* to) const {
  const auto hidden = static_cast<size_t>(options_.hidden);
  for (const uint32_t token : round.routing.rows(target)) {
    const std::byte* const row = rows + token * geometry_.value_bytes;
    if (options_.fp8) {
      reduce::to_e4m3(options_.type, row, hidden, reinterpret_cast<uint8_t*>(to),
                      reinterpret_cast<float*>(to + geometry_.scales_offset));
    } else {
      std::memcpy(to, row, geometry_.value_bytes);
    }
    to += geometry_.row_stride;
  }
}

absl::Status Experts::Impl::finish_dispatch(Round& round) {
  round.slots.begin(geometry_);
  for (uint32_t source = 0; source < ranks_; ++source) {
    if (!round.arrived[source]) continue;
    size_t rows = round.routing.rows(source).size();
    if (source != rank_) {
      const auto value =
          window_->signal_value(static_cast<int>(source), slot_of(round, kDispatched));
      if (!value.ok()) return value.status();
      uint64_t& before = consumed_[round.place * ranks_ + source];
      rows = static_cast<size_t>(*value - std::exchange(before, *value)) - 1;
    }
    absl::Status status = round.slots.add(geometry_, source, round.number, rows,
                                          memory() + geometry_.rows_at(round.place, source));
    if (!status.ok()) return status;
  }
  round.slots.finish(geometry_, memory(), round.place);
  round.missing_dispatch = not_arrived(round);
  round.stage = Stage::kDispatched;
  return absl::OkStatus();
}

absl::StatusOr<ExpertRows> Experts::Impl::received(Work dispatch) const {
  const Round& round = rounds_[round_of(dispatch) % rounds_.size()];
  if (!is_dispatch(dispatch) || round.number != round_of(dispatch) ||
      round.stage != Stage::kDispatched) {
    return absl::FailedPreconditionError(
        "received: that is no dispatch that has ended and is not combined yet");
  }
  ExpertRows rows;
  rows.groups = round.slots.groups();
  rows.row_of = round.slots.row_of();
  rows.rows = memory() + geometry_.received(round.place);
  rows.row_stride = geometry_.row_stride;
  rows.scales_offset = geometry_.scales_offset;
  rows.outputs = memory() + geometry_.outputs(round.place);
  rows.output_stride = geometry_.value_bytes;
  rows.work = dispatch;
  return rows;
}

// --- combine -------------------------------------------------------------------------------------

absl::StatusOr<Work> Experts::Impl::combine(Work dispatch, absl::Span<const float> weights,
                                            void* out, size_t out_bytes) {
  if (!status_.ok()) return status_;
  if (absl::Status status = received(dispatch).status(); !status.ok()) {
    return absl::FailedPreconditionError(
        "combine: pass a dispatch that has ended and was not combined before");
  }
  Round& round = round_in(round_of(dispatch));
  const size_t tokens = round.routing.tokens();
  if (weights.size() != tokens * geometry_.top_k) {
    return absl::InvalidArgumentError(
        absl::StrFormat("combine of %u tokens with %u weights: pass %u, one for each choice",
                        tokens, weights.size(), tokens * geometry_.top_k));
  }
  const size_t bytes = tokens * geometry_.value_bytes;
  if (out_bytes != bytes) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "combine of %u tokens into %u bytes: rows of `hidden` elements of all tokens have %u",
        tokens, out_bytes, bytes));
  }
  if (absl::Status status = check_memory(out, bytes, "combine: out"); !status.ok()) return status;
  round.weights = weights;
  round.out = static_cast<std::byte*>(out);
  round.stage = Stage::kCombining;
  round.awaited.clear();
  const std::vector<bool> came = std::exchange(round.arrived, std::vector<bool>(ranks_, false));
  round.arrived[rank_] = true;
  // Outputs that were written by streaming stores are there before any signal.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  CallOptions call;
  call.timeout = rank_timeout_;
  for (uint32_t i = 1; i < ranks_; ++i) {
    const uint32_t owner = (rank_ + i) % ranks_;
    if (!came[owner] || masked_[owner]) continue;
    const auto to = static_cast<int>(owner);
    const uint32_t slot = slot_of(round, kCombined);
    ++told_[round.place * ranks_ + owner];
    if (sees(owner, rank_)) {
      await(round, owner, false, window_->signal(to, slot, 1, call));
      continue;
    }
    const WindowRows apart{
        round.slots.slots(owner), {}, geometry_.value_bytes, geometry_.value_bytes, 0};
    bytes_sent_ += apart.from.size() * geometry_.value_bytes;
    await(round, owner, false,
          returned_->put_rows(memory() + geometry_.outputs(round.place), apart, to,
                              geometry_.returned(round.place, rank_), slot, 1, call));
  }
  for (uint32_t expert_rank = 0; expert_rank < ranks_; ++expert_rank) {
    if (expert_rank == rank_ || masked_[expert_rank]) continue;
    Window& window = sees(rank_, expert_rank) ? *window_ : *returned_;
    const uint64_t value = ++heard_[round.place * ranks_ + expert_rank];
    await(
        round, expert_rank, true,
        window.wait_signal(static_cast<int>(expert_rank), slot_of(round, kCombined), value, call));
  }
  return combine_work(round.number);
}

// False: some of what was read may have been overwritten, by a rank that has masked this one; it
// counts as missing now.
bool Experts::Impl::sum_tokens(Round& round) {
  struct Source {
    const std::byte* rows = nullptr;   // null: it is missing
    const std::byte* table = nullptr;  // slots of pairs; null: rows are in the order of pairs
    size_t pair = 0;
  };
  std::vector<Source> sources(ranks_);
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    if (!round.arrived[rank]) continue;
    if (!sees(rank_, rank) && rank != rank_) {
      sources[rank].rows = returned_->data() + geometry_.returned(round.place, rank);
      continue;
    }
    const std::byte* const window = rank == rank_ ? memory() : views_[rank].data;
    sources[rank].rows = window + geometry_.outputs(round.place);
    sources[rank].table = window + geometry_.table(round.place, rank_);
  }
  std::array<const void*, kMostTopK> rows;
  std::array<float, kMostTopK> weights;
  bool whole = true;
  for (size_t token = 0; token < round.routing.tokens(); ++token) {
    size_t count = 0;
    for (const Routing::Choice& choice : round.routing.of(token)) {
      const uint32_t rank = geometry_.owner_of(choice.expert);
      Source& source = sources[rank];
      size_t row = source.pair++;
      if (source.table != nullptr) {
        uint32_t slot;
        std::memcpy(&slot, source.table + row * sizeof slot, sizeof slot);
        if (slot >= geometry_.slots) {
          round.arrived[rank] = whole = false;
          continue;
        }
        row = slot;
      }
      if (source.rows == nullptr) continue;
      rows[count] = source.rows + row * geometry_.value_bytes;
      weights[count++] = round.weights[token * geometry_.top_k + choice.number];
    }
    reduce::weighted_sum(options_.type, round.out + token * geometry_.value_bytes,
                         {rows.data(), count}, {weights.data(), count},
                         static_cast<size_t>(options_.hidden));
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    if (rank == rank_ || !round.arrived[rank] || !sees(rank_, rank)) continue;
    if (word_of(views_[rank].data, rank_).load(std::memory_order_acquire) == 0) continue;
    mask(rank, absl::UnavailableError("that rank has not waited for this one, and masked it"));
    round.arrived[rank] = whole = false;
  }
  return whole;
}

void Experts::Impl::finish_combine(Round& round) {
  while (!sum_tokens(round)) {
  }
  tell_read(round, round.arrived);
  round.missing_combine = not_arrived(round);
  round.stage = Stage::kFree;
}

void Experts::Impl::tell_read(const Round& round, const std::vector<bool>& whose) {
  CallOptions detached;
  detached.detached = true;
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    if (rank == rank_ || !whose[rank] || !sees(rank_, rank)) continue;
    window_->signal(static_cast<int>(rank), slot_of(round, kRead), 1, detached)
        .status()
        .IgnoreError();  // it is gone: it does not wait for this
  }
}

// --- what is awaited -----------------------------------------------------------------------------

void Experts::Impl::await(Round& round, uint32_t rank, bool arrival,
                          const absl::StatusOr<Work>& work) {
  const Awaited awaited{work.ok() ? *work : Work{}, rank, arrival};
  if (!work.ok()) return heard(round, awaited, work.status());
  round.awaited.push_back(awaited);
}

void Experts::Impl::heard(Round& round, const Awaited& awaited, const absl::Status& status) {
  if (status.ok()) {
    if (awaited.arrival) round.arrived[awaited.rank] = true;
  } else if (absl::Status broken = group_->status(); !broken.ok()) {
    status_.Update(broken);
  } else if (absl::IsResourceExhausted(status)) {
    status_.Update(status);
  } else {
    mask(awaited.rank, status);
  }
}

void Experts::Impl::mask(uint32_t rank, const absl::Status& why) {
  if (masked_[rank]) return;
  masked_[rank] = true;
  why_masked_[rank] = std::string(why.message());
  word_of(memory(), rank).store(1, std::memory_order_seq_cst);
}

std::vector<int> Experts::Impl::not_arrived(const Round& round) const {
  std::vector<int> ranks;
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    if (!round.arrived[rank]) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

Experts::Impl::Round* Experts::Impl::running(Work work) {
  if (work.sequence == 0) return nullptr;
  Round& round = round_in(round_of(work));
  const Stage stage = is_dispatch(work) ? Stage::kDispatching : Stage::kCombining;
  return round.number == round_of(work) && round.stage == stage ? &round : nullptr;
}

absl::Status Experts::Impl::finish(Round& round) {
  if (status_.ok() && round.stage == Stage::kDispatching) {
    status_.Update(finish_dispatch(round));
  } else if (status_.ok()) {
    finish_combine(round);
  }
  return status_;
}

absl::Status Experts::Impl::wait(Work work, Time timeout) {
  Round* const round = running(work);
  if (round == nullptr)
    return absl::InvalidArgumentError("wait: no such call of this Experts runs");
  const Clock& clock = group_->worker().clock();
  const Time deadline = base::deadline_after(clock.now(), timeout);
  while (!round->awaited.empty()) {
    const Awaited awaited = round->awaited.back();
    const Time left = timeout == kNever ? kNever : std::max(deadline - clock.now(), Time::zero());
    const absl::Status status = group_->wait(awaited.work, left);
    if (timeout != kNever && absl::IsDeadlineExceeded(status) &&
        absl::StrContains(status.message(), "still runs")) {
      return status;
    }
    round->awaited.pop_back();
    heard(*round, awaited, status);
  }
  return finish(*round);
}

std::optional<absl::Status> Experts::Impl::test(Work work) {
  Round* const round = running(work);
  if (round == nullptr)
    return absl::InvalidArgumentError("test: no such call of this Experts runs");
  while (!round->awaited.empty()) {
    const Awaited awaited = round->awaited.back();
    const std::optional<absl::Status> status = group_->test(awaited.work);
    if (!status.has_value()) return std::nullopt;
    round->awaited.pop_back();
    heard(*round, awaited, *status);
  }
  return finish(*round);
}

std::vector<int> Experts::Impl::missing(Work work) const {
  if (work.sequence == 0) return {};
  const Round& round = rounds_[round_of(work) % rounds_.size()];
  if (round.number != round_of(work)) return {};
  return is_dispatch(work) ? round.missing_dispatch : round.missing_combine;
}

std::vector<int> Experts::Impl::masked() const {
  std::vector<int> ranks;
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    if (masked_[rank]) ranks.push_back(static_cast<int>(rank));
  }
  return ranks;
}

std::string Experts::Impl::explain() const {
  std::string out = absl::StrFormat(
      "%u experts on %u ranks, %u of them here; %u rounds, %u rows to other ranks, %u bytes; %u "
      "bytes of windows\n",
      options_.experts, ranks_, geometry_.local, next_, rows_sent_, bytes_sent_, bytes());
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    if (rank == rank_) continue;
    absl::StrAppend(&out, "rank ", rank, ": ",
                    sees(rank_, rank) ? "what its experts say is read in place"
                                      : "what its experts say is sent here",
                    masked_[rank] ? "; masked: " : "", why_masked_[rank], "\n");
  }
  return out;
}

// --- the public face -----------------------------------------------------------------------------

Experts::Experts(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Experts::~Experts() = default;

int Experts::rank() const { return static_cast<int>(impl_->geometry().rank); }
int Experts::ranks() const { return static_cast<int>(impl_->geometry().ranks); }
int Experts::first_expert() const { return rank() * local_experts(); }
int Experts::local_experts() const { return static_cast<int>(impl_->geometry().local); }
const ExpertsOptions& Experts::options() const { return impl_->options(); }
size_t Experts::bytes() const { return impl_->bytes(); }

absl::StatusOr<Work> Experts::dispatch_async(const void* rows, int tokens,
                                             absl::Span<const int32_t> chosen) {
  return impl_->dispatch(rows, tokens, chosen);
}

absl::StatusOr<ExpertRows> Experts::received(Work dispatch) const {
  return impl_->received(dispatch);
}

absl::StatusOr<Work> Experts::combine_async(Work dispatch, absl::Span<const float> weights,
                                            void* out, size_t out_bytes) {
  return impl_->combine(dispatch, weights, out, out_bytes);
}

absl::Status Experts::wait(Work work, Time timeout) { return impl_->wait(work, timeout); }
std::optional<absl::Status> Experts::test(Work work) { return impl_->test(work); }

absl::StatusOr<ExpertRows> Experts::dispatch(const void* rows, int tokens,
                                             absl::Span<const int32_t> chosen) {
  const absl::StatusOr<Work> work = dispatch_async(rows, tokens, chosen);
  if (!work.ok()) return work.status();
  if (absl::Status status = wait(*work); !status.ok()) return status;
  return received(*work);
}

absl::Status Experts::combine(const ExpertRows& rows, absl::Span<const float> weights, void* out,
                              size_t out_bytes) {
  const absl::StatusOr<Work> work = combine_async(rows.work, weights, out, out_bytes);
  return work.ok() ? wait(*work) : work.status();
}

std::vector<int> Experts::missing(Work work) const { return impl_->missing(work); }
std::vector<int> Experts::masked() const { return impl_->masked(); }
std::string Experts::explain() const { return impl_->explain(); }

void Experts::dequantise(const std::byte* row, const float* scales, size_t elements, float* out) {
  reduce::from_e4m3(reinterpret_cast<const uint8_t*>(row), scales, elements, out);
}

}  // namespace baton
