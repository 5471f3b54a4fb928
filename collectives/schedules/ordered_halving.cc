// Recursive halving in rank order: reduce_scatter in log2 n rounds that hand on contributions.
//
// The parts halve from round to round and the ranks whose contributions are held double, so that a
// round moves about n / 2 contributions. They are gathered into one message, parts outside,
// contributors inside; where each of them lies is known when the program is written.
#include <iterator>

#include "collectives/schedules/writers.h"

namespace baton::collectives::schedules {
namespace {

// Contributions to a range of parts, by part and then by contributor.
class Held {
 public:
  // Everything that one rank contributes, from `first` on.
  Held(Writer& w, Range parts, uint32_t rank, Place first)
      : w_(&w), parts_(parts), contributors_{rank} {
    for (uint32_t p = 0; p < parts.size(); ++p) {
      places_.push_back({first.buffer, first.part + p});
    }
  }
  // What a peer with these contributors sends for `parts`, received to `first`.
  Held(Writer& w, Range parts, std::vector<uint32_t> contributors, uint32_t first)
      : w_(&w), parts_(parts), contributors_(std::move(contributors)) {
    for (uint32_t i = 0; i < parts.size() * width(); ++i) places_.push_back(scratch(first + i));
  }

  uint32_t width() const { return static_cast<uint32_t>(contributors_.size()); }
  const std::vector<uint32_t>& contributors() const { return contributors_; }
  Place at(uint32_t part, uint32_t i) const { return places_[(part - parts_.first) * width() + i]; }

  Held only(Range parts) const {
    Held out(*w_, parts, contributors_, 0);
    std::copy_n(places_.begin() + (parts.first - parts_.first) * width(), out.places_.size(),
                out.places_.begin());
    return out;
  }
  // Both have the same parts.
  Held with(const Held& other) const {
    std::vector<uint32_t> all;
    std::merge(contributors_.begin(), contributors_.end(), other.contributors_.begin(),
               other.contributors_.end(), std::back_inserter(all));
    Held out(*w_, parts_, std::move(all), 0);
    size_t next = 0;
    for (uint32_t part = parts_.first; part < parts_.end; ++part) {
      uint32_t mine = 0, theirs = 0;
      for (uint32_t rank : out.contributors_) {
        const bool ours = mine < width() && contributors_[mine] == rank;
        out.places_[next++] = ours ? at(part, mine++) : other.at(part, theirs++);
      }
    }
    return out;
  }

  // The places of all of it, one behind the other: where they are, if they stand so already, else
  // in scratch from `staging` on. `except`: a contributor that is not needed.
  Place gathered(uint32_t staging, std::optional<uint32_t> except = std::nullopt) const {
    bool stands = true;
    for (uint32_t i = 0; i < places_.size(); ++i) {
      stands &= places_[i] == Place{places_[0].buffer, places_[0].part + i};
    }
    if (stands) return places_[0];
    for (uint32_t i = 0; i < places_.size(); ++i) {
      if (except && contributors_[i % width()] == *except) continue;
      w_->copy(scratch(staging + i), places_[i]);
    }
    return scratch(staging);
  }
  uint32_t count() const { return static_cast<uint32_t>(places_.size()); }

 private:
  Writer* w_;
  Range parts_;
  std::vector<uint32_t> contributors_;  // ascending
  std::vector<Place> places_;
};

// Core members whose number is `v` modulo `modulo`, and the partners of those that have one.
std::vector<uint32_t> contributors_of(const Core& core, uint32_t v, uint32_t modulo) {
  std::vector<uint32_t> ranks;
  for (uint32_t c = v % modulo; c < core.size; c += modulo) {
    ranks.push_back(core.member(c));
    if (c < core.others) ranks.push_back(core.member(c) + 1);
  }
  return ranks;
}

}  // namespace

void write_ordered_halving(uint32_t n, uint32_t rank, Writer& w) {
  const Core core(everybody(n, rank));
  const auto first = [&core, n](uint32_t v) { return v == core.size ? n : core.member(v); };
  if (!core.inside) {
    w.need_scratch(n);
    w.send(core.partner, input(0), n);
    w.receive(core.partner, scratch(0), n);
    w.fold(output(rank), 0);
    return;
  }
  uint32_t used = 0;  // of scratch; nothing in it is written twice
  const auto take = [&used](uint32_t parts) { return std::exchange(used, used + parts); };

  Held held(w, {0, n}, rank, input(0));
  if (core.has_partner) {
    const uint32_t at = take(n);
    w.receive(core.partner, scratch(at), n);
    held = held.with(Held(w, {0, n}, core.partner, scratch(at)));
  }
  uint32_t low = 0;
  for (uint32_t half = core.size / 2; half > 0; half /= 2) {
    const uint32_t peer = core.v ^ half;
    const Range lower{first(low), first(low + half)}, upper{lower.end, first(low + 2 * half)};
    const bool up = (core.v & half) != 0;
    const Held theirs = held.only(up ? lower : upper);
    w.send(core.rank(peer), theirs.gathered(take(theirs.count())), theirs.count());
    const std::vector<uint32_t> from = contributors_of(core, peer, 2 * half);
    const Range mine = up ? upper : lower;
    const Held received(w, mine, from, take(mine.size() * static_cast<uint32_t>(from.size())));
    w.receive(core.rank(peer), received.at(mine.first, 0), received.count());
    held = held.only(mine).with(received);
    if (up) low += half;
  }
  if (core.has_partner) {
    const Held theirs = held.only({rank + 1, rank + 2});
    w.send(core.partner, theirs.gathered(take(n)), n);
  }
  // The fold takes our own from the input.
  const Place all = held.only({rank, rank + 1}).gathered(take(n), rank);
  w.need_scratch(used);
  w.fold(output(rank), all.part);
}

// Those with the most contributions are the lowest of their half, those with the most parts too.
uint32_t ordered_halving_message(uint32_t n) {
  const Core core(everybody(n, 0));
  const auto first = [&core, n](uint32_t v) { return v == core.size ? n : core.member(v); };
  const auto contributors = [&core](uint32_t v, uint32_t modulo) {
    const uint32_t partners = core.others > v ? (core.others - v + modulo - 1) / modulo : 0;
    return core.size / modulo + partners;
  };
  uint32_t most = core.others > 0 ? n : 1;
  for (uint32_t half = core.size / 2; half > 0; half /= 2) {
    most = std::max({most, (first(2 * half) - first(half)) * contributors(0, 2 * half),
                     first(half) * contributors(half, 2 * half)});
  }
  return most;
}

}  // namespace baton::collectives::schedules
