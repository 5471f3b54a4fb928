// The latency tests: a message, its answer, and the time between.
#include "bench/perftest/perf_sender.h"

namespace baton::bench {
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
