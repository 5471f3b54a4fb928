// A provider behind a link of chosen bandwidth and latency.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "transport/base/ring.h"
#include "transport/base/small_first.h"
#include "transport/decorators.h"
#include "transport/decorators/decorated.h"

namespace baton {
namespace {

constexpr size_t kLeastSlice = 4 << 10;
constexpr uint32_t kDepth = 4096;
constexpr Time kSliceTime = std::chrono::milliseconds(1);

class ShapedProvider;

class ShapedRail final : public decorators::DecoratedRail {
 public:
  ShapedRail(std::unique_ptr<Rail> inner, ShapedProvider& provider, const LinkShape& shape);
  ~ShapedRail() override;

  bool post(const Slice& slice, EventSink& sink) override;
  void abort(TransferId transfer, EventSink& sink) override;
  void close(absl::Status why, EventSink& sink) override;

  // The link has delivered the slice.
  void deliver(const Slice& slice, EventSink& sink);
  // Offers the inner rail what it had no room for.
  bool retry(EventSink& sink);
  // Takes out what has been delivered but not been taken by the inner rail.
  void take_delivered(const TransferId* transfer, std::vector<Slice>& out);
  // A slice was reported.
  void finished() { --held_; }
  bool blocked() const { return !delivered_.empty(); }

 private:
  ShapedProvider& provider_;
  uint32_t held_ = 0;            // taken and not reported
  base::Ring<Slice> delivered_;  // off the link, the inner rail was full
};

// One direction of the link. Times of departure are computed when they have passed, so that a
// cancelled slice costs those behind it nothing.
class LinkDirection {
 public:
  explicit LinkDirection(const LinkShape& shape) : shape_(shape) {}

  void push(ShapedRail& rail, const Slice& slice, Time now) {
    const bool urgent = slice.transfer->bytes <= kUrgentBytes;
    (urgent ? urgent_ : bulk_).push_back({&rail, slice, now, Time{}});
  }

  // Hands over what has come out of the link by `now`; true if anything has.
  bool run(Time now, EventSink& sink) {
    depart(now);
    bool any = false;
    while (!travelling_.empty() && travelling_.front().at <= now) {
      const Entry entry = travelling_.front();
      travelling_.pop_front();
      entry.rail->deliver(entry.slice, sink);
      any = true;
    }
    return any;
  }

  Time next() const {
    if (!travelling_.empty()) return travelling_.front().at;
    const base::Ring<Entry>* queue = next_queue();
    return queue == nullptr ? kNever : round_up(end_of(queue->front())) + shape_.latency;
  }

  // Takes out entries of `rail` (and of `transfer`, if given) and calls f(slice) for each.
  template <typename F>
  void remove(const ShapedRail& rail, const TransferId* transfer, Time now, F f) {
    depart(now);
    const auto gone = [&](const Entry& entry) {
      return entry.rail == &rail && (transfer == nullptr || entry.slice.transfer->id == *transfer);
    };
    // The one on the link has used it until now.
    if (const base::Ring<Entry>* queue = next_queue(); queue != nullptr && gone(queue->front())) {
      if (start_of(queue->front()) < count(now)) free_at_ = count(now);
    }
    for (base::Ring<Entry>* queue : {&travelling_, &urgent_, &bulk_}) {
      queue->remove_if([&](Entry& entry) {
        if (!gone(entry)) return false;
        f(entry.slice);
        return true;
      });
    }
  }

 private:
  struct Entry {
    ShapedRail* rail = nullptr;
    Slice slice;
    Time posted{};
    Time at{};  // when it comes out at the other end, once it has departed
  };
  static double count(Time time) { return static_cast<double>(time.count()); }
  static Time round_up(double nanoseconds) {
    return Time(static_cast<int64_t>(std::ceil(nanoseconds - 1e-3)));
  }
  double start_of(const Entry& entry) const { return std::max(free_at_, count(entry.posted)); }
  double end_of(const Entry& entry) const {
    const double bytes = static_cast<double>(entry.slice.end - entry.slice.begin);
    const double rate = shape_.bytes_per_second;
    return start_of(entry) + (rate > 0 ? bytes / rate * 1e9 : 0);
  }
  const base::Ring<Entry>* next_queue() const {
    if (urgent_.empty()) return bulk_.empty() ? nullptr : &bulk_;
    if (bulk_.empty()) return &urgent_;
    const double urgent = start_of(urgent_.front());
    const double bulk = start_of(bulk_.front());
    return urgent < bulk || (urgent == bulk && !turns_.large_is_due()) ? &urgent_ : &bulk_;
  }
  void depart(Time now) {
    while (auto* queue = const_cast<base::Ring<Entry>*>(next_queue())) {
      Entry entry = queue->front();
      const double end = end_of(entry);
      if (round_up(end) > now) return;
      free_at_ = end;
      entry.at = round_up(end) + shape_.latency;
      if (queue == &urgent_) {
        turns_.small_went(entry.slice.end - entry.slice.begin, !bulk_.empty());
      } else {
        turns_.large_went();
      }
      queue->pop_front();
      travelling_.push_back(entry);
    }
  }

  const LinkShape shape_;
  double free_at_ = 0;  // nanoseconds
  base::Ring<Entry> urgent_;
  base::Ring<Entry> bulk_;
  base::SmallFirst turns_;        // of the two
  base::Ring<Entry> travelling_;  // off the link, still under way
};

class ShapedProvider final : public decorators::DecoratedProvider {
 public:
  ShapedProvider(std::unique_ptr<Provider> inner, LinkShape shape, const Clock& clock)
      : decorators::DecoratedProvider(std::move(inner)),
        shape_(shape),
        clock_(clock),
        directions_{LinkDirection(shape), LinkDirection(shape)} {}

  bool progress(EventSink& sink) override {
    bool any = decorators::DecoratedProvider::progress(sink);
    any |= run(sink);
    // By index: a rail that fails may leave the list meanwhile.
    for (size_t i = 0; i < rails_.size(); ++i) {
      if (rails_[i]->blocked()) any |= rails_[i]->retry(sink);
    }
    return any;
  }
  bool arm() override {
    return next_timer() > clock_.now() && decorators::DecoratedProvider::arm();
  }
  Time next_timer() const override {
    return std::min({inner_->next_timer(), directions_[0].next(), directions_[1].next()});
  }

  bool run(EventSink& sink) {
    const Time now = clock_.now();
    const bool out = directions_[0].run(now, sink);
    return directions_[1].run(now, sink) || out;
  }
  void push(ShapedRail& rail, const Slice& slice) {
    directions_[slice.transfer->op == Op::kRead].push(rail, slice, clock_.now());
  }
  template <typename F>
  void remove(const ShapedRail& rail, const TransferId* transfer, F f) {
    for (LinkDirection& direction : directions_) direction.remove(rail, transfer, clock_.now(), f);
  }
  void add(ShapedRail& rail) { rails_.push_back(&rail); }
  void forget(ShapedRail& rail) {
    remove(rail, nullptr, [](const Slice&) {});
    rails_.erase(std::remove(rails_.begin(), rails_.end(), &rail), rails_.end());
  }
  // Reports what is on the link or waits for it, and what has been delivered but not been taken.
  void report_all(ShapedRail& rail, const TransferId* transfer, const absl::Status& why,
                  EventSink& sink) {
    std::vector<Slice> gone;  // all taken out first: a report may lead to another abort()
    remove(rail, transfer, [&](const Slice& slice) { gone.push_back(slice); });
    rail.take_delivered(transfer, gone);
    for (const Slice& slice : gone) {
      rail.finished();
      sink.slice_done(rail, slice.transfer->id, slice.index, why);
    }
  }

 protected:
  std::unique_ptr<Rail> decorate(std::unique_ptr<Rail> inner) override {
    return std::make_unique<ShapedRail>(std::move(inner), *this, shape_);
  }
  void on_slice_done(decorators::DecoratedRail& rail, TransferId transfer, uint32_t slice,
                     absl::Status status, EventSink& sink) override {
    auto& outer = static_cast<ShapedRail&>(rail);
    outer.finished();
    sink.slice_done(rail, transfer, slice, std::move(status));
    if (outer.blocked()) outer.retry(sink);
  }
  void on_rail_down(decorators::DecoratedRail& rail, absl::Status why, EventSink& sink) override {
    report_all(static_cast<ShapedRail&>(rail), nullptr, absl::UnavailableError(why.message()),
               sink);
    sink.rail_down(rail, std::move(why));
  }

 private:
  friend class ShapedRail;
  const LinkShape shape_;
  const Clock& clock_;
  LinkDirection directions_[2];  // writes, reads
  std::vector<ShapedRail*> rails_;
};

ShapedRail::ShapedRail(std::unique_ptr<Rail> inner, ShapedProvider& provider,
                       const LinkShape& shape)
    : decorators::DecoratedRail(std::move(inner)), provider_(provider) {
  provider_.add(*this);
  properties_.route = absl::StrCat(properties_.route, ", shaped to ", shape.to_string());
  properties_.depth = kDepth;
  if (shape.bytes_per_second > 0) {
    properties_.bytes_per_second = std::min(properties_.bytes_per_second, shape.bytes_per_second);
    if (properties_.slice_bytes != SIZE_MAX) {
      const double span =
          shape.bytes_per_second * std::chrono::duration<double>(kSliceTime).count();
      const size_t cut = std::max(kLeastSlice, static_cast<size_t>(std::min(span, 1e12)));
      properties_.slice_bytes = std::min(properties_.slice_bytes, cut);
    }
  }
}

ShapedRail::~ShapedRail() { provider_.forget(*this); }

bool ShapedRail::post(const Slice& slice, EventSink& sink) {
  if (held_ == kDepth) return false;
  ++held_;
  provider_.push(*this, slice);
  provider_.run(sink);  // an unlimited link delivers at once
  return true;
}

void ShapedRail::deliver(const Slice& slice, EventSink& sink) {
  decorators::DecoratedProvider::Sink inside(provider_, sink);
  if (blocked() || !inner_->post(slice, inside)) delivered_.push_back(slice);
}

bool ShapedRail::retry(EventSink& sink) {
  decorators::DecoratedProvider::Sink inside(provider_, sink);
  bool any = false;
  while (!delivered_.empty()) {
    const Slice slice = delivered_.front();
    delivered_.pop_front();  // first: post() may report it, which comes back here
    if (!inner_->post(slice, inside)) {
      delivered_.push_front(slice);
      break;
    }
    any = true;
  }
  return any;
}

void ShapedRail::take_delivered(const TransferId* transfer, std::vector<Slice>& out) {
  delivered_.remove_if([&](const Slice& slice) {
    if (transfer != nullptr && slice.transfer->id != *transfer) return false;
    out.push_back(slice);
    return true;
  });
}

void ShapedRail::abort(TransferId transfer, EventSink& sink) {
  provider_.report_all(*this, &transfer, absl::CancelledError("cancelled"), sink);
  decorators::DecoratedProvider::Sink inside(provider_, sink);
  inner_->abort(transfer, inside);
}

void ShapedRail::close(absl::Status why, EventSink& sink) {
  provider_.report_all(*this, nullptr, why, sink);
  decorators::DecoratedProvider::Sink inside(provider_, sink);
  inner_->close(std::move(why), inside);
}

// "12.5MB/s" -> 12.5e6, with what follows the number looked up in `units`.
template <size_t N>
bool parse_quantity(std::string_view text, const std::pair<const char*, double> (&units)[N],
                    double& value) {
  const std::string copy(text);
  char* rest = nullptr;
  const double number = std::strtod(copy.c_str(), &rest);
  if (rest == copy.c_str() || !(number >= 0) || !std::isfinite(number)) return false;
  std::string_view unit = rest;
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  for (const auto& [name, factor] : units) {
    if (unit == name) {
      value = number * factor;
      return true;
    }
  }
  return false;
}

constexpr std::pair<const char*, double> kRates[] = {
    {"B/s", 1},       {"kB/s", 1e3},     {"KB/s", 1e3},     {"MB/s", 1e6},     {"GB/s", 1e9},
    {"b/s", 1.0 / 8}, {"kb/s", 1e3 / 8}, {"Kb/s", 1e3 / 8}, {"Mb/s", 1e6 / 8}, {"Gb/s", 1e9 / 8},
};
constexpr std::pair<const char*, double> kTimes[] = {
    {"ns", 1}, {"us", 1e3}, {"ms", 1e6}, {"s", 1e9}};

}  // namespace

absl::StatusOr<LinkShape> LinkShape::parse(std::string_view text) {
  LinkShape shape;
  bool has_rate = false;
  bool has_latency = false;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t comma = std::min(text.find(',', begin), text.size());
    const std::string_view part = text.substr(begin, comma - begin);
    begin = comma + 1;
    double value = 0;
    if (!has_rate && parse_quantity(part, kRates, value) && value > 0) {
      shape.bytes_per_second = value;
      has_rate = true;
    } else if (!has_latency && parse_quantity(part, kTimes, value) && value < 3600e9) {
      shape.latency = Time(std::llround(value));
      has_latency = true;
    } else {
      return absl::InvalidArgumentError(absl::StrFormat(
          "\"%s\" is not a link: write a bandwidth, a latency or both, like \"40MB/s\", "
          "\"10Gb/s\" or \"40MB/s,200us\"",
          text));
    }
  }
  return shape;
}

std::string LinkShape::to_string() const {
  std::string out = bytes_per_second <= 0    ? "unlimited bandwidth"
                    : bytes_per_second < 1e9 ? absl::StrFormat("%.4g MB/s", bytes_per_second / 1e6)
                                             : absl::StrFormat("%.4g GB/s", bytes_per_second / 1e9);
  if (latency > Time{}) {
    absl::StrAppendFormat(&out, ", %.4g us", static_cast<double>(latency.count()) / 1e3);
  }
  return out;
}

std::unique_ptr<Provider> shaped(std::unique_ptr<Provider> inner, LinkShape shape,
                                 const Clock& clock) {
  return std::make_unique<ShapedProvider>(std::move(inner), shape, clock);
}

}  // namespace baton
