// What the senders of bandwidth and latency tests share.
#include "bench/perftest/perf_sender.h"

#include <algorithm>

namespace baton::bench {

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

}  // namespace baton::bench
