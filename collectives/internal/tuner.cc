// Choosing the candidates of a shape, trying them, and settling on one by a vote of all ranks.
#include "collectives/internal/tuner.h"

#include <algorithm>
#include <array>

#include "absl/strings/str_format.h"
#include "collectives/executor/control_block.h"

namespace baton::collectives::internal {

using prediction::CallShape;
using prediction::Choice;
using prediction::CostParameters;
using prediction::Override;

namespace {

constexpr size_t kMaxEntries = 64;
constexpr uint32_t kMostAlgorithms = 5;
// Candidates that are predicted to take longer than the best by this factor are not tried.
constexpr double kWorthTrying = 5;
// Rounds of trials: small calls are cheap to try, and are disturbed more easily. Large calls take
// the candidates in turns, so that what comes and goes is shared by all; their first round touches
// memory that no rank has touched before, and is not compared.
constexpr uint32_t kRounds = 5;
constexpr uint32_t kRoundsOfSmall = 15;
// Small calls before those: they take the messages of a link in turn, whose memory no rank has
// touched yet, and would all be held against the candidate that is tried first.
constexpr uint32_t kFirstCalls = executor::kLanes * schedules::kMessagesAhead;
constexpr double kSmallCall = 1e-3;  // seconds, as predicted
// Calls between the start of the vote and its use: it travels while they run.
constexpr uint32_t kVotingCalls = 4;
// A candidate must be so much faster than a better predicted one to be taken instead: trials are
// few.
constexpr double kClearly = 0.88;
// One that differs in its chunks alone is disturbed as the other is.
constexpr double kSomewhat = 0.95;
// Chunks that are tried beside the predicted one, in eighths of a slot.
constexpr std::array<size_t, 2> kSmallerChunks = {3, 2};
constexpr double kNotThis = 1e9;  // seconds

}  // namespace

// One candidate to run calls of a shape, and what it took.
struct Tuner::Candidate {
  Choice choice;
  const Programs* programs[2] = {nullptr, nullptr};  // out of place, in place
  std::vector<double> trials;                        // seconds
  double last = 0;                                   // of the last call
};

// The candidates, the predicted best first: they are tried in turn.
class Tuner::Entry {
 public:
  bool small() const { return candidates.front().choice.seconds < kSmallCall; }
  uint32_t rounds() const { return small() ? kRoundsOfSmall : kRounds; }
  uint32_t first_calls() const { return small() ? kFirstCalls : 0; }  // of the first candidate
  uint32_t trials() const {
    return first_calls() + static_cast<uint32_t>(candidates.size()) * rounds();
  }
  // The candidate of the next call.
  uint32_t next() const {
    if (settled || calls >= trials()) return best;
    if (!small()) return calls % static_cast<uint32_t>(candidates.size());
    return calls < first_calls() ? 0 : (calls - first_calls()) / rounds();
  }

  CallShape shape;
  Override fixed;
  std::vector<Candidate> candidates;
  uint32_t best = 0;   // in `candidates`
  uint32_t calls = 0;  // so far, while candidates are tried
  bool settled = false;
  std::vector<double> votes;  // what the ranks measured, being combined
  Work vote;                  // sequence 0: none under way
};

Tuner::Tuner(const Settings& settings, const CostParameters& cost)
    : settings_(settings), model_(cost, settings.slot_bytes, executor::kLanes) {
  entries_.reserve(kMaxEntries);
}

Tuner::~Tuner() = default;

absl::StatusOr<Tuner::Entry*> Tuner::entry_of(const CallShape& shape, const Override& fixed) {
  auto matches = [&](const Entry& entry) { return entry.shape == shape && entry.fixed == fixed; };
  if (last_ != nullptr && matches(*last_)) return last_;
  for (Entry& entry : entries_) {
    if (matches(entry)) return last_ = &entry;
  }
  absl::StatusOr<std::vector<Candidate>> candidates = candidates_for(shape, fixed);
  if (!candidates.ok()) return candidates.status();
  if (entries_.size() < kMaxEntries) {
    last_ = &entries_.emplace_back();
  } else {
    do {
      last_ = &entries_[next_++ % kMaxEntries];
    } while (last_->vote.sequence != 0);
    *last_ = Entry{};
  }
  last_->shape = shape;
  last_->fixed = fixed;
  last_->candidates = *std::move(candidates);
  last_->settled = last_->candidates.size() == 1;
  return last_;
}

absl::StatusOr<std::vector<Tuner::Candidate>> Tuner::candidates_for(const CallShape& shape,
                                                                    const Override& fixed) const {
  std::vector<Candidate> candidates;
  const bool tries = settings_.tune && settings_.ranks > 1 && !fixed.algorithm &&
                     fixed.channels == 0 && fixed.chunk_bytes == 0 &&
                     shape.collective != Collective::kBarrier;
  if (!tries) {
    absl::StatusOr<Choice> choice = model_.choose(shape, fixed);
    if (!choice.ok()) return choice.status();
    candidates.push_back({.choice = *choice});
    return candidates;
  }
  absl::StatusOr<std::vector<Choice>> all = model_.candidates(shape, fixed);
  if (!all.ok()) return all.status();
  const auto add = [&](const Choice& choice) {
    candidates.push_back({.choice = choice});
    candidates.back().trials.reserve(kFirstCalls + kRoundsOfSmall);
  };
  // How much of a message the caches hold on to, the model does not know.
  const Choice& best = all->front();
  add(best);
  for (const size_t eighths : kSmallerChunks) {
    absl::StatusOr<Choice> smaller =
        model_.choose(shape, {.algorithm = best.spec.algorithm,
                              .channels = best.spec.channels,
                              .chunk_bytes = settings_.slot_bytes / 8 * eighths});
    if (!smaller.ok()) return smaller.status();
    if (smaller->part_bytes < candidates.back().choice.part_bytes) add(*smaller);
  }
  uint32_t algorithms = 1;
  for (const Choice& choice : *all) {
    if (choice.seconds > kWorthTrying * best.seconds || algorithms == kMostAlgorithms) break;
    const bool known =
        std::any_of(candidates.begin(), candidates.end(), [&](const Candidate& candidate) {
          return candidate.choice.spec.algorithm == choice.spec.algorithm;
        });
    if (known) continue;
    add(choice);
    ++algorithms;
  }
  return candidates;
}

Tuner::Due Tuner::due(const Entry& entry) const {
  if (entry.settled || entry.calls < entry.trials()) return Due::kNothing;
  if (entry.vote.sequence == 0) return Due::kVote;
  return entry.calls < entry.trials() + kVotingCalls ? Due::kNothing : Due::kAwait;
}

std::vector<double>& Tuner::votes(Entry& entry) {
  entry.votes.clear();
  for (Candidate& candidate : entry.candidates) {
    std::vector<double>& trials = candidate.trials;
    const size_t first = !entry.small()                            ? 1
                         : &candidate == &entry.candidates.front() ? kFirstCalls
                                                                   : 0;
    trials.erase(trials.begin(),
                 trials.begin() + static_cast<ptrdiff_t>(std::min(first, trials.size())));
    std::sort(trials.begin(), trials.end());
    entry.votes.push_back(trials.empty() ? kNotThis : trials[(trials.size() - 1) / 2]);
  }
  if (entry.small() && settings_.short_trials_mean_nothing) {
    std::fill(entry.votes.begin() + 1, entry.votes.end(), kNotThis);
  }
  return entry.votes;
}

void Tuner::vote_began(Entry& entry, Work vote) { entry.vote = vote; }

Work Tuner::vote_of(const Entry& entry) const { return entry.vote; }

void Tuner::vote_ended(Entry& entry) {
  entry.vote = Work{};
  for (uint32_t candidate = 0; candidate < entry.candidates.size(); ++candidate) {
    const bool alike = entry.candidates[candidate].choice.spec.algorithm ==
                       entry.candidates[entry.best].choice.spec.algorithm;
    if (entry.votes[candidate] < (alike ? kSomewhat : kClearly) * entry.votes[entry.best]) {
      entry.best = candidate;
    }
  }
  entry.settled = true;
}

absl::StatusOr<Tuner::Pick> Tuner::take(Entry& entry, bool in_place) {
  const uint32_t number = entry.next();
  Candidate& candidate = entry.candidates[number];
  const Programs*& schedule = candidate.programs[in_place ? 1 : 0];
  if (schedule == nullptr) {
    absl::StatusOr<const Programs*> made = programs(candidate.choice.spec, in_place);
    if (!made.ok()) return made.status();
    schedule = *made;
  }
  if (!entry.settled) ++entry.calls;
  return Pick{&candidate.choice, schedule, static_cast<uint32_t>(&entry - entries_.data()), number};
}

absl::StatusOr<const Tuner::Programs*> Tuner::programs(const schedules::ScheduleSpec& spec,
                                                       bool in_place) {
  for (const auto& known : programs_) {
    if (known->spec == spec && known->in_place == in_place) return known.get();
  }
  auto fresh = std::make_unique<Programs>();
  fresh->spec = spec;
  fresh->in_place = in_place;
  fresh->parts = schedules::parts_of(spec);
  fresh->max_message_parts = std::max(1u, schedules::max_message_parts(spec));
  fresh->max_part_bytes = settings_.slot_bytes / fresh->max_message_parts;
  for (uint32_t channel = 0; channel < spec.channels; ++channel) {
    schedules::ScheduleSpec own = spec;
    own.separate = !in_place;
    absl::StatusOr<schedules::Program> program =
        schedules::write_program(own, settings_.rank, channel);
    if (!program.ok()) return program.status();
    fresh->programs.push_back(
        executor::prepare(*std::move(program), spec.collective, settings_.rank, in_place));
  }
  programs_.push_back(std::move(fresh));
  return programs_.back().get();
}

bool Tuner::measuring(uint32_t entry) const {
  return entry < entries_.size() && !entries_[entry].settled;
}

void Tuner::measured(uint32_t entry, uint32_t candidate, double seconds) {
  if (entry >= entries_.size() || candidate >= entries_[entry].candidates.size()) return;
  Candidate& one = entries_[entry].candidates[candidate];
  one.last = seconds;
  if (!entries_[entry].settled && one.trials.size() < one.trials.capacity()) {
    one.trials.push_back(seconds);
  }
}

void Tuner::set_parameters(const CostParameters& cost, Time took) {
  model_.set_parameters(cost);
  entries_.clear();
  last_ = nullptr;
  calibrated_in_ = took;
}

std::string Tuner::explain(const CallShape& shape) const {
  absl::StatusOr<std::vector<Choice>> all = model_.candidates(shape);
  if (!all.ok()) return std::string(all.status().message());
  double actual = 0;
  for (const Entry& entry : entries_) {
    if (!(entry.shape == shape) || entry.candidates.empty()) continue;
    const Candidate& best = entry.candidates[entry.best];
    actual = best.last;
    if (!entry.settled) continue;
    // Measured times override predictions.
    auto at = std::find_if(all->begin(), all->end(), [&](const Choice& choice) {
      return choice.spec == best.choice.spec && choice.part_bytes == best.choice.part_bytes;
    });
    if (at != all->end()) {
      std::rotate(all->begin(), at, at + 1);
    } else {
      all->insert(all->begin(), best.choice);
    }
  }
  const std::string table = prediction::explain(shape, *all, actual);
  if (calibrated_in_ == Time::zero()) return table + "model, not measured: assumed costs\n";
  const CostParameters& cost = model_.parameters();
  return absl::StrFormat(
      "%smodel, measured in %.1f ms at the start: a message takes %.2f us and %.2f GB/s here, "
      "%.2f us and %.2f GB/s to other nodes; combining %.1f GB/s\n",
      table, std::chrono::duration<double, std::milli>(calibrated_in_).count(),
      cost.local.alpha * 1e6, 1e-9 / cost.local.beta, cost.remote.alpha * 1e6,
      1e-9 / cost.remote.beta, 1e-9 / cost.gamma);
}

}  // namespace baton::collectives::internal
