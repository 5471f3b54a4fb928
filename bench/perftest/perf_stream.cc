// The bandwidth tests: windows and lists of messages, and the best stretch among them.

#include <algorithm>
#include <vector>

#include "bench/perftest/perf_sender.h"

namespace baton::bench {
namespace {

class Stream final : public PerfSender {
 public:
  Stream(PerfEnd& end, bool each)
      : PerfSender(end),
        each_(each),
        flights_(end.plan().depth),
        recent_(each ? 2 * end.plan().depth : 0) {
    for (uint32_t i = 0; i < flights_.size(); ++i) {
      flights_[i].stream = this;
      flights_[i].next_free = i + 1;
    }
  }

  void start() override {
    start_clock();
    last_ = from_;
  }
  bool finished() const override { return open_ == 0 && exhausted(sent_); }
  bool step() override;
  SenderResult result() const override;

 private:
  struct Flight {
    Stream* stream = nullptr;
    Time posted{};
    uint32_t next_free = 0;
  };
  bool post();
  void landed(Flight& flight, const absl::Status& status);

  const bool each_;
  std::vector<Flight> flights_;
  uint32_t free_ = 0;  // head of the list of flights that are not under way
  uint64_t sent_ = 0;
  uint64_t counted_ = 0;
  Time last_{};
  std::vector<Time> recent_;  // a ring: when the last messages that ended were submitted
  uint64_t recent_count_ = 0;
  Time best_ = kNever;  // the shortest time that a ring of messages took
};

bool Stream::step() {
  bool any = false;
  while (open_ < flights_.size() && end_.may_send() && !exhausted(sent_)) {
    size_t list = end_.plan().post_list;
    if (!by_time()) list = std::min<uint64_t>(list, end_.run().iterations - sent_);
    if (flights_.size() - open_ < list) break;
    for (size_t i = 0; i < list; ++i) {
      if (!end_.may_send() || !post()) return any;
      any = true;
    }
  }
  return any;
}

bool Stream::post() {
  Flight& flight = flights_[free_];
  if (each_) flight.posted = now();
  TransferRequest request = end_.request(sent_);
  request.detached = true;
  request.context = &flight;
  request.on_end = [](void* context, TransferId, const absl::Status& status) {
    Flight& ended = *static_cast<Flight*>(context);
    ended.stream->landed(ended, status);
  };
  if (const auto id = end_.worker().submit(request); !id.ok()) {
    status_ = id.status();
    return false;
  }
  end_.count_sent();
  free_ = flight.next_free;
  ++sent_;
  ++open_;
  return true;
}

void Stream::landed(Flight& flight, const absl::Status& status) {
  flight.next_free = free_;
  free_ = static_cast<uint32_t>(&flight - flights_.data());
  --open_;
  if (!status.ok()) {
    if (status_.ok()) status_ = status;
    return;
  }
  ++ended_;
  if (!each_ && !by_time()) {
    ++counted_;
    if (ended_ == end_.run().iterations) last_ = now();
    return;
  }
  const Time at = now();
  if (!measured(at)) return;
  last_ = at;
  ++counted_;
  if (!each_) return;
  latencies_.record(at - flight.posted);
  recent_[recent_count_++ % recent_.size()] = flight.posted;
  if (recent_count_ >= recent_.size()) {
    best_ = std::min(best_, at - recent_[recent_count_ % recent_.size()]);
  }
}

SenderResult Stream::result() const {
  SenderResult out = result_of(counted_, sent_, last_);
  if (!each_) return out;
  out.peak = out.average;
  if (best_ != kNever && best_ > Time(0)) {
    const double bytes = static_cast<double>(recent_.size()) * static_cast<double>(end_.run().size);
    out.peak = std::max(out.peak, bytes / std::chrono::duration<double>(best_).count());
  }
  return out;
}

}  // namespace

std::unique_ptr<PerfSender> make_stream(PerfEnd& end, bool each) {
  return std::make_unique<Stream>(end, each);
}

void PerfSender::start_clock() {
  from_ = now();
  if (!by_time()) return;
  stop_at_ = from_ + end_.run().length();
  until_ = stop_at_ - end_.run().unmeasured();
  from_ += end_.run().unmeasured();
}

bool PerfSender::exhausted(uint64_t sent) const {
  if (stopped_ || !status_.ok()) return true;
  return by_time() ? now() >= stop_at_ : sent >= end_.run().iterations;
}

SenderResult PerfSender::result_of(uint64_t counted, uint64_t sent, Time last) const {
  SenderResult out{.messages = counted, .sent = sent};
  const Time end = by_time() ? std::min(until_, now()) : last;
  out.seconds = std::max(0.0, std::chrono::duration<double>(end - from_).count());
  const double bytes = static_cast<double>(counted) * static_cast<double>(end_.run().size);
  if (out.seconds > 0) out.average = bytes / out.seconds;
  return out;
}

void settle(PerfSender& sender, PerfEnd& end) {
  sender.stop();
  // No fence: a run ended by force is the connection's last, and the other side's buffer is its own
  // again only after it has heard of the end.
  if (sender.open() > 0) end.worker().disconnect(end.peer(), Time::zero()).IgnoreError();
  while (sender.open() > 0) end.worker().progress();
}

// The latency tests: a message, its answer, and the time between.

namespace {

using Verb = PerfTest::Verb;

// What ping and echo share: sending message `number`, and seeing that one has arrived.
class PingPongSender : public PerfSender {
 protected:
  explicit PingPongSender(PerfEnd& end) : PerfSender(end), verb_(end.plan().test.verb) {}

  // The place in memory that message `number` is sent from may be written again.
  bool may_send(uint64_t number) const {
    const size_t slots = end_.plan().slots(end_.run().size);
    return verb_ == Verb::kRead || number < ended_ + slots;
  }

  void send(uint64_t number) {
    if (verb_ != Verb::kRead) end_.mark(number);
    TransferRequest request = end_.request(number);
    request.detached = true;
    request.context = this;
    request.on_end = [](void* context, TransferId, const absl::Status& status) {
      PingPongSender& self = *static_cast<PingPongSender*>(context);
      --self.open_;
      if (status.ok()) {
        ++self.ended_;
      } else if (self.status_.ok()) {
        self.status_ = status;
      }
    };
    if (const auto id = end_.worker().submit(request); !id.ok()) {
      status_ = id.status();
    } else {
      ++open_;
    }
  }

  // Message `number` of the other side is here (for a read: our own).
  bool arrived(uint64_t number) const {
    return verb_ == Verb::kRead ? ended_ > number : end_.marked(number);
  }

  const Verb verb_;
};

class Ping final : public PingPongSender {
 public:
  explicit Ping(PerfEnd& end) : PingPongSender(end) {}

  void start() override {
    start_clock();
    last_ = from_;
  }

  bool step() override {
    if (waiting_) {
      if (!arrived(number_)) return false;
      last_ = now();
      const Time round = last_ - sent_at_;
      if (measured(last_)) {
        latencies_.record(verb_ == Verb::kRead ? round : round / 2);
        ++counted_;
      }
      waiting_ = false;
      ++number_;
    }
    if (exhausted(number_) || !may_send(number_)) return false;
    sent_at_ = now();
    send(number_);
    waiting_ = status_.ok();
    return true;
  }

  bool finished() const override {
    return open_ == 0 && (!status_.ok() || (!waiting_ && exhausted(number_)));
  }

  SenderResult result() const override { return result_of(counted_, number_, last_); }

 private:
  bool waiting_ = false;
  uint64_t number_ = 0;
  uint64_t counted_ = 0;
  Time sent_at_{};
  Time last_{};
};

class Echo final : public PingPongSender {
 public:
  explicit Echo(PerfEnd& end) : PingPongSender(end) {}
  void start() override { start_clock(); }
  bool step() override {
    bool any = false;
    while (!stopped_ && status_.ok() && may_send(number_) && arrived(number_)) {
      send(number_++);
      any = true;
    }
    return any;
  }
  bool finished() const override { return open_ == 0 && (stopped_ || !status_.ok()); }
  SenderResult result() const override { return result_of(number_, number_, from_); }

 private:
  uint64_t number_ = 0;
};

}  // namespace

std::unique_ptr<PerfSender> make_ping(PerfEnd& end) { return std::make_unique<Ping>(end); }
std::unique_ptr<PerfSender> make_echo(PerfEnd& end) { return std::make_unique<Echo>(end); }

}  // namespace baton::bench
