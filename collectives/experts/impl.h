// The inside of an Experts: a group of its own, whose lost ranks are masked, and one or two
// windows.
//
// A call is some accesses to windows, whose ends are awaited, and then this rank's own work:
//
//   dispatch   to each rank its list and rows, with a signal of their number plus one; from each
//   rank
//              the same. Then lists become slots.
//   combine    to each rank word that its pairs' outputs are there: a signal, where it reads them
//   in
//              place, else the outputs themselves. From each the same. Then sums.
//
// So a rank writes where others may read or write only when these have nothing to do with what was
// there: rows for a rank after its combine of the round before in that place, outputs after all
// others' dispatches of this one. A rank that is masked is not waited for, and may still be
// reading: its word in `masks` is set before, and it looks there when it has read.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "collectives/experts.h"
#include "collectives/experts/routing.h"
#include "collectives/window.h"

namespace baton {

class Experts::Impl {
 public:
  // Makes an Experts in steps: while `making()`, advance() is to be called when the work
  // `pending()` of `maker()` has ended.
  Impl(Communicator& comm, const ExpertsOptions& options);
  ~Impl();
  bool making() const { return step_ != MakingStep::kMade; }
  Work pending() const { return pending_; }
  Communicator& maker() { return step_ == MakingStep::kCards ? comm_ : *group_; }
  absl::Status begin();
  absl::Status advance();

  absl::StatusOr<Work> dispatch(const void* rows, int tokens, absl::Span<const int32_t> chosen);
  absl::StatusOr<ExpertRows> received(Work dispatch) const;
  absl::StatusOr<Work> combine(Work dispatch, absl::Span<const float> weights, void* out,
                               size_t out_bytes);
  absl::Status wait(Work work, Time timeout);
  std::optional<absl::Status> test(Work work);
  std::vector<int> missing(Work work) const;
  std::vector<int> masked() const;
  std::string explain() const;

  const ExpertsOptions& options() const { return options_; }
  const collectives::experts::Geometry& geometry() const { return geometry_; }
  size_t bytes() const { return window_->bytes() + (returned_ ? returned_->bytes() : 0); }

 private:
  enum class MakingStep : uint8_t { kCards, kWindow, kViews, kReturned, kMade };
  enum class Stage : uint8_t { kFree, kDispatching, kDispatched, kCombining };
  struct Card;

  struct Awaited {
    Work work;
    uint32_t rank = 0;
    bool arrival = false;  // of what this rank waits for; else what it has sent
  };
  // In one place; its memory is reused.
  struct Round {
    Stage stage = Stage::kFree;
    uint64_t number = 0;
    uint32_t place = 0;
    std::vector<Awaited> awaited;
    std::vector<bool> arrived;  // by rank, in this call
    std::vector<int> missing_dispatch, missing_combine;
    collectives::experts::Routing routing;
    collectives::experts::Slots slots;
    absl::Span<const float> weights;
    std::byte* out = nullptr;
  };

  absl::Status compare_cards() const;
  bool sees(uint32_t reader, uint32_t owner) const { return views_seen_[reader * ranks_ + owner]; }

  Round& round_in(uint64_t number) {
    return rounds_[number % static_cast<uint64_t>(options_.in_flight)];
  }
  // The round of a call that is running; null if there is none.
  Round* running(Work work);
  void send(Round& round, uint32_t target, const std::byte* rows, const CallOptions& call);
  void fill_rows(const Round& round, uint32_t target, const std::byte* rows, std::byte* to) const;
  void await(Round& round, uint32_t rank, bool arrival, const absl::StatusOr<Work>& work);
  void heard(Round& round, const Awaited& awaited, const absl::Status& status);
  void mask(uint32_t rank, const absl::Status& why);
  absl::Status finish(Round& round);
  absl::Status finish_dispatch(Round& round);
  void finish_combine(Round& round);
  bool sum_tokens(Round& round);
  void tell_read(const Round& round, const std::vector<bool>& whose);
  std::vector<int> not_arrived(const Round& round) const;
  std::byte* memory() const { return window_->data(); }
  uint32_t slot_of(const Round& round, uint32_t which) const { return round.place * 3 + which; }

  Communicator& comm_;
  const ExpertsOptions options_;
  const uint32_t rank_, ranks_;
  const Time rank_timeout_;
  collectives::experts::Geometry geometry_;

  MakingStep step_ = MakingStep::kCards;
  Work pending_;
  std::vector<std::byte> exchange_in_, exchange_out_;
  std::unique_ptr<Communicator> group_;
  std::unique_ptr<Window> window_, returned_;
  std::vector<RemoteView> views_;  // by rank; data null: cannot be mapped
  std::vector<bool> views_seen_;   // [reader][owner]

  absl::Status status_;  // OK, or why nothing works any more
  std::vector<Round> rounds_;
  uint64_t next_ = 0;  // round
  std::vector<bool> masked_;
  std::vector<std::string> why_masked_;
  std::vector<uint64_t> consumed_;  // [places][ranks]: of the signal of dispatches
  std::vector<uint64_t> told_;      // [places][ranks]: signals of combines to that rank
  std::vector<uint64_t> heard_;     // [places][ranks]: and from it
  uint64_t rows_sent_ = 0, bytes_sent_ = 0;
};

}  // namespace baton
