// Makes an Experts: the ranks agree on its options, make a group and windows, and find out which
// ranks can read each other's memory in place.
#include <algorithm>
#include <array>
#include <climits>
#include <cstring>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "collectives/experts/impl.h"

namespace baton {

using collectives::experts::Geometry;
using collectives::experts::kMostTopK;

namespace {

constexpr uint64_t kOfExperts = 0x6578706572747331;
constexpr Time kRankTimeout = std::chrono::seconds(60);
constexpr int kMostLocal = 32767, kMostInFlight = 4;
constexpr uint32_t kSignalsOfPlace = 3;
constexpr size_t kMostBytes = size_t{1} << 46;

absl::Status check(const ExpertsOptions& options, int ranks) {
  const auto refuse = [](const auto&... parts) {
    return absl::InvalidArgumentError(absl::StrCat(parts...));
  };
  if (options.experts < 1 || options.experts % ranks != 0 || options.experts / ranks > kMostLocal) {
    return refuse("ExpertsOptions::experts is ", options.experts, ": it is a multiple of the ",
                  ranks, " ranks, ", kMostLocal, " for each at most");
  }
  if (options.top_k < 1 || options.top_k > std::min(kMostTopK, options.experts)) {
    return refuse("ExpertsOptions::top_k is ", options.top_k, ": it is 1 to ",
                  std::min(kMostTopK, options.experts));
  }
  if (options.hidden < 1) {
    return refuse("ExpertsOptions::hidden is ", options.hidden, ": a row has elements");
  }
  if (options.max_tokens < 1) {
    return refuse("ExpertsOptions::max_tokens is ", options.max_tokens, ": it is 1 at least");
  }
  if (options.type != DataType::kF32 && options.type != DataType::kBF16 &&
      options.type != DataType::kF16) {
    return refuse("ExpertsOptions::type is ", std::string(name_of(options.type)),
                  ": rows are f32, bf16 or f16");
  }
  if (options.capacity < 0) {
    return refuse("ExpertsOptions::capacity is ", options.capacity, ": it is 0 (exact) or more");
  }
  if (options.in_flight < 1 || options.in_flight > kMostInFlight) {
    return refuse("ExpertsOptions::in_flight is ", options.in_flight, ": it is 1 to ",
                  kMostInFlight);
  }
  if (options.rank_timeout < Time::zero()) {
    return refuse("ExpertsOptions::rank_timeout is ", seconds_of(options.rank_timeout),
                  " s: it is 0 (for 60 s) or more");
  }
  // In doubles: what overflows is too much, too.
  const double slots = std::max(double(options.max_tokens) * options.top_k * ranks,
                                double(options.experts) * options.capacity);
  if (slots > INT_MAX || slots * options.hidden * 4 * options.in_flight > double(kMostBytes)) {
    return refuse("max_tokens ", options.max_tokens, " of ", ranks, " ranks with top_k ",
                  options.top_k, ", capacity ", options.capacity, " and hidden ", options.hidden,
                  " are more than memory can hold");
  }
  return absl::OkStatus();
}

}  // namespace

// The first message of each rank to all others.
struct Experts::Impl::Card {
  uint64_t magic = kOfExperts;
  // In the order of kNames.
  std::array<int32_t, 8> values{};
  int32_t code = 0;  // of what is wrong with the options; 0: nothing
  std::array<char, 212> why{};

  static constexpr std::array<const char*, 8> kNames = {
      "experts", "top_k", "hidden", "max_tokens", "type", "fp8", "capacity", "in_flight"};
};

Experts::Impl::Impl(Communicator& comm, const ExpertsOptions& options)
    : comm_(comm),
      options_(options),
      rank_(static_cast<uint32_t>(comm.rank())),
      ranks_(static_cast<uint32_t>(comm.ranks())),
      rank_timeout_(options.rank_timeout == Time::zero() ? patient(kRankTimeout)
                                                         : options.rank_timeout) {}

absl::Status Experts::Impl::begin() {
  Card card;
  card.values = {options_.experts,
                 options_.top_k,
                 options_.hidden,
                 options_.max_tokens,
                 static_cast<int32_t>(options_.type),
                 options_.fp8,
                 options_.capacity,
                 options_.in_flight};
  const absl::Status own = check(options_, comm_.ranks());
  card.code = static_cast<int32_t>(own.code());
  own.message().copy(card.why.data(), card.why.size() - 1);
  exchange_in_.resize(sizeof card);
  std::memcpy(exchange_in_.data(), &card, sizeof card);
  exchange_out_.resize(ranks_ * sizeof card);
  const auto work =
      comm_.all_gather_async(exchange_in_.data(), exchange_out_.data(), sizeof card, DataType::kU8);
  if (!work.ok()) return work.status();
  pending_ = *work;
  return absl::OkStatus();
}

absl::Status Experts::Impl::compare_cards() const {
  Card first;
  std::memcpy(&first, exchange_out_.data(), sizeof first);
  for (uint32_t rank = 0; rank < ranks_; ++rank) {
    Card card;
    std::memcpy(&card, exchange_out_.data() + rank * sizeof card, sizeof card);
    if (card.magic != kOfExperts) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "rank %u called all_gather where this rank makes Experts: all ranks must make the same "
          "calls in the same order",
          rank));
    }
    card.why.back() = 0;
    if (card.code != 0) {
      return absl::Status(static_cast<absl::StatusCode>(card.code),
                          absl::StrFormat("rank %u: %s", rank, card.why.data()));
    }
    for (size_t i = 0; i < card.values.size(); ++i) {
      if (card.values[i] == first.values[i]) continue;
      const auto value = [i](const Card& of) {
        return i == 4 ? std::string(name_of(static_cast<DataType>(of.values[i])))
                      : absl::StrCat(of.values[i]);
      };
      return absl::InvalidArgumentError(absl::StrFormat(
          "ExpertsOptions::%s is %s at rank 0 and %s at rank %u: it is equal at all ranks",
          Card::kNames[i], value(first), value(card), rank));
    }
  }
  return absl::OkStatus();
}

absl::Status Experts::Impl::advance() {
  switch (step_) {
    case MakingStep::kCards: {
      if (absl::Status status = compare_cards(); !status.ok()) return status;
      geometry_ = Geometry(options_, comm_.rank(), comm_.ranks());
      std::vector<int> all(ranks_);
      std::iota(all.begin(), all.end(), 0);
      GroupOptions group;
      group.name = absl::StrCat(comm_.name(), ", experts");
      group.tune = false;
      group.mask_lost = true;
      auto made = comm_.subgroup(all, group);
      if (!made.ok()) return made.status();
      group_ = *std::move(made);
      const auto signals = static_cast<uint32_t>(options_.in_flight) * kSignalsOfPlace;
      auto window = Window::begin(*group_, nullptr, geometry_.window_bytes, true,
                                  {.signals = signals}, pending_);
      if (!window.ok()) return window.status();
      window_ = *std::move(window);
      step_ = MakingStep::kWindow;
      return absl::OkStatus();
    }
    case MakingStep::kWindow: {
      if (absl::Status status = window_->finish(); !status.ok()) return status;
      views_.resize(ranks_);
      exchange_in_.assign(ranks_, std::byte{0});
      exchange_out_.assign(ranks_ * ranks_, std::byte{0});
      for (uint32_t rank = 0; rank < ranks_; ++rank) {
        absl::StatusOr<RemoteView> view = window_->view(static_cast<int>(rank));
        if (!view.ok()) continue;
        views_[rank] = *std::move(view);
        exchange_in_[rank] = std::byte{1};
      }
      const auto work = group_->all_gather_async(exchange_in_.data(), exchange_out_.data(), ranks_,
                                                 DataType::kU8);
      if (!work.ok()) return work.status();
      pending_ = *work;
      step_ = MakingStep::kViews;
      return absl::OkStatus();
    }
    case MakingStep::kViews: {
      for (const std::byte seen : exchange_out_) views_seen_.push_back(seen != std::byte{0});
      const bool all =
          std::all_of(views_seen_.begin(), views_seen_.end(), [](bool b) { return b; });
      if (all) break;
      const auto signals = static_cast<uint32_t>(options_.in_flight) * kSignalsOfPlace;
      auto window = Window::begin(*group_, nullptr, geometry_.returned_window_bytes, true,
                                  {.signals = signals}, pending_);
      if (!window.ok()) return window.status();
      returned_ = *std::move(window);
      step_ = MakingStep::kReturned;
      return absl::OkStatus();
    }
    case MakingStep::kReturned:
      if (absl::Status status = returned_->finish(); !status.ok()) return status;
      break;
    default:
      return absl::OkStatus();
  }
  const auto places = static_cast<size_t>(options_.in_flight);
  rounds_.resize(places);
  for (size_t place = 0; place < places; ++place) {
    rounds_[place].place = static_cast<uint32_t>(place);
    rounds_[place].arrived.resize(ranks_);
  }
  masked_.resize(ranks_);
  why_masked_.resize(ranks_);
  consumed_.resize(places * ranks_);
  told_.resize(places * ranks_);
  heard_.resize(places * ranks_);
  step_ = MakingStep::kMade;
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Experts>> Experts::create(Communicator& comm,
                                                         const ExpertsOptions& options) {
  auto impl = std::make_unique<Impl>(comm, options);
  absl::Status status = impl->begin();
  while (status.ok() && impl->making()) {
    status = impl->maker().wait(impl->pending());
    if (status.ok()) status = impl->advance();
  }
  if (!status.ok()) return status;
  return std::unique_ptr<Experts>(new Experts(std::move(impl)));
}

}  // namespace baton
