// Senders move the messages of a test: streams for bandwidth, ping and echo for latency. A sender
// does not drive the worker: call step() between rounds of progress.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "bench/perftest/perf_end.h"
#include "bench/perftest/perf_histogram.h"
#include "bench/report/fast_clock.h"

namespace baton::bench {

// The measurements of a sender. Rates are bytes per second.
struct SenderResult {
  uint64_t messages = 0;  // that count: all of them, or those between the margins
  uint64_t sent = 0;      // all
  double seconds = 0;     // in which `messages` ended
  double average = 0;
  double peak = 0;  // the best of any 2 * depth messages in a row; 0 where it is not measured
};

// Must live until open() is 0: transfers report to it.
class PerfSender {
 public:
  virtual ~PerfSender() = default;
  PerfSender(const PerfSender&) = delete;
  PerfSender& operator=(const PerfSender&) = delete;

  virtual void start() = 0;
  // Sends what there is to send; true if anything.
  virtual bool step() = 0;
  virtual bool finished() const = 0;
  virtual SenderResult result() const = 0;

  // Sends nothing from here on.
  void stop() { stopped_ = true; }
  size_t open() const { return open_; }                   // transfers under way
  uint64_t ended() const { return ended_; }               // messages that went well
  const absl::Status& status() const { return status_; }  // the first failure
  const Histogram& latencies() const { return latencies_; }

 protected:
  explicit PerfSender(PerfEnd& end) : end_(end) {}
  static Time now() { return fast_now(); }
  // Sets begin_ and, for a run by time, what is measured of it.
  void start_clock();
  bool by_time() const { return end_.run().iterations == 0; }
  bool measured(Time at) const { return at >= from_ && at <= until_; }
  // A run of `sent` messages has none left to send.
  bool exhausted(uint64_t sent) const;
  SenderResult result_of(uint64_t counted, uint64_t sent, Time last) const;

  PerfEnd& end_;
  bool stopped_ = false;
  size_t open_ = 0;
  uint64_t ended_ = 0;
  absl::Status status_;
  Histogram latencies_;
  Time from_{}, until_ = kNever, stop_at_ = kNever;
};

// Keeps plan().depth messages under way. `each`: take the time of every message, for the peak and
// the histogram (from submit to end).
std::unique_ptr<PerfSender> make_stream(PerfEnd& end, bool each);
// One message at a time, the next when the answer is here. The histogram holds half of the time
// there and back, or all of it for reads.
std::unique_ptr<PerfSender> make_ping(PerfEnd& end);
// The other side of a ping: answers. Never finished before stop().
std::unique_ptr<PerfSender> make_echo(PerfEnd& end);

// Stops a sender and waits until no transfer reports to it any more, by closing the connection if
// there is something under way.
void settle(PerfSender& sender, PerfEnd& end);

}  // namespace baton::bench
